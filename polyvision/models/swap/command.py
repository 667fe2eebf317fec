"""What ``polyvision swap-report MODEL`` prints: the table of a swap, made without data."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from polyvision.errors import PolyvisionError, did_you_mean
from polyvision.models.swap.replace import swap_activations
from polyvision.models.swap.report import ROLES
from polyvision.models.trace.inputs import image_inputs
from polyvision.models.weights.empty import on_meta

__all__ = ["add_arguments", "build_empty", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``polyvision swap-report``."""
    parser.add_argument(
        "model", help="timm name, torchvision:<name> or transformers:<model type>, e.g. resnet50"
    )
    parser.add_argument("--act", default="polynorm", help="activation (default: polynorm)")
    selection = f"a role ({', '.join(ROLES)}) or a name pattern"
    parser.add_argument("--include", nargs="+", help=f"replace only these: {selection}")
    parser.add_argument("--exclude", nargs="+", help=f"keep these: {selection}")
    parser.add_argument("--image-size", type=int, help="height and width of the images in pixels")


def run(arguments: argparse.Namespace) -> str:
    """Return the table; what is left over is listed in it."""
    if arguments.image_size is not None and arguments.image_size < 1:
        raise PolyvisionError(f"--image-size must be 1 or more, got {arguments.image_size}")
    model = build_empty(arguments.model)
    size = arguments.image_size
    report = swap_activations(
        model,
        arguments.act,
        inputs=None if size is None else image_inputs(model, size),
        include=arguments.include,
        exclude=arguments.exclude,
        on_leftover="ignore",
    )
    return str(report)


def build_empty(name: str) -> nn.Module:
    """Build ``name`` with random or no weights; nothing is downloaded.

    Args:
        name: a timm model (``resnet50``), ``torchvision:<model>`` or ``transformers:<model type>``
            (``transformers:bert``), whose default configuration is built. It lies on the meta
            device where its constructor allows that.

    Raises:
        PolyvisionError: unknown library or model, or the library is not installed.
    """
    library, colon, model = name.rpartition(":")
    library = library if colon else "timm"
    builders: dict[str, Callable[[str], nn.Module]] = {
        "timm": _timm,
        "torchvision": _torchvision,
        "transformers": _transformers,
    }
    if library not in builders:
        raise PolyvisionError(
            f"unknown library {library!r} in {name!r}.{did_you_mean(library, builders)} "
            f"Valid: {', '.join(builders)}."
        )
    if importlib.util.find_spec(library) is None:
        raise PolyvisionError(f"{name}: {library} is not installed; pip install {library}")
    return builders[library](model)


def _timm(name: str) -> nn.Module:
    import timm

    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    return on_meta(lambda: timm.create_model(name))


def _torchvision(name: str) -> nn.Module:
    from torchvision import models

    known = [known for known in models.list_models() if not known.startswith("quantized_")]
    if name not in known:
        raise _unknown("torchvision", name, known)
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):  # their slow default is announced to change
        options["init_weights"] = False
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # networks for detection would download them
    model: nn.Module = on_meta(lambda: models.get_model(name, **options))
    return model


def _transformers(name: str) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    known = list(transformers.CONFIG_MAPPING.keys())
    if name not in known:
        raise _unknown("transformers", name, known)
    config = transformers.AutoConfig.for_model(name)
    model: nn.Module = on_meta(lambda: transformers.AutoModel.from_config(config))
    # Parameters that torch.Tensor() makes ignore the default device.
    return model.to("meta") if any(p.is_meta for p in model.parameters()) else model


def _unknown(library: str, name: str, known: list[str]) -> PolyvisionError:
    return PolyvisionError(
        f"unknown {library} model {name!r}.{did_you_mean(name, known)} "
        f"{library} knows {len(known)} names."
    )
