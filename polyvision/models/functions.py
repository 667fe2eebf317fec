"""Which modules and functions are activations, and which of them bound their output.

A bounded one (sigmoid, hard-sigmoid, tanh) almost always scales something else: the gates of
squeeze-and-excitation, of attention and of recurrent cells. A swap keeps those unless told to.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision.activations import is_activation

__all__ = [
    "BOUNDED",
    "FUNCTIONS",
    "INPLACE",
    "is_activation_module",
    "is_bounded",
    "is_whole_norm",
]

_NAMES = (
    *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "hardswish"),
    *("hardtanh", "prelu", "rrelu", "softplus"),
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
    plain = kind.lower().replace("_", "")
    return plain in BOUNDED or plain.removesuffix("me") in BOUNDED


def is_whole_norm(module: nn.Module) -> bool:
    """Tell whether ``module`` is a norm whose nonlinearity cannot be taken out of it.

    Source: Liu et al. 2020 (EvoNorm), https://arxiv.org/abs/2004.02967; Singh and Krishnan 2019
    (filter response normalisation with TLU), https://arxiv.org/abs/1911.09737.
    """
    return type(module).__name__.startswith(("EvoNorm", "FilterResponseNormTlu"))
