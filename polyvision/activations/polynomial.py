"""Polynomial composition activations as modules.

Source: Zhuo et al., 2024, https://arxiv.org/abs/2411.03884 (equations 1-3, Algorithms 1 and 2).
Every class takes ``inplace`` as its first argument because timm passes it, and ignores it: the
backward pass needs the input. Bad values raise ``ValueError``, since timm retries on ``TypeError``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from polyvision import functional
from polyvision.activations.base.coefficients import Polynomial, integer, is_traced, step_of_a_graph
from polyvision.activations.base.shared import wide
from polyvision.activations.bases import base_function
from polyvision.activations.registry import (
    register_activation,
)
from polyvision.errors import PolyvisionError, unknown

__all__ = [
    "PolyCom",
    "PolyNorm",
    "PolyNorm2d",
    "PolyPReLU",
    "PolyReLU",
    "PolyReLUNorm",
]

_NORMS = ("rms", "l2")
_PAPER = "Zhuo et al. 2024, https://arxiv.org/abs/2411.03884"


@register_activation(
    "polynorm",
    kind="normalising",
    source=_PAPER,
    formula="sum_i w_i x^i / rms(x^i) + b",
)
class PolyNorm(Polynomial):
    r"""PolyNorm: powers of the input, each normalised over ``dim``, in a learned combination.

    .. math:: y = \sum_{i=1}^{r} w_{i-1}\, x^i / \sqrt{\mathrm{mean}_{dim}(x^{2i}) + \epsilon} + b

    Args:
        inplace: accepted and ignored.
        order: highest power r, 1 to 8.
        eps: added to each mean of squares.
        dim: the feature dimension; -1 for (..., features), 1 for NCHW (see ``PolyNorm2d``).
        bias: learn a constant term.
        device: where the coefficients live.
        dtype: dtype of the coefficients; the output has the input's dtype whatever it is.
        groups: a set of coefficients for each of so many groups of rows, such as the experts of a
            mixture; the call then takes the group of each row. None for one set.
        norm: ``rms`` divides by the root mean square, as the paper's Algorithm 2 and its code;
            ``l2`` by the L2 norm, as its equation 3. In a row of n the second is the first,
            constant term included, divided by sqrt(n).

    Shape:
        Input and output: any shape with ``dim``. Parameters: ``weight`` (order,), ``bias`` (1,), or
        (groups, order) and (groups, 1).

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> PolyNorm(order=2)(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """

    _function = "PolyNorm"

    def __init__(
        self,
        inplace: bool = False,
        *,
        order: int = 3,
        eps: float = 1e-6,
        dim: int = -1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        groups: int | None = None,
        norm: Literal["rms", "l2"] = "rms",
    ) -> None:
        super().__init__(order, bias, device, dtype, groups)
        if norm not in _NORMS:
            raise unknown(f"norm of {type(self).__name__}", norm, _NORMS)
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < math.inf:
            raise ValueError(
                f"{type(self).__name__}: eps must be a finite number greater than 0, got {eps!r}"
            )
        if not integer(dim):
            raise ValueError(f"{type(self).__name__}: dim must be an integer, got {dim!r}")
        self.eps = eps
        self.dim = dim
        self.norm = norm

    def function_name(self) -> str:
        """Name the function that the coefficients belong to, and its norm unless it is RMS."""
        return self._function + ("" if self.norm == "rms" else f"(norm={self.norm})")

    def coefficients(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias for the kernels, which divide the rows of ``x`` by their RMS."""
        if self.norm == "rms":
            return self.weight, self.bias
        bias = None if self.bias is None else _over_root(self.bias, x, self.dim)
        return _over_root(self.weight, x, self.dim), bias

    def forward(self, x: Tensor, group: Tensor | None = None) -> Tensor:
        """Apply the activation to ``x``; ``group`` names the coefficients of each row."""
        weight, bias = self.coefficients(x)
        return functional.poly_norm(x, weight, bias, self.eps, dim=self.dim, group=group)

    def extra_repr(self) -> str:
        """Show the settings that the function depends on."""
        shown = f"order={self.order}, eps={self.eps}, dim={self.dim}"
        shown += "" if self.bias is not None else ", bias=False"
        return shown + ("" if self.norm == "rms" else f", norm={self.norm!r}")


def _over_root(values: Tensor, x: Tensor, dim: int) -> Tensor:
    """Divide coefficients by the root of the length of a row, in fp32 or fp64."""
    return wide(values) / math.sqrt(max(x.shape[dim], 1))


torch.fx.wrap("_over_root")


class PolyNorm2d(PolyNorm):
    """PolyNorm over the channels of NCHW images (``dim=1``), for ``timm``'s ``act_layer=``.

    Arguments, parameters and errors are those of ``PolyNorm``.

    Example:
        >>> PolyNorm2d()(torch.randn(2, 8, 4, 4)).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        order: int = 3,
        eps: float = 1e-6,
        dim: int = 1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        norm: Literal["rms", "l2"] = "rms",
    ) -> None:
        super().__init__(
            inplace, order=order, eps=eps, dim=dim, bias=bias, device=device, dtype=dtype, norm=norm
        )


@register_activation(
    "polyrelunorm",
    kind="normalising",
    source=_PAPER,
    formula="sum_i w_i max(x, 0)^i / rms(max(x, 0)^i) + b",
)
class PolyReLUNorm(PolyNorm):
    """PolyNorm of the rectified input; named in the paper's ablation, which leaves its form open.

    Arguments, parameters and errors are those of ``PolyNorm``.

    Example:
        >>> PolyReLUNorm(order=1)(torch.tensor([[-3.0, 0.0]])).tolist()
        [[0.0, 0.0]]
    """

    _function = "PolyReLUNorm"

    def forward(self, x: Tensor, group: Tensor | None = None) -> Tensor:
        """Apply the activation to ``x``; ``group`` names the coefficients of each row."""
        weight, bias = self.coefficients(x)
        return functional.poly_relu_norm(x, weight, bias, self.eps, dim=self.dim, group=group)


@register_activation(
    "polyrelu",
    kind="pointwise",
    source=_PAPER,
    formula="sum_i w_i max(x, 0)^i + b",
)
class PolyReLU(Polynomial):
    r"""PolyReLU: a learned polynomial of the rectified input.

    .. math:: y = \sum_{i=1}^{r} w_{i-1}\, \max(x, 0)^i + b

    Nothing bounds the powers: with order 3 an fp16 output overflows near x = 58. Prefer PolyNorm or
    ``init="base"`` where no normalisation stands before the activation, as on a residual path.

    Args:
        inplace: accepted and ignored.
        order: highest power r, 1 to 8.
        bias: learn a constant term.
        device: where the coefficients live.
        dtype: dtype of the coefficients.
        groups: as for ``PolyNorm``.
        init: ``equal`` for coefficients 1/order, the paper's; ``base`` for (1, 0, ..., 0), ReLU.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> PolyReLU(order=2)(torch.tensor([-1.0, 2.0])).tolist()
        [0.0, 3.0]
    """

    _function = "PolyReLU"

    def __init__(
        self,
        inplace: bool = False,
        *,
        order: int = 3,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        groups: int | None = None,
        init: Literal["equal", "base"] = "equal",
    ) -> None:
        super().__init__(order, bias, device, dtype, groups, init)

    def forward(self, x: Tensor, group: Tensor | None = None) -> Tensor:
        """Apply the activation to ``x``; ``group`` names the coefficients of each row."""
        return functional.poly_relu(x, self.weight, self.bias, group=group)

    def extra_repr(self) -> str:
        """Show the settings that the function depends on."""
        return f"order={self.order}" + ("" if self.bias is not None else ", bias=False")


@register_activation(
    "polyprelu",
    kind="pointwise",
    source=_PAPER,
    formula="sum_i w_i (max(x, 0) + s min(x, 0))^i + b",
)
class PolyPReLU(Polynomial):
    r"""PolyPReLU: a learned polynomial of PReLU, whose slope for negative inputs is learned too.

    .. math:: y = \sum_{i=1}^{r} w_{i-1}\, (\max(x, 0) + s \min(x, 0))^i + b

    Args:
        inplace: accepted and ignored.
        order: highest power r, 1 to 8.
        bias: learn a constant term.
        slope: initial value of s; the paper gives none, this is that of ``torch.nn.PReLU``.
        num_parameters: 1 for one slope, or the number of channels for a slope each, as in
            ``torch.nn.PReLU``.
        dim: the dimension of the channels; only read where ``num_parameters`` is not 1.
        device: where the coefficients live.
        dtype: dtype of the coefficients.
        init: ``equal`` for coefficients 1/order; ``base`` for (1, 0, ..., 0), PReLU.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> PolyPReLU(order=1)(torch.tensor([-4.0, 2.0])).tolist()
        [-1.0, 2.0]
    """

    _function = "PolyPReLU"

    def __init__(
        self,
        inplace: bool = False,
        *,
        order: int = 3,
        bias: bool = True,
        slope: float = 0.25,
        num_parameters: int = 1,
        dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        init: Literal["equal", "base"] = "equal",
    ) -> None:
        if (
            isinstance(slope, bool)
            or not isinstance(slope, int | float)
            or not math.isfinite(slope)
        ):
            raise PolyvisionError(f"PolyPReLU: slope must be a finite number, got {slope!r}")
        if not integer(num_parameters) or num_parameters < 1:
            raise PolyvisionError(
                f"PolyPReLU: num_parameters must be a positive integer, got {num_parameters!r}"
            )
        if not integer(dim):
            raise PolyvisionError(f"PolyPReLU: dim must be an integer, got {dim!r}")
        self._initial_slope = slope
        super().__init__(order, bias, device, dtype, init=init)
        self.slope = nn.Parameter(
            torch.full((num_parameters,), float(slope), device=device, dtype=dtype)
        )
        if num_parameters != 1:
            self.dim = dim

    def reset_parameters(self) -> None:
        """Set the coefficients to what ``init`` names, bias to 0, slope to its initial value."""
        super().reset_parameters()
        if "slope" in self._parameters:
            nn.init.constant_(self.slope, self._initial_slope)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        # The function has its channels in dim 1.
        dim = getattr(self, "dim", 1)
        y = functional.poly_relu(
            x if dim == 1 else x.movedim(dim, 1), self.weight, self.bias, slope=self.slope
        )
        return y if dim == 1 else y.movedim(1, dim)

    def extra_repr(self) -> str:
        """Show the settings that the function depends on."""
        channels = (
            f", num_parameters={len(self.slope)}, dim={self.dim}" if hasattr(self, "dim") else ""
        )
        return f"order={self.order}" + ("" if self.bias is not None else ", bias=False") + channels


@register_activation(
    "polycom",
    kind="pointwise",
    source=_PAPER,
    formula="sum_i w_i rho(x)^i + b, or rho(x^i)",
)
class PolyCom(Polynomial):
    """Polynomial composition with any base function, equation 1 of the paper.

    Composed from torch operations, slower than the fused members of the family; it keeps only its
    input for the backward pass.

    Args:
        inplace: accepted and ignored.
        rho: the base: name of a registered pointwise activation or ``identity``, or (in Python
            only) a function or module of one tensor, deterministic, such as ``torch.tanh``. A
            module's parameters are learned (of ``prelu`` its slope); those of a module that is
            passed stay on their device and in their dtype. To pickle a PolyCom, its function must
            be one that can be imported.
        kind: "I" for powers of rho(x), "II" for rho of the powers.
        order: highest power r, 1 to 8.
        bias: learn a constant term.
        device: where the coefficients live.
        dtype: dtype of the coefficients.
        init: ``equal`` for coefficients 1/order; ``base`` for (1, 0, ..., 0), ``rho`` alone.

    Raises:
        ValueError: a value is out of range, there is no such activation, or ``rho`` is neither a
            name nor a function.

    Example:
        >>> PolyCom(rho="relu2", order=1)(torch.tensor([-1.0, 3.0])).tolist()
        [0.0, 9.0]
        >>> PolyCom(rho=torch.square, kind="II", order=1)(torch.tensor([-3.0])).tolist()
        [9.0]
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        rho: str | Callable[[Tensor], Tensor] = "silu",
        kind: str = "I",
        order: int = 3,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        init: Literal["equal", "base"] = "equal",
    ) -> None:
        super().__init__(order, bias, device, dtype, init=init)
        if kind not in ("I", "II"):
            raise PolyvisionError(f"PolyCom: kind must be 'I' or 'II', got {kind!r}")
        self.kind = kind
        self.rho = base_function(rho, device, dtype)

    def function_name(self) -> str:
        """Name the function that the coefficients belong to, with base and kind."""
        base = getattr(self.rho, "__name__", type(self.rho).__name__).lstrip("_")
        return f"PolyCom(rho={base}, kind={self.kind})"

    def reset_parameters(self) -> None:
        """Set the coefficients to 1/order and the bias to 0, and those of the base to its own."""
        super().reset_parameters()
        reset = getattr(getattr(self, "rho", None), "reset_parameters", None)
        if reset is not None:
            reset()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        if is_traced(x):  # a graph takes no function as an argument
            step: Tensor | None = step_of_a_graph(self, x)
            if step is None:
                raise PolyvisionError(
                    "PolyCom is a single step for torch.fx: trace the network that holds it"
                )
            return step
        return functional.polycom(x, self.weight, self.bias, rho=self.rho, kind=self.kind)

    def extra_repr(self) -> str:
        """Show the settings that the function depends on."""
        name = getattr(self.rho, "__name__", None) or repr(self.rho)
        rho = "" if isinstance(self.rho, nn.Module) else f"rho={name}, "
        return f"{rho}kind={self.kind!r}, order={self.order}" + (
            "" if self.bias is not None else ", bias=False"
        )
