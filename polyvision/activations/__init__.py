"""Activations as modules, and the registry that names them."""

from polyvision.activations.baselines import ReLU2
from polyvision.activations.formula import Formula
from polyvision.activations.gated import (
    GEGLU,
    GLU,
    XATGLU,
    XGEGLU,
    Bilinear,
    DReLU,
    PolyNormGLU,
    PolyReLUGLU,
    PowLU,
    ReGLU,
    SwiGLU,
    SwiGLUClip,
    XSwiGLU,
)
from polyvision.activations.normalising import ASH, NormSiLU, RadialBounding
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
    activation_kind,
    activation_modules,
    activation_names,
    activation_origin,
    create_activation,
    is_activation,
    register_activation,
)

__all__ = [
    "ASH",
    "GEGLU",
    "GLU",
    "XATGLU",
    "XGEGLU",
    "ActivationInfo",
    "Bilinear",
    "DReLU",
    "Formula",
    "NormSiLU",
    "PolyCom",
    "PolyNorm",
    "PolyNorm2d",
    "PolyNormGLU",
    "PolyPReLU",
    "PolyReLU",
    "PolyReLUGLU",
    "PolyReLUNorm",
    "PowLU",
    "RadialBounding",
    "ReGLU",
    "ReLU2",
    "SwiGLU",
    "SwiGLUClip",
    "XSwiGLU",
    "activation_info",
    "activation_kind",
    "activation_modules",
    "activation_names",
    "activation_origin",
    "create_activation",
    "is_activation",
    "load_plugins",
    "register_activation",
]
