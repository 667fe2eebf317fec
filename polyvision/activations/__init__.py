"""Activations as modules, and the registry that names them."""

from polyvision.activations.baselines import GEGLU, GELU, GLU, ReGLU, ReLU, ReLU2, SiLU, SwiGLU
from polyvision.activations.polynomial import PolyNorm, PolyNorm2d, PolyReLU
from polyvision.activations.registry import (
    ActivationInfo,
    activation_info,
    activation_modules,
    activation_names,
    create_activation,
    register_activation,
)

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "ActivationInfo",
    "PolyNorm",
    "PolyNorm2d",
    "PolyReLU",
    "ReGLU",
    "ReLU",
    "ReLU2",
    "SiLU",
    "SwiGLU",
    "activation_info",
    "activation_modules",
    "activation_names",
    "create_activation",
    "register_activation",
]
