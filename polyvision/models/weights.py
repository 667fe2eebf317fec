"""Load the weights of a plain network into one whose activations were swapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from polyvision.activations import activation_modules
from polyvision.errors import PolyvisionError

__all__ = ["Loaded", "load_pretrained"]

_Lines = list[str]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What came from the weights and what did not; ``str()`` of it says so.

    Attributes:
        loaded: number of tensors that were loaded.
        new: names of the activations' tensors that keep the values they had.
        dropped: names of tensors of the old activations, which have no place any more.
    """

    loaded: int
    new: tuple[str, ...]
    dropped: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.loaded} tensors loaded, {len(self.new)} new"
        if self.new:
            text += f" (of activations: {', '.join(self.new)})"
        if self.dropped:
            text += f", {len(self.dropped)} of old activations dropped ({', '.join(self.dropped)})"
        return text


def load_pretrained(model: nn.Module, weights: Mapping[str, Tensor] | str | Path) -> Loaded:
    """Load ``weights`` strictly, but for the tensors of the activations that were put in.

    Args:
        model: a network after ``swap_activations``; unchanged when an error is raised.
        weights: the ``state_dict`` of the plain network, or a file with it (``.safetensors``, or
            anything that ``torch.load(weights_only=True)`` reads).

    Raises:
        PolyvisionError: the file cannot be read, a tensor of the network is missing, one is left
            over, or shapes differ; the text names them all.

    Example:
        >>> from polyvision.models.swap import swap_activations
        >>> plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> _ = swap_activations(model, "polynorm")
        >>> print(load_pretrained(model, plain.state_dict()))
        2 tensors loaded, 2 new (of activations: 1.weight, 1.bias)
    """
    given = _read(weights) if isinstance(weights, str | Path) else weights
    own = model.state_dict()
    activations = activation_modules(model)
    places = tuple(f"{name}." for name in activations)
    coefficients = {name for name in own if name.startswith(places)}
    absent = coefficients - set(given)
    # Old activations can have had parameters too, of other names or shapes.
    dropped = {
        name
        for name in given
        if name.startswith(places) and (name not in own or own[name].shape != given[name].shape)
    }
    new = absent | (dropped & set(own))
    problems = [f"missing: {n}" for n in own if n not in given and n not in new]
    problems += [f"left over: {n}" for n in given if n not in own and n not in dropped]
    problems += [
        f"{n}: the network has {tuple(own[n].shape)}, the weights {tuple(given[n].shape)}"
        for n in own
        if n in given and n not in new and own[n].shape != given[n].shape
    ]
    if problems:
        shown = "; ".join(problems[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise PolyvisionError(
            f"the weights do not fit {type(model).__name__}: {shown}{more}. Nothing was loaded."
        )
    fitting = {name: value for name, value in given.items() if name not in dropped}
    model.load_state_dict(fitting, strict=False)
    order = [name for name in own if name in new]
    return Loaded(len(fitting), tuple(order), tuple(sorted(dropped)))


def _read(path: str | Path) -> Mapping[str, Tensor]:
    """Read a file of tensors; a checkpoint that nests them under ``state_dict`` or ``model``."""
    try:
        if Path(path).suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of zip, pickle, safetensors or the file system
        reason = " ".join(str(error).split())
        raise PolyvisionError(f"the weights in {str(path)!r} cannot be read: {reason}") from error
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        raise PolyvisionError(f"{str(path)!r} holds no mapping of names to tensors")
    return found
