"""Activations as modules, and the registry that names them."""

from polyvision.activations.baselines import GEGLU, GLU, ReGLU, ReLU2, SwiGLU
from polyvision.activations.formula import Formula
from polyvision.activations.plugins import load_plugins
from polyvision.activations.polynomial import (
    PolyCom,
    PolyNorm,
    PolyNorm2d,
    PolyPReLU,
    PolyReLU,
    PolyReLUNorm,
)
from polyvision.activations.registry import (
    ActivationInfo,
    activation_info,
    activation_modules,
    activation_names,
    activation_origin,
    create_activation,
    is_activation,
    register_activation,
)

__all__ = [
    "GEGLU",
    "GLU",
    "ActivationInfo",
    "Formula",
    "PolyCom",
    "PolyNorm",
    "PolyNorm2d",
    "PolyPReLU",
    "PolyReLU",
    "PolyReLUNorm",
    "ReGLU",
    "ReLU2",
    "SwiGLU",
    "activation_info",
    "activation_modules",
    "activation_names",
    "activation_origin",
    "create_activation",
    "is_activation",
    "load_plugins",
    "register_activation",
]
