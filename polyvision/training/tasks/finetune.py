"""``finetune=``: start from trained weights, and say which tensors did not come from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polyvision.activations import activation_info, activation_modules, create_activation
from polyvision.errors import PolyvisionError
from polyvision.models.trained.network import LanguageNetwork, Network, VisionNetwork
from polyvision.models.trained.saved import Saved, open_saved
from polyvision.models.weights.load import function_name, load_pretrained

__all__ = ["start_from"]

# What may differ between two transformers that compute the same from the same tensors.
_FREE_SHAPE = {"activation", "activation_options", "context", "checkpointing"}
# Options of an activation that coefficients trained with other values still fit: PolyPReLU's slope
# is only the initial one, and so are the coefficients that ``init`` names.
_FREE_ACT = {"eps", "slope", "init"}
_FREE_SHAPE |= {"init_std", "init_cutoff", "init_depth_scaled"}


def start_from(
    path: str, model: nn.Module, network: Network, *, tokenizer: str | None = None
) -> str:
    """Load the weights at ``path`` into ``model``, and say what is new and what was dropped.

    The head of a classifier is new when the number of classes differs, coefficients are new when
    the activation does; all else must fit.

    Args:
        path: a run folder, a checkpoint in one, an export, or a file that holds the ``state_dict``
            of the network (of timm or another Lightning program, for example).
        model: the network to train.
        network: its description.
        tokenizer: of a language model; the weights must have been trained with the same.

    Raises:
        PolyvisionError: there are no weights, or they are of another network.
    """
    place = Path(path).expanduser()
    of_export = (place.parent / "config.json").is_file()
    of_run = place.suffix == ".ckpt" and (place.absolute().parent.parent / "config.yaml").is_file()
    if place.is_file() and not of_export and not of_run:
        notes: list[str] = []
        load = partial(load_pretrained, model, place)
    else:
        saved = open_saved(path)
        _same_network(path, saved, network, tokenizer)
        tensors, notes = _without_other_coefficients(saved, model, network)
        load = partial(load_pretrained, model, tensors, function=_function(network))
    head: Any = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    try:
        loaded = load(head=head)
    except PolyvisionError as error:
        raise PolyvisionError(f"finetune={path}: {error}") from error
    return ". ".join([f"{path}: {loaded}", *notes])


def _same_network(path: str, saved: Saved, network: Network, tokenizer: str | None) -> None:
    other = saved.network
    place = f"finetune={path}"
    if other.task != network.task:
        raise PolyvisionError(f"{place} is a {other.task} model, this is {network.task}")
    if isinstance(network, VisionNetwork) and isinstance(other, VisionNetwork):
        if other.name.split(".")[0] != network.name.split(".")[0]:
            raise PolyvisionError(
                f"{place} holds a {other.name}, the model is {network.name}: "
                f"choose model=timm model.name={other.name}"
            )
    elif isinstance(network, LanguageNetwork) and isinstance(other, LanguageNetwork):
        old, new = (dataclasses.asdict(n.shape) for n in (other, network))
        differing = [k for k in new if k not in _FREE_SHAPE and old.get(k) != new[k]]
        if differing:
            lines = ", ".join(f"{k} {old.get(k)} in the weights, {new[k]} here" for k in differing)
            raise PolyvisionError(f"{place} is a transformer of another shape: {lines}")
        if saved.tokenizer is not None and saved.tokenizer != tokenizer:
            raise PolyvisionError(
                f"{place} was trained with another tokenizer, so its embeddings belong to other "
                f"tokens: give data.tokenizer={saved.folder / 'tokenizer.json'}"
            )


def _without_other_coefficients(
    saved: Saved, model: nn.Module, network: Network
) -> tuple[Mapping[str, Tensor], list[str]]:
    """Leave out coefficients of another activation, whose names and shapes can be the same."""
    then, now = _activation(saved.network), _activation(network)
    if then == now:
        return saved.tensors, []
    places = tuple(f"{name}." for name in activation_modules(model))
    gone = [name for name in saved.tensors if name.startswith(places)]
    kept = {name: value for name, value in saved.tensors.items() if name not in gone}
    text = f"The weights were trained with {then.pop('name')}"
    differing = ", ".join(f"{k}={v}" for k, v in then.items() if now.get(k) != v)
    if now["name"] == saved.network.activation:
        text += f" of {differing}"
    if gone:
        text += f"; {len(gone)} tensors of it dropped ({', '.join(gone)})"
    return kept, [text]


def _function(network: Network) -> str | None:
    return function_name(create_activation(network.activation, **network.activation_options))


def _activation(network: Network) -> dict[str, Any]:
    """Return name and options of the activation, but for those that any coefficients fit."""
    options = dataclasses.asdict(
        activation_info(network.activation).options(**network.activation_options)
    )
    return {"name": network.activation} | {k: v for k, v in options.items() if k not in _FREE_ACT}
