"""``config.json`` of an export: timm's format, and what only this project knows beside it.

timm reads ``architecture``, ``num_classes``, ``label_names``, ``model_args`` and ``pretrained_cfg``
(``timm.create_model("local-dir:<folder>", pretrained=True)``) and leaves other keys alone.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from polyvision.activations import (
    PolyNorm2d,
    activation_info,
    activation_modules,
    activation_origin,
)
from polyvision.models.trained.network import VisionNetwork, network_to_plain
from polyvision.models.trained.saved import Saved

__all__ = ["export_config"]

_KEPT = ("classifier", "first_conv", "fixed_input_size", "min_input_size")  # of timm's own config


def export_config(saved: Saved, model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Return the content of ``config.json``, and lines that tell how the weights are read.

    Args:
        saved: where the weights come from.
        model: the network with these weights.
    """
    network = saved.network
    lines = ['polyvision.load_model("<folder>")']
    config: dict[str, Any] = {}
    if isinstance(network, VisionNetwork):
        config, timm_lines = _timm_config(network, model)
        lines += timm_lines
    config["polyvision"] = {
        "version": importlib.metadata.version("polyvision"),
        "network": network_to_plain(network),
        "activation": {
            "name": network.activation,
            "options": dict(network.activation_options),
            "registered_by": activation_origin(network.activation),
            "coefficients": "ascending: weight[i] multiplies the power i + 1",
            "sites": {
                name: getattr(module, "dim", None)
                for name, module in activation_modules(model).items()
            },
        },
        "weights": saved.weights,
        "step": saved.step,
        "metrics": dict(saved.metrics),
        "settings": dict(saved.settings),
    }
    return config, lines


def _timm_config(network: VisionNetwork, model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Return timm's part, and how timm reads it."""
    known: Any = model.pretrained_cfg
    names = network.timm_config()
    model_args = dict(network.options)
    if known.get("fixed_input_size"):
        model_args["img_size"] = network.image_size
    act_layer, line = _reading(network, model_args, model)
    if act_layer is not None:
        model_args["act_layer"] = act_layer
    config = {
        "architecture": network.name.split(".")[0],
        "num_classes": names.pop("num_classes"),
        "num_features": getattr(model, "num_features", None),
        "label_names": names.pop("label_names"),
        "model_args": model_args,
        "pretrained_cfg": {
            **{key: known[key] for key in _KEPT if known.get(key) is not None},
            **names,
            "custom_load": False,
        },
    }
    return config, [line]


def _reading(
    network: VisionNetwork, model_args: Mapping[str, Any], model: nn.Module
) -> tuple[str | None, str]:
    """Find how timm builds the same function: return ``act_layer``, and a line that says how."""
    load = 'timm.create_model("local-dir:<folder>", pretrained=True)'
    for act_layer, name, ours in _candidates(network):
        keywords = dict(model_args) | ({} if name is None else {"act_layer": act_layer})
        if _computes_the_same(network, keywords, model):
            return name, f"polyvision.timm.register(); {load}" if ours else load
    return None, (
        "timm by itself does not build this network: polyvision.load_model does, or "
        "polyvision.swap_activations and load_pretrained on timm's network"
    )


def _candidates(network: VisionNetwork) -> Iterator[tuple[Any, str | None, bool]]:
    """Yield (``act_layer``, its name, whether ``polyvision.timm.register`` adds that name)."""
    from timm.layers import get_act_layer

    yield None, None, False
    info = activation_info(network.activation)
    defaults = dataclasses.asdict(info.options())
    if defaults | dict(network.activation_options) != defaults:
        return  # a name carries no options
    named: dict[str, Any] = {network.activation: info.factory}
    if network.activation == "polynorm":
        named["polynorm2d"] = PolyNorm2d
    for name, factory in named.items():
        try:
            theirs = get_act_layer(name)
        except KeyError:
            theirs = factory
        yield (factory, name, True) if theirs is factory else (name, name, False)


def _computes_the_same(
    network: VisionNetwork, keywords: Mapping[str, Any], model: nn.Module
) -> bool:
    """Build timm's network, load the weights strictly, and compare outputs.

    The weights are moved a little first: a head or a last norm that is zero would hide that the
    activations differ.
    """
    import timm

    classes, channels = len(network.classes), network.in_chans
    generator = torch.Generator().manual_seed(0)
    moved = {
        name: value + 0.01 * torch.randn(value.shape, generator=generator)
        if isinstance(value, nn.Parameter)
        else value
        for name, value in model.state_dict(keep_vars=True).items()
    }
    size = network.image_size
    images = torch.randn(2, channels, size, size, generator=generator)
    try:
        with torch.random.fork_rng(devices=[]):
            theirs = timm.create_model(
                network.name.split(".")[0], num_classes=classes, in_chans=channels, **keywords
            ).eval()
        theirs.load_state_dict(moved)
    except Exception:  # constructors of a thousand models raise anything
        return False
    with torch.no_grad():
        expected, found = torch.func.functional_call(model, moved, (images,)), theirs(images)
    return bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())
