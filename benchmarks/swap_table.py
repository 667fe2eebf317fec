"""The table of docs/swap-table.md: one network of every family, with its activations swapped.

    python -m benchmarks.swap_table > docs/swap-table.md

Takes about ten minutes on one CPU core. Networks lie on the meta device (the few that cannot be
built there, on the CPU): nothing is downloaded or computed, but every shape is.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import timm
import torch
from timm.models._registry import _model_to_module
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torchvision import models

from polyvision.models.swap.command import build_empty
from polyvision.models.swap.replace import swap_activations
from polyvision.models.trace.inputs import Inputs, example_inputs
from polyvision.models.trace.known_activations import is_activation_module, is_bounded

ACTIVATION = "polynorm"
TRANSFORMERS = ("bert", "gpt2", "llama", "vit")
HEADER = ("model", "`act_layer`", "sites", "NCHW", "last", "unshared", "functions", "gates kept")
HEADER += ("kept", "left over", "backward")
LIBRARIES = ("torch", "timm", "torchvision", "transformers")


class Probe(nn.Module):
    """An activation that timm is asked to use, to see where it does."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()


def smallest_of_timm() -> list[str]:
    """Return the model with the fewest parameters of every module of timm."""
    best: dict[str, tuple[int, str]] = {}
    for name in timm.list_models():
        if not timm.model_entrypoint(name).__module__.startswith("timm."):
            continue  # registered by somebody else
        model = build_empty(name)
        entry = (sum(p.numel() for p in model.parameters()), name)
        module = _model_to_module[name]
        best[module] = min(best.get(module, entry), entry)
    return sorted(name for _, name in best.values())


def smallest_of_torchvision() -> list[str]:
    """Return the classifier with the fewest parameters of every module of torchvision."""
    best: dict[str, tuple[int, str]] = {}
    for name in models.list_models(module=models):
        weights = next(iter(models.get_model_weights(name)))
        entry = (weights.meta["num_params"], f"torchvision:{name}")
        module = models.get_model_builder(name).__module__
        best[module] = min(best.get(module, entry), entry)
    return sorted(name for _, name in best.values())


def acceptance(name: str) -> str:
    """Say how far ``act_layer`` alone goes: yes, no, or how many activations stay built-in."""
    if ":" in name:
        return "-"
    try:
        with torch.device("meta"):
            model = timm.create_model(name, act_layer=Probe)
    except Exception:
        return "no"
    left = sum(
        is_activation_module(m) and not is_bounded(type(m).__name__) for m in model.modules()
    )
    if not any(isinstance(m, Probe) for m in model.modules()):
        return "ignored"
    return f"{left} stay" if left else "yes"


def backward(model: nn.Module, inputs: Inputs, names: list[str]) -> str:
    """Run a forward and a backward pass in training mode; every coefficient must get a gradient."""
    device = next(model.parameters()).device
    args, kwargs = tree_map_only(
        Tensor,
        lambda t: torch.zeros(t.shape, dtype=t.dtype, device=device),
        (inputs.args, dict(inputs.kwargs)),
    )
    outputs = tree_leaves(_plain(model.train()(*args, **kwargs)))
    sum(t.square().sum() for t in outputs if isinstance(t, Tensor) and t.requires_grad).backward()
    missing = [
        f"{name}.{key}"
        for name in names
        for key, p in model.get_submodule(name).named_parameters()
        if p.grad is None
    ]
    return f"NO GRADIENT: {', '.join(missing)}" if missing else str(device)


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, dict) else output


def row(name: str) -> tuple[str, ...]:
    """Swap the activations of one network and return its line of the table."""
    library = name.rpartition(":")[0]
    if library and importlib.util.find_spec(library) is None:
        return (name, f"{library} is not installed", *[""] * (len(HEADER) - 2))
    accepted = acceptance(name)
    model = build_empty(name)
    inputs = example_inputs(model)
    report = swap_activations(model, ACTIVATION, inputs=inputs, on_leftover="ignore")
    how = Counter(site.how for site in report.sites)
    dims = Counter(site.dim for site in report.sites)
    others = Counter(f"{k.was}: {k.reason}" for k in report.kept if k.role != "gate")
    cells = (len(report.sites), dims[1], dims[-1], how["unshared"], how["function"])
    return (
        name,
        accepted,
        *map(str, cells),
        str(len(report.gates)),
        "; ".join(f"{n} {text}" for text, n in others.items()) or "0",
        "; ".join(f"{k.name}: {k.reason}" for k in report.leftovers) or "0",
        backward(model, inputs, [site.name for site in report.sites]),
    )


def markdown(cells: tuple[str, ...]) -> str:
    """Return one line of the table."""
    return f"| {' | '.join(cells)} |"


def versions() -> str:
    """Return the versions that the table holds for."""
    found = [n for n in LIBRARIES if importlib.util.find_spec(n)]
    return ", ".join(f"{n} {importlib.metadata.version(n).split('+')[0]}" for n in found)


def lines() -> Iterator[str]:
    """Yield the whole document."""
    yield TEXT.format(versions=versions(), act=ACTIVATION)
    yield markdown(HEADER)
    yield markdown(("---",) * len(HEADER))
    names = smallest_of_timm() + smallest_of_torchvision()
    for name in names + [f"transformers:{kind}" for kind in TRANSFORMERS]:
        print(name, file=sys.stderr, flush=True)
        yield markdown(row(name))


TEXT = """# The swap, family by family

The smallest network of every module of timm, of every classifier of torchvision, and the default
configurations of some transformers, after `polyvision.swap_activations(model, "{act}")`.

    python -m benchmarks.swap_table > docs/swap-table.md

Made with {versions}. A slow test makes every line again.

- `act_layer`: whether timm's own keyword reaches every activation that is no gate: yes, how many
  stay built-in, or no (the family does not accept it). `-`: the library has no such keyword.
- sites: activations in the swapped network, by the dimension they normalise, and how many of them
  were taken out of a shared module or stand in the place of a function call.
- kept, left over: what stays for a reason other than being a gate, and what could not be replaced.
- backward: a forward and a backward pass in training mode ran on this device, and every new
  coefficient got a gradient. On `meta` that checks shapes and the graph, not values.
"""


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for line in lines():
        print(line, flush=True)
