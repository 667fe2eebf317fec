"""``act=formula``: an activation given as one line of text, with learned names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from polyvision.activations.base.coefficients import Coefficients, integer
from polyvision.activations.base.expression import (
    CONSTANTS,
    FUNCTIONS,
    INPUT,
    Expression,
    Node,
    compute,
    mistake,
    read_expression,
)
from polyvision.activations.base.shared import finite
from polyvision.activations.registry import Kind, register_activation
from polyvision.errors import PolyvisionError, did_you_mean
from polyvision.kernels.reference import compute_dtype
from polyvision.recompute import recompute

__all__ = ["Formula", "apply_formula"]

torch.fx.wrap("apply_formula")

_RESERVED = frozenset({"dim", "f", "num_parameters", "training"})  # attributes of every instance
_GRID = 8.0  # a formula must be finite from minus this to this, and so must its derivatives


def _kind(options: Mapping[str, Any]) -> Kind:
    whole_rows = read_expression(options["f"]).normalising or options["num_parameters"] != 1
    return "normalising" if whole_rows else "pointwise"  # the former is told its feature dimension


@register_activation(
    "formula",
    kind=_kind,
    source="the user's own, of functions of https://pytorch.org/docs/stable/torch.html",
    formula="f, such as x tanh(softplus(b x)) with a learned b",
)
class Formula(Coefficients):
    """An activation written as text; its free names are learned.

    The text has the syntax of Python: numbers, ``+ - * / **``, ``x`` for the input, the constants
    ``pi`` and ``e``, and the functions ``abs sign square sqrt rsqrt exp expm1 log log1p sin cos
    atan sinh cosh tanh asinh erf erfc sigmoid logsigmoid softplus relu gelu silu mish max min clamp
    where``; ``where(x > 0, a, b)`` takes one comparison. With ``mean(...)`` or ``rms(...)``, which
    are taken over the features (``rms(v) = sqrt(mean(v^2) + 1e-6)``), the activation is
    normalising. The text is read, never run. Every other name is a parameter.

    fp16 and bf16 inputs are computed in fp32. Only the input is kept for the backward pass.

    Args:
        inplace: accepted and ignored.
        f: the formula.
        init: initial value of each free name.
        dim: the feature dimension, of ``mean`` and ``rms`` and of parameters for each channel.
        num_parameters: 1 for one value of each name, or the number of channels for a value each.
        device: where the parameters live.
        dtype: their dtype.

    Raises:
        ValueError: a mistake in the formula, with its column; a name without an initial value; a
            formula or derivative that is not finite everywhere from -8 to 8 at the initial values.

    Example:
        >>> act = Formula(f="x * tanh(softplus(b * x))", init={"b": 1.0})
        >>> act(torch.tensor([0.0, 20.0])).tolist()
        [0.0, 20.0]
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        f: str = "x * sigmoid(x)",
        init: dict[str, float] | None = None,
        dim: int = -1,
        num_parameters: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(f, str):
            raise PolyvisionError(f"Formula: f must be text, got {f!r}")
        if not integer(dim):
            raise PolyvisionError(f"Formula: dim must be an integer, got {dim!r}")
        if not integer(num_parameters) or num_parameters < 1:
            raise PolyvisionError(
                f"Formula: num_parameters must be a positive integer, got {num_parameters!r}"
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise PolyvisionError(
                f"Formula: dtype must be a floating-point torch.dtype, got {dtype!r}"
            )
        if not isinstance(init, Mapping | None):
            raise PolyvisionError(f"Formula: init must be a dict of numbers by name, got {init!r}")
        expression = read_expression(f)
        self._initial = _initial_values(expression, init or {})
        _check_finite(f, tuple(self._initial.items()))
        self.f, self.num_parameters = f, num_parameters
        if expression.normalising or num_parameters != 1:
            self.dim = dim
        for name in self._initial:
            values = torch.empty(num_parameters, device=device, dtype=dtype)
            setattr(self, name, nn.Parameter(values))
        self.reset_parameters()

    def function_name(self) -> str:
        """Name the function that the parameters belong to: others have the same names."""
        return f"Formula({read_expression(self.f).plain()})"

    def reset_parameters(self) -> None:
        """Set the parameters to their initial values."""
        for name, value in self._initial.items():
            nn.init.constant_(getattr(self, name), value)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the formula to ``x``."""
        parameters = {name: getattr(self, name) for name in self._initial}
        return apply_formula(x, self.f, parameters, getattr(self, "dim", -1))

    def extra_repr(self) -> str:
        """Show the formula and what else the function depends on."""
        shown = [repr(self.f), *(f"{name}={value:g}" for name, value in self._initial.items())]
        shown += [f"num_parameters={self.num_parameters}"] if self.num_parameters != 1 else []
        shown += [f"dim={self.dim}"] if hasattr(self, "dim") else []
        return ", ".join(shown)


def apply_formula(x: Tensor, f: str, parameters: Mapping[str, Tensor], dim: int = -1) -> Tensor:
    """Compute the formula ``f`` of ``x``; only the arguments are kept for the backward pass.

    Args:
        x: floating-point tensor of any shape.
        f: the formula, as ``Formula`` takes it.
        parameters: the tensor of each free name, of one element, or of one for each channel.
        dim: the feature dimension.

    Raises:
        PolyvisionError: a mistake in the formula, or a tensor that does not fit.

    Example:
        >>> apply_formula(torch.tensor([1.0, -2.0]), "a * relu(x)", {"a": torch.tensor([3.0])})
        tensor([3., 0.])
    """
    if not x.is_floating_point():
        raise PolyvisionError(f"formula {f!r}: x must be a floating-point tensor, got {x.dtype}")
    root, names = _root(f), tuple(parameters)
    for name in names:
        if parameters[name].numel() != 1 and (
            x.ndim == 0 or parameters[name].numel() != x.shape[dim]
        ):
            raise PolyvisionError(
                f"formula {f!r}: {name} has {parameters[name].numel()} channels, and x of shape "
                f"{tuple(x.shape)} does not along dim={dim}"
            )

    def formula(x: Tensor, *tensors: Tensor) -> Tensor:
        v = x.to(compute_dtype(x))
        values = {INPUT: v}
        for name, tensor in zip(names, tensors, strict=True):
            shape = [1] * x.ndim
            if tensor.numel() != 1:
                shape[dim] = tensor.numel()
            values[name] = tensor.to(v.dtype).reshape(shape)
        y: Tensor = compute(root, values, dim)
        return y.expand(x.shape).to(x.dtype)

    return recompute(formula, x, *parameters.values())


_ROOTS: dict[str, Node] = {}  # a plain dictionary, since torch.compile does not follow lru_cache


def _root(f: str) -> Node:
    if f not in _ROOTS:
        _ROOTS[f] = read_expression(f).root
    return _ROOTS[f]


def _initial_values(expression: Expression, init: Mapping[str, Any]) -> dict[str, float]:
    """Return the initial value of each free name, in the order of the formula."""
    text, names = expression.text, expression.names
    for name, start in names.items():
        if name not in init:
            hint = did_you_mean(name, [INPUT, *CONSTANTS, *FUNCTIONS, *init])
            raise mistake(
                text,
                start,
                f"unknown name {name!r}.{hint} A parameter needs an initial value: "
                f"act.init.{name}=1.0, in Python init={{{name!r}: 1.0}}",
            )
        if hasattr(Formula, name) or name in _RESERVED:
            raise mistake(text, start, f"{name!r} has a meaning in the module; take another name")
    for name, value in init.items():
        if name not in names:
            hint = did_you_mean(str(name), names)
            raise PolyvisionError(
                f"init.{name}: the formula {text!r} has no such name.{hint} "
                f"Its names: {', '.join(names) or 'none but x'}"
            )
        if not finite(value):
            raise PolyvisionError(f"init.{name} must be a finite number, got {value!r}")
    return {name: float(init[name]) for name in names}


@functools.lru_cache(maxsize=256)
def _check_finite(f: str, initial: tuple[tuple[str, float], ...]) -> None:
    """Refuse a formula whose value or derivative is not finite where activations are."""
    expression = read_expression(f)
    with unset_fake_temporarily(), torch.inference_mode(False), torch.enable_grad():
        grid = torch.linspace(-_GRID, _GRID, 33, device="cpu", dtype=torch.float32)
        x = torch.stack([grid, torch.zeros_like(grid)]).requires_grad_()
        values = {INPUT: x}
        for name, value in initial:
            values[name] = torch.full_like(grid, value).requires_grad_()

        def found(node: Node) -> tuple[Tensor, Tensor]:
            """Return value and gradient of a part; where the input has no part in it, zeros."""
            y = compute(node, values, -1)
            y = torch.as_tensor(y, dtype=torch.float32, device="cpu").expand(x.shape)
            if not y.requires_grad:
                return y, torch.zeros_like(y)
            grads = torch.autograd.grad(y.sum(), list(values.values()), allow_unused=True)
            zeros = torch.zeros_like(x)
            return y.detach(), sum((g.expand(x.shape) for g in grads if g is not None), zeros)

        if all(bool(part.isfinite().all()) for part in found(expression.root)):
            return
        parts = [(node, found(node)) for node in expression.nodes()]
        for order, what in enumerate(("", "the derivative of ")):
            for node, results in parts:
                bad = ~results[order].isfinite()
                if bad.any():
                    places = x.detach()[bad]
                    nearest = places.abs().argmin()
                    raise mistake(
                        f,
                        node.start,
                        f"{what}{f[node.start : node.end]} is {float(results[order][bad][nearest])}"
                        f" at x = {float(places[nearest]):g}, and must be finite from {-_GRID:g} "
                        f"to {_GRID:g}",
                    )
