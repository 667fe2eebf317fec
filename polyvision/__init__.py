"""Polynomial composition activations: fused kernels, drop-in layers, trainers to compare them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyvision import functional
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

# Where the names lie that are not in `activations`. They are imported when they are first used:
# the trainers answer a mistyped key without torch.
_PLACES = {
    "PolyvisionError": "errors",
    "swap_activations": "models.swap.replace",
    "load_model": "models.trained.saved",
    "load_pretrained": "models.weights.load",
}


def __getattr__(name: str) -> Any:
    if name in __all__ and name != "functional":
        place = _PLACES.get(name, "activations")
        value: Any = getattr(importlib.import_module(f"polyvision.{place}"), name)
        globals()[name] = value
        return value
    if name.startswith("_"):
        raise AttributeError(f"module 'polyvision' has no attribute {name!r}")
    try:  # a module, such as polyvision.timm
        return importlib.import_module(f"polyvision.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"polyvision.{name}":
            raise
        raise AttributeError(f"module 'polyvision' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
