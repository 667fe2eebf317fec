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
from polyvision.activations.mixtures import BiMoA, LearnedActivation, MoA
from polyvision.activations.normalising import ASH, NormSiLU, RadialBounding
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
from polyvision.activations.stochastic import StochA

__all__ = [
    "ASH",
    "GEGLU",
    "GLU",
    "XATGLU",
    "XGEGLU",
    "ActivationInfo",
    "BiMoA",
    "Bilinear",
    "DReLU",
    "Formula",
    "LearnedActivation",
    "MoA",
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
    "StochA",
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
    "register_activation",
]
