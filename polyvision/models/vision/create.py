"""Image classifiers: any timm network, with any activation.

timm (https://github.com/huggingface/pytorch-image-models, Wightman 2019) builds the plain network,
with its initial or pretrained weights. ``swap_activations`` then gives every site an activation of
its own; that way serves the families that accept ``act_layer`` and those that do not, and leaves
all other weights what they are.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import timm
import torch
from torch import nn

from polyvision.errors import PolyvisionError, unknown
from polyvision.models.swap.new_activation import check_activation
from polyvision.models.swap.replace import OnLeftover, swap_activations
from polyvision.models.swap.report import SwapReport
from polyvision.models.trace.inputs import image_inputs
from polyvision.models.weights.load import Loaded, load_pretrained

__all__ = ["UnknownOption", "VisionModel", "create_vision_model"]

# Keywords of timm that are set in another way, and how: in a configuration (in Python).
_RESERVED = {
    "act_layer": "choose the activation with act=<name> (activation)",
    "img_size": "it is data.image_size (image_size)",
    "in_chans": "it is the number of channels of the data's images (in_chans)",
    "num_classes": "it is the number of classes in the data (num_classes)",
    "pretrained": "it is model.pretrained (pretrained)",
}
_UNEXPECTED = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


class UnknownOption(PolyvisionError):
    """A keyword that a network's constructor does not have: ``keyword``."""

    def __init__(self, name: str, keyword: str, valid: Iterable[str]) -> None:
        super().__init__(str(unknown(f"option of {name}", keyword, valid)))
        self.keyword = keyword


@dataclasses.dataclass(frozen=True)
class VisionModel:
    """A network and what was done to its activations.

    Attributes:
        model: the network, in channels_last memory format.
        report: its activation sites, and what stays.
        parameters: all trainable and frozen parameters.
        weights: where the weights come from, for people to read.
    """

    model: nn.Module
    report: SwapReport
    parameters: int
    weights: str


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
    on_leftover: OnLeftover = "error",
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
        on_leftover: what to do about activations that cannot be replaced, as in
            ``swap_activations``.

    Raises:
        PolyvisionError: a name, option or size does not fit; the text says which and what does.

    Example:
        >>> built = create_vision_model("resnet18", "polynorm", num_classes=10, image_size=32)
        >>> len(built.report.sites), built.report.parameters_added
        (17, 68)
    """
    options = dict(activation_options or {})
    check_activation(activation, options, place=name)
    keywords = _timm_keywords(name, image_size, model_kwargs)
    keywords.update(num_classes=num_classes, in_chans=in_chans)
    model = _build(name, pretrained, keywords)
    plain = model.state_dict()
    report = swap_activations(
        model,
        activation,
        inputs=image_inputs(model, image_size, in_chans),
        on_leftover=on_leftover,
        **options,
    )
    weights = "initial values of timm"
    if pretrained:
        loaded = load_pretrained(model, plain)
        weights = str(_without_head(loaded, model, plain, num_classes))
    return VisionModel(
        model=model.to(memory_format=torch.channels_last),
        report=report,
        parameters=sum(p.numel() for p in model.parameters()),
        weights=weights,
    )


def _without_head(loaded: Loaded, model: Any, plain: Mapping[str, Any], num_classes: int) -> Loaded:
    """Count the head as new where timm gave it another number of classes."""
    heads = model.pretrained_cfg.get("classifier") or ()
    if num_classes == model.pretrained_cfg.get("num_classes"):
        heads = ()
    places = tuple(f"{head}." for head in ([heads] if isinstance(heads, str) else heads))
    new = tuple(name for name in plain if name.startswith(places))
    return dataclasses.replace(loaded, loaded=loaded.loaded - len(new), head=new)


def _timm_keywords(
    name: str, image_size: int, model_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Check the name and gather the keywords that depend on it."""
    keywords = dict(model_kwargs or {})
    for reserved in _RESERVED:
        if reserved in keywords:
            raise PolyvisionError(
                f"model.options (model_kwargs) cannot set {reserved}: {_RESERVED[reserved]}"
            )
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
    """Build the plain network."""
    try:
        return timm.create_model(name, pretrained, **keywords)
    except TypeError as error:
        found = _UNEXPECTED.search(str(error))
        if found is None or found[2] not in keywords:
            raise PolyvisionError(f"timm could not build {name!r}: {error}") from error
        raise UnknownOption(name, found[2], _options_of(name, found[1])) from error
    except Exception as error:  # constructors of a thousand models raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PolyvisionError(f"timm could not build {name!r}: {reason}") from error


def _options_of(name: str, owner: str) -> set[str]:
    """Return the keywords of the class ``owner``, which timm builds under ``name``."""
    module = sys.modules[timm.model_entrypoint(name.split(".")[0]).__module__]
    classes = [getattr(module, owner, nn.Module)]
    if dataclasses.is_dataclass(classes[0]):  # some networks leave unknown keywords to their shape
        classes += [c for c in vars(module).values() if isinstance(c, type) and _is_network(c)]
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = [p for c in classes for p in inspect.signature(c).parameters.values()]
    return {p.name for p in parameters if p.kind not in variable} - set(_RESERVED)


def _is_network(found: type) -> bool:
    return issubclass(found, nn.Module) and "num_classes" in inspect.signature(found).parameters
