"""Let timm find the activations by name: ``timm.create_model("vit_...", act_layer="polynorm")``.

timm has no public way to add an activation to its table of names, so ``register`` writes into the
private one and checks first that it is still the one it knows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from polyvision.activations import activation_info, activation_names
from polyvision.activations.polynomial import PolyNorm2d
from polyvision.errors import PolyvisionError

__all__ = ["register"]

_TABLE = "_ACT_LAYER_DEFAULT"
_FIRST = "_ACT_LAYER_ME"  # searched first


def register() -> list[str]:
    """Add every activation of one input that timm has no own name for, and return the names.

    timm builds an activation without telling where it goes, so a normalising one has one fixed
    feature dimension: ``polynorm`` and ``polyrelunorm`` normalise the last dimension (transformers,
    MLPs), ``polynorm2d`` the channels of NCHW (convolutional networks). For networks that mix both,
    and to have the dimension found, use ``polyvision.swap_activations``.

    Calling it twice changes nothing. Names that timm has itself (``relu``, ``gelu``) stay timm's.

    Raises:
        PolyvisionError: this version of timm keeps its activations elsewhere.

    Example:
        >>> import timm
        >>> "polynorm2d" in register()
        True
        >>> timm.layers.get_act_layer("polynorm2d")
        <class 'polyvision.activations.polynomial.PolyNorm2d'>
    """
    names = activation_names("pointwise", "normalising", "stochastic")
    ours: dict[str, Callable[..., Any]] = {name: activation_info(name).factory for name in names}
    ours["polynorm2d"] = PolyNorm2d
    default, first = _tables()
    added = {
        name: factory
        for name, factory in ours.items()
        if name not in first and default.get(name, factory) is factory
    }
    default.update(added)
    return sorted(added)


def _tables() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return timm's two tables, name -> class, after a check that they are used as we think."""
    import timm

    create_act = importlib.import_module("timm.layers.create_act")
    default = getattr(create_act, _TABLE, None)
    first = getattr(create_act, _FIRST, None)
    if (
        not isinstance(default, dict)
        or not isinstance(first, dict)
        or timm.layers.get_act_layer("relu") is not default.get("relu")
        or timm.layers.get_act_layer("silu") is not first.get("silu", default.get("silu"))
    ):
        raise PolyvisionError(
            f"timm {timm.__version__} keeps its activations in another place than the one that "
            "polyvision.timm.register() knows. Pass the class instead: act_layer=PolyNorm2d "
            "(NCHW) or act_layer=PolyNorm, or use polyvision.swap_activations."
        )
    return default, first
