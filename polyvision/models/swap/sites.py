"""Activation sites: where a network applies an activation, in which role, over which dimension.

A normalising activation must know its feature dimension, and rank alone does not tell it: the MLPs
of ConvNeXt see NHWC, squeeze-and-excitation sees 1x1 maps, and several families mix NCHW with token
sequences. So the network is traced at two sizes. The dimension that stays is the feature dimension.
Where several stay (pooled maps, networks of fixed size), the layer that feeds the site decides, or
else the layer that the site feeds.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import nn

from polyvision.errors import PolyvisionError, first_line
from polyvision.models.swap.rewrite import attribute_for
from polyvision.models.trace.calls import Call, Target, Tracer
from polyvision.models.trace.functions import is_activation_module, is_bounded, is_whole_norm
from polyvision.models.trace.inputs import Inputs, other_sizes

__all__ = ["KEPT_ROLES", "ROLES", "Role", "Use", "feature_dim", "find_uses"]

Role = Literal["stem", "block", "head", "gate", "mlp", "kernel", "positive"]
ROLES: tuple[Role, ...] = get_args(Role)

# Roles whose sites stay unless they are asked for, with the reason.
KEPT_ROLES: dict[Role, str] = {
    "gate": "a gate",
    "kernel": "an attention kernel",
    "positive": "keeps a scale, an output or a parameter positive",
}

_Calls = dict[Target, list[Call]]
_HEAD = re.compile(r"(classifier|head|fc|pooler|pre_logits|last_linear)\w*(\.|$)")
_MLP = re.compile(
    r"mlp|ffn|feed_?forward|intermediate|glu|Transformer(En|De)coderLayer", re.IGNORECASE
)
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


@dataclasses.dataclass
class Use:
    """One site: an activation module at one place, or one call of a function.

    Attributes:
        name: dotted name of the module that is, or would be, the activation of the site.
        targets: the calls that share the site, more than one where they cannot be told apart.
        role: see ``find_uses``.
        calls: how often a forward pass in eval mode (else in training mode) applies it.
        keeps_shape: input and output have the same shape.
        device: of the input.
        dtype: of the input.
        training: the site is only reached in training mode.
        dim: the feature dimension, 1 for NCHW and -1 for channel-last; None if not asked for.
        no_dim: why ``dim`` cannot be told.
    """

    name: str
    targets: list[Target]
    role: Role
    calls: int
    keeps_shape: bool
    device: torch.device
    dtype: torch.dtype
    training: bool = False
    dim: int | None = None
    no_dim: str = ""

    @property
    def kind(self) -> str:
        """Class of the module, or name of the function with brackets, also of one by hand."""
        target = self.targets[0]
        return f"{target.kind}()" if target.module is None else target.kind

    @property
    def known(self) -> bool:
        """Whether it is an activation, not some other nonlinear function."""
        return self.targets[0].known

    @property
    def rewritten(self) -> bool:
        """Whether the source must change for the site to have a module of its own."""
        return self.targets[0].module != self.name


def find_uses(
    model: nn.Module, inputs: Inputs, *, need_dim: bool
) -> tuple[list[Use], dict[str, str], list[str]]:
    """Trace ``model`` and describe every place where it applies an activation.

    The role is ``gate`` for a function that bounds its output (sigmoid, hard-sigmoid, tanh, and
    relu6 of x + 3); ``kernel`` for what linear attention applies to queries and keys, and others to
    scores; ``positive`` for a function above zero (softplus, exp, elu + 1) that scales a tensor or
    is returned, and for functions of parameters; ``mlp`` inside a feed-forward network, also for
    the activated half of a gated one; otherwise ``stem`` before, ``block`` in and ``head`` after
    the blocks that the network repeats.

    An activation written by hand is one site. So is a nonlinear pointwise function that equals no
    known activation: it has ``known`` false.

    Args:
        model: left as it is.
        inputs: what the network takes.
        need_dim: find the feature dimensions.

    Returns:
        The sites in order of execution, name and class of the activation modules that no pass
        calls, and remarks.

    Raises:
        PolyvisionError: the network cannot be run on these inputs.
    """
    tracer = Tracer(model)
    try:
        evaluated = [tracer.run(inputs, training=False)]
    except Exception as error:  # whatever a foreign forward raises
        raise PolyvisionError(
            f"{type(model).__name__} cannot be traced on inputs of shape {inputs.describe()}: "
            f"{first_line(error)}. {inputs.advice()}"
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
    modules = {target.module for target in every if target.module is not None}
    # A module that is an activation as a whole may contain others.
    inside = [t for t in every if t.place and {t.place.owner, *_above(t.place.owner)} & modules]
    sites = _grouped({target: None for target in every if target not in inside})
    uses = _named(model, sites)
    for use in uses:
        use.training = use.targets[0] not in evaluated[0]
        _measure(use, trained if use.training else evaluated, need_dim)
    _place_roles(model, uses)
    called = {target.module for target in every} | tracer.absorbed
    idle = {
        name: type(module).__name__
        for name, module in model.named_modules()
        if is_activation_module(module)
        and not {name, *_above(name)} & called
        and not any(is_whole_norm(model.get_submodule(above)) for above in _above(name))
    }
    return uses, idle, notes


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


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _grouped(calls: Mapping[Target, object]) -> list[list[Target]]:
    """Put those calls of one module together that no rewrite of the source can tell apart."""
    at_place = Counter(target.place for target in calls)
    groups: dict[tuple[str | None, Target | None], list[Target]] = {}
    seen: set[str] = set()
    for target in calls:
        own = target.module is None or (
            target.module in seen and target.place is not None and at_place[target.place] == 1
        )
        groups.setdefault((target.module, target if own else None), []).append(target)
        seen.add(target.module or "")
    return list(groups.values())


def _named(model: nn.Module, groups: Sequence[list[Target]]) -> list[Use]:
    """Name the sites: a module's first one by the module, the others beside it in their owner."""
    uses, taken, named = [], set[str](), set[str]()
    for targets in groups:
        first = targets[0]
        if first.module is not None and first.module not in named:
            name = first.module
            named.add(name)
        elif first.place is None:
            name = f"{first.caller} ({first.kind})"
        else:
            owner = first.place.owner
            prefix = f"{owner}." if owner else ""
            used = {n.removeprefix(prefix) for n in taken if n.startswith(prefix)}
            name = prefix + attribute_for(first, model.get_submodule(owner), used)
        taken.add(name)
        uses.append(Use(name, targets, "block", 0, True, torch.device("cpu"), torch.float32))
    return uses


def _measure(use: Use, runs: Sequence[_Calls], need_dim: bool) -> None:
    """Fill in what the passes saw at one site."""
    seen = [[call for target in use.targets for call in run.get(target, [])] for run in runs]
    use.calls = len(seen[0])
    use.keeps_shape = all(call.keeps_shape for call in seen[0])
    use.device, use.dtype = seen[0][0].device, seen[0][0].dtype
    use.role = next((call.role for call in seen[0] if call.role), "block")
    if use.known and is_bounded(use.targets[0].kind):
        use.role = "gate"
    if not need_dim or not use.known:
        return
    dims = set()
    for same_call in zip(*(calls for calls in seen if len(calls) == use.calls), strict=True):
        dim = feature_dim(same_call)
        if dim is None:
            shapes = " and ".join(str(tuple(call.shape)) for call in same_call)
            use.no_dim = (
                f"has no feature dimension that can be told from its input shapes {shapes} and its "
                "neighbouring layers"
            )
            return
        dims.add(dim)
    if len(dims) > 1:
        use.no_dim = (
            f"is called with features in different dimensions ({sorted(dims)}), which one "
            "normalising activation cannot serve"
        )
        return
    use.dim = dims.pop()


def feature_dim(calls: Sequence[Call]) -> int | None:
    """Return the dimension that is the same in all runs; the neighbouring layers break ties."""
    shapes = [call.shape for call in calls]
    last = len(shapes[0]) - 1
    stable = [d for d in range(1, last + 1) if len({shape[d] for shape in shapes}) == 1]
    layout = calls[0].layout.dim
    if len(stable) > 1 and layout is not None:
        stable = [layout % (last + 1)]
    elif stable == [1, 3] and len(stable) < last:
        stable = [3]  # (batch, heads, tokens, features of a head): images would vary in both sizes
    if len(stable) != 1:
        return None
    return -1 if stable[0] == last else stable[0]


def _place_roles(model: nn.Module, uses: Sequence[Use]) -> None:
    """Tell stem, blocks, head and feed-forward networks apart."""
    composite = Counter(
        type(module)
        for module in model.modules()
        if sum(isinstance(m, _LAYERS) for m in module.modules()) > 1
        and not isinstance(module, nn.Sequential | nn.ModuleList)
    )
    classes = {name: type(module) for name, module in model.named_modules()}
    repeated = [
        any(composite[classes[name]] > 1 for name in _above(use.name) if name in classes)
        for use in uses
    ]
    first = repeated.index(True) if True in repeated else 0
    last = len(uses) - 1 - repeated[::-1].index(True) if True in repeated else len(uses) - 1
    for i, use in enumerate(uses):
        if use.role in KEPT_ROLES:
            continue
        owners = ["", *(name for name in _above(use.name) if name in classes)]
        near = [f"{name.rpartition('.')[2]} {classes[name].__name__}" for name in owners[-2:]]
        if any(_MLP.search(text) for text in near) or _MLP.search(use.name.rpartition(".")[2]):
            use.role = "mlp"
        elif i < first:
            use.role = "stem"
        elif i > last or _HEAD.match(use.name):
            use.role = "head"
