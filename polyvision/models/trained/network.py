"""What a trained network is, in plain values: enough to build it again without data or recipe.

A run writes this to ``network.json``, an export to the part ``polyvision`` of its ``config.json``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from polyvision.activations import activation_info, activation_names
from polyvision.errors import PolyvisionError
from polyvision.models.language.shape import TransformerShape
from polyvision.models.language.transformer import Transformer
from polyvision.models.vision.settings import ImagePreparation, TimmNetwork
from polyvision.typed import Count, load

__all__ = [
    "LanguageNetwork",
    "Network",
    "VisionNetwork",
    "network_from_plain",
    "network_to_plain",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionNetwork(TimmNetwork, ImagePreparation):
    """An image classifier of ``create_vision_model``, and how its images are prepared.

    Attributes:
        activation: registered name of the activation at every site.
        activation_options: keywords of its constructor.
        classes: class names; the position of a name is its label.
        in_chans: channels of the images.
    """

    activation: str
    activation_options: Mapping[str, Any]
    classes: list[str]
    in_chans: Count

    task = "vision"

    def build(self) -> nn.Module:
        """Build the network with initial weights; the random state stays what it was."""
        from polyvision.models.vision.create import create_vision_model  # loads timm

        with torch.random.fork_rng(devices=[]):
            built = create_vision_model(
                self.name,
                self.activation,
                self.activation_options,
                num_classes=len(self.classes),
                image_size=self.image_size,
                in_chans=self.in_chans,
                model_kwargs=self.options,
                on_leftover="error" if self.on_leftover == "error" else "ignore",
            )
        known: Any = built.model.pretrained_cfg
        setattr(built.model, "pretrained_cfg", known | self.timm_config())  # noqa: B010 - for mypy
        return built.model

    def timm_config(self) -> dict[str, Any]:
        """Return the preprocessing in timm's words, as ``timm.data.resolve_data_config`` reads."""
        test = {}
        if self.test_size is not None:
            test["test_input_size"] = [self.in_chans, self.test_size, self.test_size]
        return {
            "input_size": [self.in_chans, self.image_size, self.image_size],
            **test,
            "interpolation": "bicubic" if self.interpolation == "random" else self.interpolation,
            "crop_pct": self.crop_pct,
            "crop_mode": "center",
            "mean": list(self.mean),
            "std": list(self.std),
            "num_classes": len(self.classes),
            "label_names": list(self.classes),
        }


@dataclasses.dataclass(frozen=True)
class LanguageNetwork:
    """A ``Transformer``."""

    shape: TransformerShape

    task = "language"

    @property
    def name(self) -> str:
        """Name of the architecture."""
        return "transformer"

    @property
    def activation(self) -> str:
        """Registered name of the activation in the feed-forward networks."""
        return self.shape.activation

    @property
    def activation_options(self) -> Mapping[str, Any]:
        """Keywords of the activation's constructor."""
        return self.shape.activation_options

    def build(self) -> nn.Module:
        """Build the network with initial weights; the random state stays what it was."""
        with torch.random.fork_rng(devices=[]):
            return Transformer(self.shape)


Network = VisionNetwork | LanguageNetwork


def network_to_plain(network: Network) -> dict[str, Any]:
    """Return the description as plain values, for JSON."""
    return {"task": network.task, **dataclasses.asdict(network)}


def network_from_plain(plain: Any, place: str) -> Network:
    """Read a description back.

    Args:
        plain: what ``network_to_plain`` gave.
        place: where it was found, for the message.

    Raises:
        PolyvisionError: it is not a description of this version.
    """
    problems: list[str] = []
    values = dict(plain) if isinstance(plain, Mapping) else {}
    kinds: dict[Any, type[Network]] = {"vision": VisionNetwork, "language": LanguageNetwork}
    task = values.pop("task", None)
    if task not in kinds:
        raise PolyvisionError(f"{place} does not describe a network: task is {task!r}")
    found = load(kinds[task], values, "", problems)
    if found is None:
        raise PolyvisionError(f"{place} does not describe a network: {'; '.join(problems)}")
    options = found.activation_options
    if found.activation in activation_names():  # options that an earlier version did not have
        info = activation_info(found.activation)
        options = {**dataclasses.asdict(info.options()), **options}
    if isinstance(found, LanguageNetwork):
        return LanguageNetwork(dataclasses.replace(found.shape, activation_options=options))
    return dataclasses.replace(found, activation_options=options)
