"""Load the weights of a plain network into one whose activations were swapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from polyvision.activations import activation_modules
from polyvision.errors import PolyvisionError
from polyvision.models.weight_files import read_tensor_file

__all__ = ["Loaded", "load_pretrained", "read_weights"]

_Lines = list[str]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What came from the weights and what did not; ``str()`` of it says so.

    Attributes:
        loaded: number of tensors that were loaded.
        new: names of the activations' tensors that keep the values they had.
        dropped: names of tensors of the old activations, which have no place any more.
        head: names of the head's tensors that keep the values they had, where it is another head.
    """

    loaded: int
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    head: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.loaded} tensors loaded, {len(self.new) + len(self.head)} new"
        parts = []
        if self.head:
            parts.append(f"of the head, for another number of classes: {', '.join(self.head)}")
        if self.new:
            parts.append(f"of activations: {', '.join(self.new)}")
        if parts:
            text += f" ({'; '.join(parts)})"
        if self.dropped:
            text += f", {len(self.dropped)} of old activations dropped ({', '.join(self.dropped)})"
        return text


def load_pretrained(
    model: nn.Module,
    weights: Mapping[str, Tensor] | str | Path,
    *,
    head: str | Sequence[str] = (),
) -> Loaded:
    """Load ``weights`` strictly, but for the tensors of the activations that were put in.

    Args:
        model: a network after ``swap_activations``; unchanged when an error is raised.
        weights: the ``state_dict`` of the plain network, or a file with it (``.safetensors``, or
            anything that ``torch.load(weights_only=True)`` reads).
        head: names of the modules that classify. Where one of their tensors has another shape in
            the weights, all of that module stay as they are: the number of classes differs.

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
    given = read_weights(weights) if isinstance(weights, str | Path) else weights
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
    replaced = _other_heads(own, given, (head,) if isinstance(head, str) else head)
    free = new | replaced
    problems = [f"missing: {n}" for n in own if n not in given and n not in free]
    problems += [f"left over: {n}" for n in given if n not in own and n not in dropped | replaced]
    problems += [
        f"{n}: the network has {tuple(own[n].shape)}, the weights {tuple(given[n].shape)}"
        for n in own
        if n in given and n not in free and own[n].shape != given[n].shape
    ]
    if problems:
        shown = "; ".join(problems[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise PolyvisionError(
            f"the weights do not fit {type(model).__name__}: {shown}{more}. Nothing was loaded."
        )
    fitting = {n: value for n, value in given.items() if n not in dropped | replaced}
    model.load_state_dict(fitting, strict=False)
    return Loaded(
        len(fitting),
        new=tuple(name for name in own if name in new),
        dropped=tuple(sorted(dropped)),
        head=tuple(name for name in own if name in replaced),
    )


def _other_heads(
    own: Mapping[str, Tensor], given: Mapping[str, Tensor], heads: Sequence[str]
) -> set[str]:
    """Name every tensor of the heads that have another shape in the weights."""
    found = set()
    for head in heads:
        names = {name for name in {**own, **given} if name.startswith(f"{head}.")}
        if any(n in own and n in given and own[n].shape != given[n].shape for n in names):
            found |= names
    return found


def read_weights(path: str | Path) -> Mapping[str, Tensor]:
    """Read a file of tensors; a checkpoint that nests them under ``state_dict`` or ``model``.

    Raises:
        PolyvisionError: the file cannot be read, or holds something else.
    """
    found = read_tensor_file(path)
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        raise PolyvisionError(f"{str(path)!r} holds no mapping of names to tensors")
    return found
