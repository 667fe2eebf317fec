"""Load the weights of a plain network into one whose activations were swapped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from polyvision.activations import activation_modules, create_activation
from polyvision.activations.base.coefficients import FUNCTION_KEY
from polyvision.errors import PolyvisionError, some
from polyvision.models.weights.files import read_tensor_file

__all__ = ["Loaded", "function_name", "load_pretrained", "read_weights"]

# Names that torch.compile, FSDP and activation checkpointing put between those of modules.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

# Advice for networks of transformers, some of which rename tensors when they save and load.
_SAVE_PRETRAINED = (
    " A file of save_pretrained can have other names than the network: load the weights of a plain "
    "network by from_pretrained before the swap, and those of a swapped one from a file of "
    "torch.save(model.state_dict(), file)"
)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What came from the weights and what did not; ``str()`` of it says so.

    Attributes:
        loaded: number of tensors that were loaded.
        new: names of the activations' tensors that keep the values they had.
        dropped: names of tensors of the old activations, which have no place any more.
        head: names of the head's tensors that keep the values they had, where it is another head.
        prefix: what was taken off all names of the weights, such as ``module.``.
        assumed: number of coefficients that were loaded though nothing says which activation they
            were trained with; others have the same names and shapes.
        function: the activation that these were taken for.
    """

    loaded: int
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    head: tuple[str, ...] = ()
    prefix: str = ""
    assumed: int = 0
    function: str = ""

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
        if self.prefix:
            text += f", without the prefix {self.prefix!r} of all names"
        if self.assumed:
            text += (
                f". The weights do not say which activation their {self.assumed} coefficients were "
                f"trained with: they were taken for those of {self.function}"
            )
        return text


def load_pretrained(
    model: nn.Module,
    weights: Mapping[str, Tensor] | str | Path,
    *,
    head: str | Sequence[str] = (),
    function: str | None = None,
) -> Loaded:
    """Load ``weights`` strictly, but for the tensors of the activations that were put in.

    Coefficients in the weights are loaded where they are those of the network's activation.
    A ``state_dict``, and a file of it by ``torch.save``, names the activation; for another file the
    ``config.json`` of an export or the ``network.json`` of a run tells, where it lies there.

    Args:
        model: a network after ``swap_activations``; unchanged when an error is raised.
        weights: the ``state_dict`` of the plain network, or a file with it (``.safetensors``, or
            anything that ``torch.load(weights_only=True)`` reads). Prefixes that wrappers add to
            names (``module.``, ``_orig_mod.``) are taken off. Of tensors that the network ties, one
            is enough.
        head: names of the modules that classify. Where one of their tensors has another shape in
            the weights, all of that module stay as they are: the number of classes differs.
        function: ``function_name`` of the activation that coefficients were trained with, where
            the weights do not name it.

    Raises:
        PolyvisionError: the file cannot be read, a tensor of the network is missing, one is left
            over, shapes differ, or coefficients are of another activation or order; the text names
            them.

    Example:
        >>> from polyvision.models.swap.replace import swap_activations
        >>> plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> _ = swap_activations(model, "polynorm")
        >>> print(load_pretrained(model, plain.state_dict()))
        2 tensors loaded, 2 new (of activations: 1.weight, 1.bias)
    """
    if isinstance(weights, str | Path):
        function = function or _described(Path(weights))
        weights = read_weights(weights)
    state = model.state_dict(keep_vars=True)
    names = {_plain(name): name for name in state}  # plain -> of the network
    own = {_plain(name): value for name, value in state.items()}
    given, trained, prefix = _aligned(weights, own)
    put_in = {id(module) for module in activation_modules(model).values()}
    activations = {
        _plain(name): module
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in put_in
    }
    new, dropped, assumed, problems = _coefficients(
        activations, own, given, lambda place: trained.get(place, function)
    )
    if problems:
        raise PolyvisionError(
            f"the coefficients in the weights are not those of the network's activations: "
            f"{some(problems, 3)}. Build the network with the activation and options that the "
            f"weights were trained with, or leave these tensors out of the weights to start with "
            f"new coefficients. Nothing was loaded."
        )
    replaced = _other_heads(own, given, (head,) if isinstance(head, str) else head)
    free = new | replaced
    fitting = {n: value for n, value in given.items() if n not in dropped | replaced}
    problems = _misfits(own, fitting, free)
    if problems:
        shown = "; ".join(problems[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise PolyvisionError(
            f"the weights do not fit {type(model).__name__}: {shown}{more}. Nothing was loaded."
            f"{_SAVE_PRETRAINED if hasattr(model, 'save_pretrained') else ''}"
        )
    model.load_state_dict({names[n]: value for n, value in fitting.items()}, strict=False)
    functions = {function_name(activations[place]) or "" for place in assumed}
    return Loaded(
        len(fitting),
        new=tuple(name for name in own if name in new),
        dropped=tuple(sorted(dropped)),
        head=tuple(name for name in own if name in replaced),
        prefix=prefix,
        assumed=sum(n.startswith(tuple(f"{p}." for p in assumed)) for n in fitting),
        function=" and ".join(sorted(functions)),
    )


def _misfits(own: Mapping[str, Tensor], given: Mapping[str, Tensor], free: set[str]) -> list[str]:
    """Say where the weights are not those of the network, but for the names in ``free``."""
    tied: dict[int, list[str]] = {}  # by tensor: all its names
    for name, tensor in own.items():
        tied.setdefault(id(tensor), []).append(name)
    problems = [
        f"missing: {n}"
        for n, tensor in own.items()
        if n not in free and given.keys().isdisjoint(tied[id(tensor)])
    ]
    problems += [f"left over: {n}" for n in given if n not in own]
    problems += [
        f"{n}: the network has {tuple(own[n].shape)}, the weights {tuple(given[n].shape)}"
        for n in own
        if n in given and n not in free and own[n].shape != given[n].shape
    ]
    for group in tied.values():
        first, *others = [n for n in group if n in given] or [""]
        problems += [
            f"{first} and {n} are one tensor in the network, and differ in the weights"
            for n in others
            if not _equal(given[first], given[n])
        ]
    return problems


def function_name(module: nn.Module) -> str | None:
    """Name the function that a module's coefficients belong to, or None for a module without."""
    name = getattr(module, "function_name", None)
    return str(name()) if callable(name) else None


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _aligned(
    weights: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, str], str]:
    """Bring names of the weights to those of the network.

    Returns:
        The tensors; module -> the function it was trained as, where that is known; the prefix that
        all names had.
    """
    given = {_plain(name): value for name, value in weights.items()}
    metadata = getattr(weights, "_metadata", None) or {}
    trained = {
        _plain(place): entry[FUNCTION_KEY]
        for place, entry in metadata.items()
        if isinstance(entry, Mapping) and FUNCTION_KEY in entry
    }
    if "n_averaged" not in own and {n.split(".")[0] for n in given} == {"module", "n_averaged"}:
        del given["n_averaged"]  # of torch.optim.swa_utils.AveragedModel
    prefix = ""
    while given and all("." in name for name in given):
        first, *others = {name.split(".")[0] for name in given}
        if others or any(name.startswith(f"{first}.") for name in own):
            break
        prefix += f"{first}."
        given = {name.removeprefix(f"{first}."): value for name, value in given.items()}
        trained = {place.removeprefix(f"{first}."): name for place, name in trained.items()}
    wrapped = next((name for name in weights if _plain(name) != name), None)
    if not prefix and wrapped is not None and wrapped.split(".")[0] in _WRAPPERS:
        prefix = f"{wrapped.split('.')[0]}."
    return given, trained, prefix


def _coefficients(
    activations: Mapping[str, nn.Module],
    own: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    trained: Callable[[str], str | None],
) -> tuple[set[str], set[str], list[str], list[str]]:
    """Decide for each activation whether all of its tensors are loaded or none.

    Returns:
        Names that keep their values; names of the weights that have no place; the activations whose
        coefficients are taken for theirs; what is wrong.
    """
    new: set[str] = set()
    dropped: set[str] = set()
    assumed, problems = [], []
    for place, module in activations.items():
        here = {n: tuple(v.shape) for n, v in own.items() if n.startswith(f"{place}.")}
        there = {n: tuple(v.shape) for n, v in given.items() if n.startswith(f"{place}.")}
        was, now = trained(place), function_name(module)
        if not there or not here:  # a plain activation before, or now
            new |= set(here)
            dropped |= set(there)
        elif was is not None and now is not None and was != now:
            problems.append(f"{place} was trained as {was} and is {now}")
        elif here == there:
            if was is None and now is not None:
                assumed.append(place)
        elif _is_polynomial(place, there):
            problems.append(f"{place} {_difference(place, there, here)}")
        else:  # an old activation with parameters of its own, such as PReLU
            new |= set(here)
            dropped |= set(there)
    return new, dropped, assumed, problems


def _is_polynomial(place: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    weight, bias = (shapes.get(f"{place}.{name}", ()) for name in ("weight", "bias"))
    return len(weight) == len(bias) > 0 and bias == (*weight[:-1], 1)


def _difference(
    place: str, old: Mapping[str, tuple[int, ...]], new: Mapping[str, tuple[int, ...]]
) -> str:
    name = f"{place}.weight"
    if old.keys() == new.keys() and old[name][:-1] == new[name][:-1]:
        return f"has order {old[name][-1]} in the weights and {new[name][-1]} in the network"
    then, now = (
        ", ".join(f"{n.removeprefix(f'{place}.')} {shape}" for n, shape in shapes.items())
        for shapes in (old, new)
    )
    return f"has {then} in the weights and {now} in the network"


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b.to(a.device)))


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


def _described(path: Path) -> str | None:
    """Return the function of the coefficients in a file of an export or run, if it lies in one."""
    path = path.expanduser().absolute()
    for file in (path.parent / "config.json", path.parent.parent / "network.json"):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            network = content["polyvision"]["network"] if file.name == "config.json" else content
            network = network.get("shape", network)  # of a language model
            name, options = network["activation"], network["activation_options"]
            return function_name(create_activation(name, **options))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # no such file, or not one of ours
    return None


def read_weights(path: str | Path) -> Mapping[str, Tensor]:
    """Read a file of tensors; a checkpoint that nests them under ``state_dict`` or ``model``.

    Raises:
        PolyvisionError: the file cannot be read, or holds something else.
    """
    found = read_tensor_file(Path(path).expanduser())
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        entries = f": it holds {some(map(str, found))}" if isinstance(found, Mapping) else ""
        raise PolyvisionError(
            f"{str(path)!r} holds no mapping of names to tensors{entries}. Save the state_dict "
            f"alone: torch.save(model.state_dict(), 'weights.pth')"
        )
    return found
