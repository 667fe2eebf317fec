"""FLOPs of an activation for each hidden element, counted as the PolyCom paper counts them.

Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (appendix F) takes 10 FLOPs for exp and tanh
and prints totals only. The rules here were inferred from these: they give its six numbers (1, 18,
14, 2, 18, 10) and go on to every other activation.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import polyvision.models.language.grouped  # noqa: F401, the operations that are counted
from polyvision.activations import (
    Pointwise,
    PolyNorm,
    PolyNormGLU,
    PolyPReLU,
    PolyReLU,
    PolyReLUGLU,
    PolyReLUNorm,
    activation_info,
    create_activation,
)

__all__ = [
    "algorithm_1",
    "algorithm_2",
    "count_flops",
    "flops_per_element",
    "matrix_counter",
    "plain_form",
]

# Functions that no adder or multiplier computes count 10, as the paper has it for exp and tanh.
_TEN = frozenset({"exp", "tanh", "erf", "log", "log1p", "expm1", "sin", "cos", "atan", "sqrt"})
# Written out: sigmoid 1/(1 + exp(-x)); silu x/(1 + exp(-x)); softplus log(1 + exp(x)); gelu
# 0.5 x (1 + tanh(c (x + d x x x))).
_WRITTEN_OUT = {"sigmoid": 13, "silu": 13, "softplus": 21, "gelu": 18, "rsqrt": 11}
_FREE = frozenset(
    {"view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "select", "slice", "t"}
    | {"permute", "transpose", "alias", "detach", "clone", "_to_copy", "copy_", "lift_fresh"}
    | {"empty_like", "zeros_like", "ones_like", "full_like", "empty", "zeros", "ones"}
    | {"scalar_tensor"}
)
_REDUCTIONS = frozenset({"mean", "sum", "amax", "amin", "max", "min", "var"})


def plain_form(module: nn.Module) -> Callable[..., Tensor]:
    """Return the function of an activation as the paper's algorithms write it.

    PolyNorm is Algorithm 2 and PolyReLU Algorithm 1: torch operations in the dtype of the input,
    each power on its own. A pointwise function is its formula, kept by autograd as it likes; any
    other activation is torch operations already, and returned as it is.
    """
    if isinstance(module, PolyNormGLU):
        return lambda gate, up: _of_poly_norm(module, gate) * up
    if isinstance(module, PolyReLUGLU):
        return lambda gate, up: (
            up * _plus(algorithm_1(torch.relu(gate), module.weight), module.bias)
        )
    if isinstance(module, PolyReLUNorm):
        return lambda x: _of_poly_norm(module, torch.relu(x))
    if isinstance(module, PolyNorm):
        return lambda x: _of_poly_norm(module, x)
    if isinstance(module, PolyReLU):
        return lambda x: _plus(algorithm_1(torch.relu(x), module.weight), module.bias)
    if isinstance(module, PolyPReLU):
        prelu = nn.functional.prelu
        return lambda x: _plus(
            algorithm_1(prelu(x, module.slope.to(x.dtype)), module.weight), module.bias
        )
    return module.plain if isinstance(module, Pointwise) else module


def algorithm_1(base: Tensor, weight: Tensor) -> Tensor:
    """Return sum_i w_i base^i: PolyReLU as the paper prints it, where ``base`` is relu(x)."""
    weight = weight.to(base.dtype)
    return _total([weight[i] * _power(base, i + 1) for i in range(len(weight))])


def algorithm_2(x: Tensor, weight: Tensor, eps: float, dim: int = -1) -> Tensor:
    """Return sum_i w_i x^i rsqrt(mean(x^(2i)) + eps): PolyNorm as the paper prints it."""
    weight = weight.to(x.dtype)

    def norm(power: Tensor) -> Tensor:
        return power * torch.rsqrt(power.pow(2).mean(dim, keepdim=True) + eps)

    return _total([weight[i] * norm(_power(x, i + 1)) for i in range(len(weight))])


def _of_poly_norm(module: PolyNorm, base: Tensor) -> Tensor:
    weight, bias = module.coefficients(base)
    return _plus(algorithm_2(base, weight, module.eps, module.dim), bias)


def _power(x: Tensor, exponent: int) -> Tensor:
    return x if exponent == 1 else x**exponent  # torch copies for x**1


def _total(terms: list[Tensor]) -> Tensor:
    return functools.reduce(operator.add, terms)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add up what each operation costs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(out, Tensor) and name not in _FREE:
            self.flops += _cost(name, args, out)
        return out


def _cost(name: str, args: tuple[Any, ...], out: Tensor) -> int:
    if name in _REDUCTIONS and args and isinstance(args[0], Tensor):
        return args[0].numel()
    if name == "pow" and isinstance(args[1], int | float):
        power = float(args[1])
        return out.numel() * (int(power) - 1 if power.is_integer() and power >= 1 else 10)
    return out.numel() * (10 if name in _TEN else _WRITTEN_OUT.get(name, 1))


def flops_per_element(name: str, **options: Any) -> int:
    """Count the FLOPs that a registered activation spends on each hidden element.

    Args:
        name: a registered name.
        **options: keywords of its constructor, such as ``order``.

    Raises:
        PolyvisionError: unknown activation or option.

    Example:
        >>> paper = "relu", "gelu", "swiglu", "relu2", "polynorm", "polyrelu"
        >>> [flops_per_element(name) for name in paper]
        [1, 18, 14, 2, 18, 10]
    """
    gated = activation_info(name).kind == "gated"
    return count_flops(create_activation(name, **options), inputs=2 if gated else 1)


def count_flops(module: nn.Module, inputs: int = 1) -> int:
    """Count the FLOPs of an activation for each hidden element, as the paper does.

    An operation on every element counts 1 (x^i counts i - 1 multiplications, made anew for each i),
    a mean or sum 1 for each element it reads, exp, tanh and their like 10. GELU is counted in its
    tanh form, and SiLU as x / (1 + exp(-x)). What is done once a row, such as the root in PolyNorm,
    does not count.

    Args:
        module: the activation.
        inputs: 2 for a gated one.
    """
    # What is done once a row, or once at all, is the same at both widths.
    narrow, wide = (_count(module, inputs, width) for width in (64, 128))
    return math.ceil((wide - narrow) / 64)


def matrix_counter() -> FlopCounterMode:
    """Return torch's counter of matrix products, convolutions and attention, also on a CPU.

    torch itself leaves out the attention that a CPU runs. A causal mask is not taken off.
    """
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mapping: dict[Any, Any] = {
        on_cpu: _attention_flops,
        torch.ops.polyvision.grouped_matmul: _grouped_flops,
        torch.ops.polyvision.grouped_outer: _grouped_flops,
    }
    return FlopCounterMode(display=False, custom_mapping=mapping)


def _grouped_flops(x: Sequence[int], other: Sequence[int], *_: Any, **__: Any) -> int:
    """Count a grouped product: (M, K) with (G, K, N), or with (M, N)."""
    return 2 * math.prod(x) * other[-1]


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """Count q k^T and its product with v: (..., T, d), (..., S, d), (..., S, e)."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _count(module: nn.Module, inputs: int, width: int) -> int:
    weights = next(module.parameters(), torch.empty(()))
    row = torch.linspace(-1.0, 1.0, width, device=weights.device)[None]
    if getattr(module, "dim", -1) == 1:
        row = row[:, :, None, None]
    counter = _Counter()
    with torch.no_grad(), counter:
        plain_form(module)(*[row] * inputs)
    return counter.flops
