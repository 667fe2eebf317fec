"""Polynomial composition activations: fused kernels, drop-in layers, trainers to compare them."""

from polyvision import functional
from polyvision import timm as timm  # not in __all__: import * must not hide the package timm
from polyvision.activations import (
    PolyCom,
    PolyNorm,
    PolyNorm2d,
    PolyPReLU,
    PolyReLU,
    PolyReLUNorm,
    activation_names,
    create_activation,
    register_activation,
)
from polyvision.errors import PolyvisionError
from polyvision.models.swap.replace import swap_activations
from polyvision.models.trained.saved import load_model
from polyvision.models.weights.load import load_pretrained

__version__ = "0.1.0"

__all__ = [
    "PolyCom",
    "PolyNorm",
    "PolyNorm2d",
    "PolyPReLU",
    "PolyReLU",
    "PolyReLUNorm",
    "PolyvisionError",
    "activation_names",
    "create_activation",
    "functional",
    "load_model",
    "load_pretrained",
    "register_activation",
    "swap_activations",
]
