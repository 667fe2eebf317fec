"""Image classifiers: any timm network whose family accepts ``act_layer``, with any activation.

timm (https://github.com/huggingface/pytorch-image-models, Wightman 2019) builds the network around
placeholders. They hold no parameters, so initial and pretrained weights are those of the plain
network whatever the activation is. Then each placeholder gives way to an activation of its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import timm
import torch
from timm.layers import activations as timm_activations
from timm.layers import activations_me as timm_activations_me
from torch import nn

from polyvision.activations import activation_info, activation_names, create_activation
from polyvision.errors import PolyvisionError, unknown
from polyvision.models.sites import Placeholder, Site, resolve_sites, separate_placeholders

__all__ = ["VisionModel", "create_vision_model"]

# Set from arguments of their own.
_RESERVED = ("act_layer", "img_size", "in_chans", "num_classes", "pretrained")

_ACTIVATION_MODULES = tuple(
    value
    for namespace in (nn.modules.activation, timm_activations, timm_activations_me)
    for value in vars(namespace).values()
    if inspect.isclass(value)
    and issubclass(value, nn.Module)
    and value not in (nn.Module, nn.MultiheadAttention)
)
_GATES = ("Sigmoid", "Hardsigmoid", "HardSigmoid", "HardSigmoidMe", "Softmax", "Softmax2d")


@dataclasses.dataclass(frozen=True)
class VisionModel:
    """A network and what was done to its activations.

    Attributes:
        model: the network, in channels_last memory format.
        sites: the places that hold the chosen activation.
        leftovers: name and type of built-in activations that the family does not let be chosen.
        gates: name and type of kept gates: sigmoid, hard-sigmoid, softmax.
        parameters: all trainable and frozen parameters.
        parameters_added: those of the activations.
    """

    model: nn.Module
    sites: tuple[Site, ...]
    leftovers: tuple[tuple[str, str], ...]
    gates: tuple[tuple[str, str], ...]
    parameters: int
    parameters_added: int


def create_vision_model(
    name: str,
    activation: str,
    activation_options: Mapping[str, Any] | None = None,
    *,
    num_classes: int,
    image_size: int,
    in_chans: int = 3,
    pretrained: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
) -> VisionModel:
    """Build the timm network ``name`` with ``activation`` at every site.

    Args:
        name: a timm model name, with or without a pretrained tag.
        activation: a registered activation that takes one input.
        activation_options: keywords of the activation, such as ``order``.
        num_classes: classes of the head.
        image_size: height and width of the images the network will see.
        in_chans: channels of the images.
        pretrained: load timm's weights; only the activation's coefficients are then new.
        model_kwargs: further keywords for ``timm.create_model``, such as ``drop_path_rate``.

    Raises:
        PolyvisionError: a name, option or size does not fit; the text says which and what does.

    Example:
        >>> built = create_vision_model("resnet18", "polynorm", num_classes=10, image_size=32)
        >>> len(built.sites), built.parameters_added
        (17, 68)
    """
    _check_activation(name, activation, activation_options or {})
    keywords = _timm_keywords(name, image_size, model_kwargs)
    keywords.update(num_classes=num_classes, in_chans=in_chans)
    model = _build(name, pretrained, keywords)
    names = separate_placeholders(model)
    if not names:
        raise PolyvisionError(f"timm model {name!r} has no activation that act_layer sets")
    sizes = [image_size]
    need_dim = activation_info(activation).kind == "normalising"
    if need_dim:
        config: Any = model.pretrained_cfg
        sizes.append(2 * max(image_size, config["input_size"][-1]))
    sites = resolve_sites(model, names, in_chans=in_chans, sizes=sizes, need_dim=need_dim)
    parameters = sum(p.numel() for p in model.parameters())
    _fill(model, sites, activation, dict(activation_options or {}))
    total = sum(p.numel() for p in model.parameters())
    gates, leftovers = _built_in_activations(model, {site.name for site in sites})
    return VisionModel(
        model=model.to(memory_format=torch.channels_last),
        sites=tuple(sites),
        leftovers=leftovers,
        gates=gates,
        parameters=total,
        parameters_added=total - parameters,
    )


def _check_activation(model: str, name: str, options: Mapping[str, Any]) -> None:
    info = activation_info(name)
    if info.kind == "gated":
        valid = activation_names("pointwise", "normalising", "stochastic")
        raise PolyvisionError(
            f"{name} is gated: it needs two inputs and fits the feed-forward network of a language "
            f"model only. For {model} choose one of: {', '.join(valid)}."
        )
    valid = [field.name for field in dataclasses.fields(info.options)]
    for option in options:
        if option not in valid:
            raise unknown(f"option of activation {name!r}", option, valid)


def _timm_keywords(
    name: str, image_size: int, model_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Check the name and gather the keywords that depend on it."""
    keywords = dict(model_kwargs or {})
    for reserved in _RESERVED:
        if reserved in keywords:
            raise PolyvisionError(f"model_kwargs must not set {reserved!r}: it has its own setting")
    if not timm.is_model(name):
        known = timm.list_models()
        close = difflib.get_close_matches(name.split(".")[0], known, n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
        raise PolyvisionError(
            f"unknown timm model {name!r}.{hint} timm.list_models() names all {len(known)}."
        )
    config = timm.get_pretrained_cfg(name.split(".")[0])
    if config is not None and config.fixed_input_size:
        keywords["img_size"] = image_size
    return keywords


def _build(name: str, pretrained: bool, keywords: Mapping[str, Any]) -> nn.Module:
    """Build the network with placeholders."""
    try:
        return timm.create_model(name, pretrained, act_layer=Placeholder, **keywords)
    except Exception as error:  # constructors of a thousand models raise anything
        if _builds(name, keywords) and not _builds(name, {**keywords, "act_layer": Placeholder}):
            raise PolyvisionError(
                f"timm model {name!r} does not let its activation be chosen: it does not accept "
                "act_layer. Choose another model, for example resnet50, convnext_atto or "
                "vit_tiny_patch16_224."
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PolyvisionError(f"timm could not build {name!r}: {reason}") from error


def _builds(name: str, keywords: Mapping[str, Any]) -> bool:
    """Tell whether timm builds the network, without data or weights."""
    try:
        with torch.device("meta"):
            timm.create_model(name, **keywords)
    except Exception:
        return False
    return True


def _fill(model: nn.Module, sites: list[Site], activation: str, options: dict[str, Any]) -> None:
    """Put an activation of its own at each site."""
    accepted = inspect.signature(activation_info(activation).factory).parameters
    if "device" in accepted:
        options["device"] = next(model.parameters()).device
    for site in sites:
        keywords = options if site.dim is None else options | {"dim": site.dim}
        model.set_submodule(site.name, create_activation(activation, **keywords))


def _built_in_activations(
    model: nn.Module, sites: set[str]
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return name and type of the activations that stayed: gates, and the rest."""
    found = [
        (name, type(module).__name__)
        for name, module in model.named_modules()
        if isinstance(module, _ACTIVATION_MODULES) and name not in sites
    ]
    gates = tuple(entry for entry in found if entry[1] in _GATES)
    return gates, tuple(entry for entry in found if entry[1] not in _GATES)
