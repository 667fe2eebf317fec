"""Which modules, functions and values on a grid are activations; which bound their output.

A bounded one (sigmoid, hard-sigmoid, tanh) almost always scales something else: the gates of
squeeze-and-excitation, of attention and of recurrent cells. A swap keeps those unless told to.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision.activations import is_activation

__all__ = [
    "BOUNDED",
    "FUNCTIONS",
    "GRID",
    "INPLACE",
    "is_activation_module",
    "is_affine",
    "is_between_bounds",
    "is_bounded",
    "is_defined",
    "is_monotone",
    "is_whole_norm",
    "near",
    "plain_name",
    "recognised",
]

_NAMES = (
    *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "hardswish"),
    *("hardtanh", "prelu", "rrelu", "softplus", "threshold", "softshrink", "hardshrink"),
    *("tanhshrink",),
    *("sigmoid", "hardsigmoid", "logsigmoid", "tanh", "softsign"),
)
# Of modules and functions alike: lower case, without underscores.
BOUNDED = frozenset({"sigmoid", "hardsigmoid", "logsigmoid", "tanh", "softsign"})
# Classes in the modules below that are no pointwise function of one tensor.
_OTHER = {"GLU", "LogSoftmax", "MultiheadAttention", "Softmax", "Softmax2d", "Softmin"}
# Libraries that are looked at only if the program has loaded them.
_LIBRARIES = (
    "torch.nn.modules.activation",
    "timm.layers.activations",
    "timm.layers.activations_me",
    "transformers.activations",
)


def _spelled(suffix: str) -> dict[Any, str]:
    """Return the functions and tensor methods that are named so, with their plain names."""
    places = (F, torch, torch._C._nn, Tensor)
    found = {getattr(p, f"{name}{suffix}", None): name for name in _NAMES for p in places}
    found.pop(None, None)
    return found


# Every torch function that is an activation -> its name; and those that change their argument.
INPLACE = _spelled("_")
FUNCTIONS = _spelled("") | INPLACE


def is_activation_module(module: nn.Module) -> bool:
    """Tell whether ``module`` is an activation of torch, timm, transformers or polyvision."""
    if is_activation(module):
        return True
    return any(
        cls.__module__ in _LIBRARIES
        and cls.__name__ not in _OTHER
        and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
        for cls in inspect.getmro(type(module))
    )


def is_bounded(kind: str) -> bool:
    """Tell whether the module or function called ``kind`` squashes its input into an interval.

    Example:
        >>> is_bounded("HardSigmoidMe"), is_bounded("hardswish")
        (True, False)
    """
    return plain_name(kind) in BOUNDED


def plain_name(kind: str) -> str:
    """Return one name for modules and functions: ``hardsigmoid`` for ``HardSigmoidMe`` of timm."""
    return kind.lower().replace("_", "").removesuffix("me")


def is_whole_norm(module: nn.Module) -> bool:
    """Tell whether ``module`` is a norm whose nonlinearity cannot be taken out of it.

    Source: Liu et al. 2020 (EvoNorm), https://arxiv.org/abs/2004.02967; Singh and Krishnan 2019
    (filter response normalisation with TLU), https://arxiv.org/abs/1911.09737.
    """
    return type(module).__name__.startswith(("EvoNorm", "FilterResponseNormTlu"))


# Where pointwise functions are compared: in order from -12 to 12, then far away. Values are needed,
# also where the default device is another one.
_STEPS = torch.arange(-240, 241, dtype=torch.float64, device="cpu") / 20
_FAR = torch.tensor([20.0, 100.0, 1e3, 1e6], dtype=torch.float64, device="cpu")
GRID = torch.cat((_STEPS, _FAR, -_FAR))
_TOLERANCE = 1e-5
# hardtanh is not among them: x.clamp(-1, 1) or x.clamp(0, width) is the range of a result.
_FORMS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "relu": (F.relu,),
    "silu": (F.silu,),
    "gelu": (F.gelu, lambda x: F.gelu(x, approximate="tanh")),
    "quick_gelu": (lambda x: x * torch.sigmoid(1.702 * x),),
    "mish": (F.mish,),
    "hardswish": (F.hardswish,),
    "relu6": (F.relu6,),
    "relu2": (lambda x: F.relu(x).square(),),
    "selu": (F.selu,),
    "tanhshrink": (F.tanhshrink,),
    "logsigmoid": (F.logsigmoid,),
    "sigmoid": (torch.sigmoid,),
    "hardsigmoid": (F.hardsigmoid, lambda x: 6 * F.hardsigmoid(x)),
    "tanh": (torch.tanh,),
    "softsign": (F.softsign,),
}


def near(values: Tensor) -> Tensor:
    """Return the values on the grid from -12 to 12."""
    return values[: len(_STEPS)]


def recognised(values: Tensor) -> str | None:
    """Return the plain name of the activation that has these values on the grid, None if none has.

    Example:
        >>> x = GRID
        >>> recognised(x / (1 + torch.exp(-x))), recognised(torch.maximum(x, 0.2 * x))
        ('silu', 'leaky_relu')
    """
    values = values.to(GRID.dtype)
    if values.shape != GRID.shape or not near(values).isfinite().all() or is_affine(values):
        return None
    at = dict(zip(GRID.tolist(), values.tolist(), strict=True))
    slope, half = -at[-1.0], at[0.0]
    alpha = -at[-1e3] if math.isfinite(at[-1e3]) else -at[-12.0]
    families: dict[str, list[Callable[[Tensor], Tensor]]] = {k: [*v] for k, v in _FORMS.items()}
    if 0 < slope < 1:
        families["leaky_relu"] = [lambda x: F.leaky_relu(x, slope)]
    if alpha > 0:
        families["elu"] = [lambda x: F.elu(x, alpha), lambda x: F.celu(x, alpha)]
    if half > 0:
        families["softplus"] = [lambda x: F.softplus(x, math.log(2) / half)]
    for kind, functions in families.items():
        for function in functions:
            expected = function(GRID)
            same = torch.isclose(values, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
            # Formulas with exponentials overflow far away.
            if bool((same | ~values.isfinite()).all()):
                return kind
    return None


def is_affine(values: Tensor) -> bool:
    """Tell whether these values on the grid are those of ``a x + b``."""
    ends = near(values)[0], near(values)[-1]
    line = torch.lerp(*ends, (_STEPS + 12) / 24)
    return torch.allclose(near(values), line, rtol=_TOLERANCE, atol=_TOLERANCE)


def is_monotone(values: Tensor) -> bool:
    """Tell whether these values on the grid never fall, or never rise."""
    steps = near(values).diff()
    return bool((steps >= -1e-9).all() or (steps <= 1e-9).all())


def is_between_bounds(values: Tensor) -> bool:
    """Tell whether these values on the grid do not grow far away."""
    if values.isinf().any():
        return False
    at = dict(zip(GRID.tolist(), values.abs().tolist(), strict=True))
    far, farther = max(at[1e3], at[-1e3]), max(at[1e6], at[-1e6])
    if math.isnan(far) or math.isnan(farther):  # a quotient of exponentials
        finite = values[values.isfinite()]
        return bool(finite.abs().max() <= 2 * near(values).abs().max() + 1)
    return bool(farther <= 1.5 * far + 1)


def is_defined(values: Tensor) -> bool:
    """Tell whether these values on the grid are finite, without a pole between two points."""
    before, after = near(values)[:-1], near(values)[1:]
    poles = ((after - before).abs() > 10) & (after * before < 0)
    return bool(near(values).isfinite().all()) and not bool(poles.any())
