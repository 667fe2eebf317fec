"""Replace the activations of any network, and say exactly what was replaced and what was not."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from polyvision.errors import PolyvisionError, first_line, some, unknown
from polyvision.models.swap.choice import Select, choose
from polyvision.models.swap.new_activation import NewActivation, new_activation
from polyvision.models.swap.report import Kept, Site, SwapReport
from polyvision.models.swap.rewrite import CannotRewrite, rewritten_class, source_of
from polyvision.models.swap.save_pretrained import guard_save_pretrained
from polyvision.models.swap.sites import find_sites
from polyvision.models.trace.call import Call, Execution, Location
from polyvision.models.trace.inputs import Inputs, example_inputs
from polyvision.models.trace.known_activations import is_activation_module
from polyvision.models.trace.tracer import HOOKS, Tracer, hooks_of

__all__ = ["OnLeftover", "swap_activations"]

OnLeftover = Literal["error", "warn", "ignore"]
# By this attribute torch's encoder layer takes a fused kernel, which computes the old activation.
_FUSED = "activation_relu_or_gelu"


def swap_activations(
    model: nn.Module,
    act: str | Callable[..., nn.Module],
    *,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any] | Inputs | None = None,
    include: Select | Iterable[Select] | None = None,
    exclude: Select | Iterable[Select] | None = None,
    on_leftover: OnLeftover = "error",
    **options: Any,
) -> SwapReport:
    """Give every activation site of ``model`` an activation ``act`` of its own, in place.

    Activation modules are replaced, also inside norms that hold one (``BatchNormAct2d.act``). A
    module that serves several sites gets one successor for each. A call of a function such as
    ``F.relu`` becomes a module of the module that makes the call. A normalising activation gets the
    feature dimension of its site, found by running the network on tensors without data. Every
    other entry of the ``state_dict`` keeps its name and value.

    An activation written by hand (``x * torch.sigmoid(x)``, or a module of your own that computes
    one) is one site. A nonlinear pointwise function that is no known activation is left over.

    Gates (sigmoid, hard-sigmoid, tanh), the kernels of linear attention, and positive scales and
    outputs (softplus) stay unless ``include`` names them, and so do norms whose nonlinearity is
    part of them (EvoNorm).

    Args:
        model: any network, on any device including meta; not yet compiled or scripted.
        act: a registered activation that takes one input, or a class (``nn.Mish``) or function that
            builds a new module at each call. One that is not registered counts as pointwise.
        inputs: what ``model`` takes: a tensor, a tuple of arguments or a dictionary of keywords, of
            which only shapes and dtypes matter. Not needed for most models of timm, torchvision and
            transformers.
        include: replace these only: roles (``stem block head gate mlp kernel positive``), names
            or patterns of names (``layer1.*``), module classes or functions (``nn.GELU``,
            ``F.relu``). A pattern with ``*`` or ``?`` reaches no gate, kernel or positive scale.
        exclude: keep these, given in the same way.
        on_leftover: what to do about activations that should be replaced and cannot be:
            ``error`` (the model is left as it was), ``warn``, or ``ignore`` (they are listed).
        options: keywords of the activation, such as ``order``.

    Returns:
        A record of what was done; ``print`` it for a table.

    Raises:
        PolyvisionError: a name, option, selection or input does not fit, a feature dimension
            cannot be told, or something is left over. The model is then unchanged.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Sigmoid())
        >>> report = swap_activations(model, "polynorm", order=2)
        >>> model[1], [site.dim for site in report.sites], [gate.name for gate in report.gates]
        (PolyNorm(order=2, eps=1e-06, dim=1), [1], ['3'])
    """
    if on_leftover not in get_args(OnLeftover):
        raise unknown("on_leftover", str(on_leftover), get_args(OnLeftover))
    _check_model(model)
    activation = new_activation(act, options, place=type(model).__name__)
    if inputs is None:
        inputs = example_inputs(model)
    elif not isinstance(inputs, Inputs):
        inputs = Inputs.of(inputs)
    before = sum(p.numel() for p in model.parameters())
    sites, no_sites, notes = find_sites(model, inputs, need_dim=activation.needs_dim)
    chosen, kept = choose(model, sites, include, exclude)
    kept += no_sites
    edit = _Edit(model, activation)
    leftovers = edit.prepare(chosen, sites)
    edit.apply()
    try:
        leftovers += _audit(model, activation.name, inputs, edit.done)
        _settle(leftovers, on_leftover, type(model).__name__, activation.name)
    except BaseException:
        edit.undo()
        raise
    added = sum(p.numel() for p in model.parameters()) - before
    if edit.done:
        notes += guard_save_pretrained(model, coefficients=added > 0)
    return SwapReport(
        activation=activation.name,
        sites=tuple(edit.done),
        kept=tuple(kept),
        leftovers=tuple(leftovers),
        parameters_added=added,
        notes=(*notes, *edit.notes),
    )


def _check_model(model: nn.Module) -> None:
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise PolyvisionError(f"swap_activations needs an nn.Module, got {kind}")
    if isinstance(model, torch.jit.ScriptModule) or kind == "OptimizedModule":
        raise PolyvisionError(
            f"{kind}: swap the activations of the plain network, then compile or script it"
        )
    scripted = [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for key, child in module.named_children()
        if isinstance(child, torch.jit.ScriptModule)
    ]
    if scripted:
        raise PolyvisionError(
            f"{kind}: what is scripted cannot be searched for activations ({some(scripted)}); swap "
            "those of the plain network, then script"
        )
    lazy = [n for n, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise PolyvisionError(
            f"{kind}: {some(lazy)} get their shapes in the first forward pass; run the network once"
        )
    if is_activation_module(model):
        raise PolyvisionError(f"the model is itself an activation, {kind}; there is no place in it")


class _Edit:
    """The changes to a network: prepared whole, then made, and undone if the audit fails."""

    def __init__(self, model: nn.Module, activation: NewActivation) -> None:
        self.done: list[Site] = []
        self.notes: list[str] = []
        self._model = model
        self._activation = activation
        # Parent, attribute, new module, and the child of the parent that runs before it.
        self._modules: list[tuple[nn.Module, str, nn.Module, str | None]] = []
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        # Of every module that is changed: its class, its children, and its use of a fused kernel.
        self._before: list[tuple[nn.Module, type, dict[str, nn.Module | None], int | None]] = []

    def prepare(self, chosen: Sequence[Site], sites: Sequence[Site]) -> list[Kept]:
        """Build every activation and every rewritten class; return what cannot be replaced."""
        left = []
        by_owner: dict[str, list[Site]] = {}
        new: dict[str, nn.Module] = {}
        names = {site.name for site in chosen}
        at_location = Counter(call.location for site in sites for call in site.sources)
        shared = {where for where, count in at_location.items() if count > 1}
        for site in sites:
            if site.name in names:
                reason = self._obstacle(site, shared)
                if reason is not None:
                    left.append(site.kept(reason))
                    continue
                new[site.name] = self._activation.at(site)
                self.done.append(site)
            elif site.rewritten and site.source.module in names:
                # It shares a module that is replaced, and itself stays: it takes the old one along.
                new[site.name] = self._model.get_submodule(site.source.module or "")
            if site.name in new and site.rewritten and site.source.location is not None:
                by_owner.setdefault(site.source.location.owner, []).append(site)
        for owner, theirs in by_owner.items():
            for kept in self._rewrite(self._model.get_submodule(owner), theirs):
                left.append(kept)
                del new[kept.name]
        self.done = [site for site in self.done if site.name in new]
        locations = {site.name: site.source.location for site in sites}
        for name, module in new.items():
            owner, _, attribute = name.rpartition(".")
            parent = self._model.get_submodule(owner)
            after = getattr(locations[name], "after", None)
            self._modules.append((parent, attribute, module.train(parent.training), after))
            if isinstance(parent, nn.TransformerDecoderLayer) and owner not in by_owner:
                self._classes.append((parent, rewritten_class(parent, {})))  # so that copies work
        hooked = [n or "the network" for n, m in self._model.named_modules() if any(hooks_of(m))]
        if hooked:
            self.notes.append(f"hooks are not run while activations are looked for: {some(hooked)}")
        self.notes += [note for site in self.done for note in self._about_hooks(site)]
        return left

    def _obstacle(self, site: Site, shared: set[Location | None]) -> str | None:
        """Return why a site cannot be replaced, None if nothing is known against it.

        Args:
            site: where an activation shall be replaced.
            shared: places in the source that call more than one activation.
        """
        call = site.source
        if not call.known:
            return f"pointwise and nonlinear, but no known activation: {source_of(call)}"
        if not all(execution.keeps_shape for execution in site.seen):
            return "its output has another shape than its input"
        if not site.rewritten:
            if any(one.dropped for one in site.sources):
                return f"{call.caller} drops its result: it relies on a change in place"
            parent = self._model.get_submodule(site.name.rpartition(".")[0])
            if type(parent).__name__ == "OptimizedModule":
                return "compiled by itself: swap the activations first, then compile"
        elif call.location is None:
            return f"called in {call.caller}, which is no method of a module"
        elif call.location in shared:
            return f"one place in {call.caller} calls several functions"
        return None

    def _about_hooks(self, site: Site) -> list[str]:
        """Say where hooks of the user go."""
        module = site.source.module
        if module is None or not any(hooks_of(self._model.get_submodule(module))):
            return []
        if site.rewritten:
            return [f"{site.name} is called in place of {module}, but has none of its hooks"]
        return [f"the hooks of {module} are on the new module"]

    def _rewrite(self, owner: nn.Module, sites: Sequence[Site]) -> list[Kept]:
        """Rewrite what can be rewritten of the calls that one module makes."""
        edits: dict[Call, str] = {}
        left, new = [], None
        for site in sites:
            edit = {site.source: site.name.rpartition(".")[2]}
            try:
                new = rewritten_class(owner, edits | edit)
            except CannotRewrite as reason:
                left.append(site.kept(str(reason)))
            else:
                edits |= edit
        if new is not None:
            self._classes.append((owner, new))
        return left

    def apply(self) -> None:
        """Make the prepared changes."""
        changed = dict.fromkeys([m for m, _ in self._classes] + [m for m, *_ in self._modules])
        self._before = [(m, type(m), dict(m._modules), vars(m).get(_FUSED)) for m in changed]
        for owner, cls in self._classes:
            owner.__class__ = cls
        behind: dict[tuple[nn.Module, str | None], str] = {}  # the last one put behind a child
        for parent, attribute, new, after in self._modules:
            old = parent._modules.get(attribute)
            if old is None:
                _insert(parent, attribute, new, behind.get((parent, after), after))
                behind[parent, after] = attribute
            else:
                parent._modules[attribute] = new
                _take_hooks(old, new)
            if vars(parent).get(_FUSED):
                setattr(parent, _FUSED, 0)

    def undo(self) -> None:
        """Put everything back."""
        for module, cls, children, fused in self._before:
            module.__class__ = cls
            module._modules.clear()
            module._modules.update(children)
            if fused:
                setattr(module, _FUSED, fused)


def _insert(parent: nn.Module, attribute: str, new: nn.Module, after: str | None) -> None:
    """Add a child behind the one that runs before it, where ``children()`` has no other meaning."""
    children = list(parent._modules)
    parent._modules[attribute] = new
    if isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return  # their places are their names
    start = children.index(after) + 1 if after in children else 0
    for name in children[start:]:
        parent._modules[name] = parent._modules.pop(name)


def _take_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give ``new`` the hooks of ``old``: the same dictionaries, so that handles stay good."""
    if any(hooks_of(old)):
        for name in HOOKS:
            vars(new)[f"_{name}"] = vars(old)[f"_{name}"]
        new._is_full_backward_hook = old._is_full_backward_hook


def _audit(model: nn.Module, act: str, inputs: Inputs, sites: Sequence[Site]) -> list[Kept]:
    """Trace the changed network: every new module must get the calls that its site had."""
    tracer = Tracer(model, activations=[site.name for site in sites])
    seen: dict[tuple[bool, str | None], list[Execution]] = {}
    for training in {site.training for site in sites}:
        try:
            calls = tracer.run(inputs, training=training)
        except Exception as error:  # whatever a foreign forward raises
            raise PolyvisionError(
                f"{type(model).__name__} does not run with {act}: {first_line(error)}. The model "
                "is unchanged."
            ) from error
        for call, executions in calls.items():
            seen.setdefault((training, call.module), []).extend(executions)
    left = []
    for site in sites:
        now = seen.get((site.training, site.name), [])
        if len(now) != site.calls:
            reason = f"the new module gets {len(now)} of {site.calls} calls"
            parent = model.get_submodule(site.name.rpartition(".")[0])
            if site.rewritten and isinstance(parent, nn.Sequential):
                reason += (
                    f": {site.source.caller} runs all children of the Sequential; put what it adds "
                    "to them into a module of its own"
                )
            left.append(site.kept(reason))
        elif not all(execution.keeps_shape for execution in now):
            left.append(site.kept("the new module changes the shape"))
    return left


def _settle(leftovers: Sequence[Kept], on_leftover: OnLeftover, model: str, act: str) -> None:
    """Raise, warn or say nothing about what is left over."""
    if not leftovers or on_leftover == "ignore":
        return
    shown = "; ".join(f"{k.name} ({k.was}): {k.reason}" for k in leftovers[:5])
    more = f"; and {len(leftovers) - 5} more" if len(leftovers) > 5 else ""
    text = f"{model}: {len(leftovers)} activations cannot be replaced by {act}: {shown}{more}."
    if on_leftover == "error":
        raise PolyvisionError(
            f"{text} The model is unchanged. exclude= them, or pass on_leftover='warn' or 'ignore'."
        )
    warnings.warn(text, stacklevel=3)
