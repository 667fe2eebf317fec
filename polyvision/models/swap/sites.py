"""Activation sites: where a network applies an activation, in which role, over which dimension.

A normalising activation must know its feature dimension, and rank alone does not tell it: the MLPs
of ConvNeXt see NHWC, squeeze-and-excitation sees 1x1 maps, and several families mix NCHW with token
sequences. So the network is traced at two sizes. The dimension that stays is the feature dimension.
Where several stay (pooled maps, networks of fixed size), the layer that feeds the site decides, or
else the layer that the site feeds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from torch import nn

from polyvision.errors import PolyvisionError, first_line
from polyvision.models.swap.report import Kept, Role, Site
from polyvision.models.swap.rewrite import attribute_for
from polyvision.models.trace.call import Call, Execution
from polyvision.models.trace.inputs import Inputs, other_sizes
from polyvision.models.trace.known_activations import (
    is_activation_module,
    is_bounded,
    is_whole_norm,
)
from polyvision.models.trace.tracer import Tracer

__all__ = ["KEPT_ROLES", "feature_dim", "find_sites"]

# Roles whose sites stay unless they are asked for, with the reason.
KEPT_ROLES: dict[Role, str] = {
    "gate": "a gate",
    "kernel": "an attention kernel",
    "positive": "keeps a scale, an output or a parameter positive",
}

_Calls = dict[Call, list[Execution]]
_HEAD = re.compile(r"(classifier|head|fc|pooler|pre_logits|last_linear)\w*(\.|$)")
_MLP = re.compile(
    r"mlp|ffn|feed_?forward|intermediate|glu|Transformer(En|De)coderLayer", re.IGNORECASE
)
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


def find_sites(
    model: nn.Module, inputs: Inputs, *, need_dim: bool
) -> tuple[list[Site], list[Kept], list[str]]:
    """Trace ``model`` and describe every activation that it applies.

    The role is ``gate`` for a function that bounds its output (sigmoid, hard-sigmoid, tanh, and
    relu6 of x + 3); ``kernel`` for what linear attention applies to queries and keys, and others to
    scores; ``positive`` for a function above zero (softplus, exp, elu + 1) that scales a tensor or
    is returned, and for functions of parameters; ``mlp`` inside a feed-forward network, also for
    the activated half of a gated one; otherwise ``stem`` before, ``block`` in and ``head`` after
    the blocks that the network repeats.

    An activation written by hand is one site. So is a nonlinear pointwise function that equals no
    known activation: its call has ``known`` false.

    Args:
        model: left as it is.
        inputs: what the network takes.
        need_dim: find the feature dimensions.

    Returns:
        The sites in order of execution; activations that are none, since no pass calls them or
        they are part of a norm or recurrent layer; and remarks.

    Raises:
        PolyvisionError: the network cannot be run on these inputs.
    """
    tracer = Tracer(model)
    try:
        evaluated = [tracer.run(inputs, training=False)]
    except Exception as error:  # whatever a foreign forward raises
        raise PolyvisionError(
            f"{type(model).__name__} cannot be traced on inputs of shape {inputs.describe()}: "
            f"{first_line(error)}. {inputs.advice(model)}"
        ) from error
    others = other_sizes(inputs) if need_dim else []
    notes: list[str] = []
    evaluated += _runs(tracer, others, notes=notes)
    not_searched = "not searched in training mode"
    trained = _runs(tracer, [inputs], training=True, notes=notes, otherwise=not_searched)
    if trained and set(trained[0]) - set(evaluated[0]):  # auxiliary heads
        trained += _runs(tracer, others, training=True, notes=notes)
    if tracer.made_up:
        notes.append(
            "what the network runs depends on values, which were made up to search it: see whether "
            "all its activations are listed"
        )
    every = {**evaluated[0], **(trained[0] if trained else {})}
    modules = {call.module for call in every if call.module is not None}
    # A module that is an activation as a whole may contain others.
    inside = [c for c in every if c.location and {*_with_above(c.location.owner)} & modules]
    sites = _group(model, [call for call in every if call not in inside])
    for site in sites:
        site.training = site.source not in evaluated[0]
        _measure(site, trained if site.training else evaluated, need_dim)
    _assign_roles(model, sites)
    return sites, _no_sites(model, modules | tracer.absorbed), notes


def _no_sites(model: nn.Module, called: set[str]) -> list[Kept]:
    """Return the activations that no pass calls, and those inside of other layers."""
    never, inside = [], []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if is_whole_norm(module):
            inside.append(Kept(name, kind, "a norm with its nonlinearity inside"))
        elif isinstance(module, nn.RNN | nn.RNNCell) and module.nonlinearity == "relu":
            inside.append(Kept(name, kind, "a recurrent layer with its ReLU inside"))
        elif (
            is_activation_module(module)
            and called.isdisjoint(_with_above(name))
            and not any(is_whole_norm(model.get_submodule(above)) for above in _with_above(name))
        ):
            never.append(Kept(name, kind, "never called"))
    return never + inside


def _runs(
    tracer: Tracer,
    sizes: Sequence[Inputs],
    *,
    training: bool = False,
    notes: list[str],
    otherwise: str = "feature dimensions rest on one size and on the neighbouring layers",
) -> list[_Calls]:
    """Run every size that the network accepts; note what follows where it accepts none."""
    runs, refused = [], ""
    for inputs in sizes:
        try:
            runs.append(tracer.run(inputs, training=training))
        except Exception as error:  # a network of fixed size refuses others, in its own way
            refused = f"{inputs.describe()}: {first_line(error)}"
    if refused and not runs:
        notes.append(f"{otherwise}: the network refuses inputs of shape {refused}")
    return runs


def _with_above(name: str) -> list[str]:
    """Return the names of the modules around ``name``, from the outermost, and its own."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _group(model: nn.Module, calls: Sequence[Call]) -> list[Site]:
    """Make the sites: one of all calls of a module that no rewrite of the source can tell apart.

    The first site of a module has its name; the others are named beside their caller's children.
    """
    at_location = Counter(call.location for call in calls)
    sites: dict[tuple[str | None, Call | None], Site] = {}
    seen: set[str] = set()
    for call in calls:
        apart = call.location is not None and at_location[call.location] == 1
        own = call.module is None or (call.module in seen and apart)
        key = (call.module, call if own else None)
        if key not in sites:
            taken = [site.name for site in sites.values()]
            sites[key] = Site(_name(model, call, taken, is_first=call.module not in seen))
        sites[key].sources.append(call)
        seen.add(call.module or "")
    return list(sites.values())


def _name(model: nn.Module, call: Call, taken: Sequence[str], *, is_first: bool) -> str:
    if call.module is not None and is_first:
        return call.module
    if call.location is None:
        return f"{call.caller} ({call.kind})"
    owner = call.location.owner
    prefix = f"{owner}." if owner else ""
    used = {name.removeprefix(prefix) for name in taken if name.startswith(prefix)}
    return prefix + attribute_for(call, model.get_submodule(owner), used)


def _measure(site: Site, runs: Sequence[_Calls], need_dim: bool) -> None:
    """Fill in what the passes saw at one site."""
    seen = [[e for call in site.sources for e in run.get(call, [])] for run in runs]
    site.seen, site.calls = seen[0], len(seen[0])
    site.role = next((execution.role for execution in site.seen if execution.role), "block")
    if site.source.known and is_bounded(site.source.kind):
        site.role = "gate"
    if not need_dim or not site.source.known:
        return
    dims = set()
    for same in zip(*(run for run in seen if len(run) == site.calls), strict=True):
        dim = feature_dim(same)
        if dim is None:
            shapes = " and ".join(str(tuple(execution.shape)) for execution in same)
            site.no_dim = (
                f"has no feature dimension that can be told from its input shapes {shapes} and its "
                "neighbouring layers"
            )
            return
        dims.add(dim)
    if len(dims) > 1:
        site.no_dim = (
            f"is called with features in different dimensions ({sorted(dims)}), which one "
            "normalising activation cannot serve"
        )
        return
    site.dim = dims.pop()


def feature_dim(runs: Sequence[Execution]) -> int | None:
    """Return the dimension that is the same in all runs; the neighbouring layers break ties."""
    shapes = [execution.shape for execution in runs]
    last = len(shapes[0]) - 1
    stable = [d for d in range(1, last + 1) if len({shape[d] for shape in shapes}) == 1]
    told = runs[0].dim
    if len(stable) > 1 and told is not None:
        stable = [told % (last + 1)]
    elif stable == [1, 3] and len(stable) < last:
        stable = [3]  # (batch, heads, tokens, features of a head): images would vary in both sizes
    if len(stable) != 1:
        return None
    return -1 if stable[0] == last else stable[0]


def _assign_roles(model: nn.Module, sites: Sequence[Site]) -> None:
    """Tell stem, blocks, head and feed-forward networks apart."""
    composite = Counter(
        type(module)
        for module in model.modules()
        if sum(isinstance(m, _LAYERS) for m in module.modules()) > 1
        and not isinstance(module, nn.Sequential | nn.ModuleList)
    )
    classes = {name: type(module) for name, module in model.named_modules()}
    repeated = [
        any(composite[classes[name]] > 1 for name in _with_above(site.name)[:-1] if name in classes)
        for site in sites
    ]
    first = repeated.index(True) if True in repeated else 0
    last = len(sites) - 1 - repeated[::-1].index(True) if True in repeated else len(sites) - 1
    for i, site in enumerate(sites):
        if site.role in KEPT_ROLES:
            continue
        owners = ["", *(name for name in _with_above(site.name)[:-1] if name in classes)]
        near = [f"{name.rpartition('.')[2]} {classes[name].__name__}" for name in owners[-2:]]
        if any(_MLP.search(text) for text in near) or _MLP.search(site.name.rpartition(".")[2]):
            site.role = "mlp"
        elif i < first:
            site.role = "stem"
        elif i > last or _HEAD.match(site.name):
            site.role = "head"
