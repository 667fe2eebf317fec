"""Non-finite losses and gradients: the error that stops a run, where they arose, what may help.

``TaskModule`` checks each step before the optimizer takes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyvision.activations import PolyCom, PolyPReLU, PolyReLU, activation_modules
from polyvision.errors import PolyvisionError

__all__ = [
    "SMALLEST_LOSS_SCALE",
    "Finding",
    "NonFiniteError",
    "advice",
    "find_non_finite",
    "non_finite_samples",
]

# The loss scale of fp16 training has collapsed when it is this small: GradScaler halves it at each
# overflow, and below this the gradients themselves overflow.
SMALLEST_LOSS_SCALE = 2.0**-14

# Between the first activation and the largest output before the range ends: growth, no accident.
_GROWTH = 1e4


class NonFiniteError(PolyvisionError):
    """Training met a loss or gradient that is not finite, and stopped before using it."""


def non_finite_samples(batch: Any) -> list[int]:
    """Return the places of the samples in a batch of tensors that hold a non-finite value."""
    tensors = [part for part in batch if isinstance(part, Tensor) and part.is_floating_point()]
    bad = [(~t.isfinite()).reshape(len(t), -1).any(1) for t in tensors]
    return sorted({int(i) for rows in bad for i in rows.nonzero()})


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a search for non-finite values found.

    Attributes:
        place: where the first one came from, in words.
        outputs: largest finite |output| of each activation site, in the order of the forward pass,
            up to the first output that is not finite; empty where all outputs are finite.
    """

    place: str
    outputs: Mapping[str, float] = dataclasses.field(default_factory=dict)


def find_non_finite(model: nn.Module, forward: Callable[[], Tensor]) -> Finding | None:
    """Run forward, and if that is clean backward, and name the module that breaks it.

    Forward, that is the first with an output that is not finite; backward, the one that turns
    finite gradients of its output into others. Gradients of the parameters are left as they are.

    Args:
        model: the network whose modules are watched.
        forward: computes the loss of a batch with it.

    Returns:
        None if every value was finite.
    """
    search = _Search(model)
    # A compiled graph would not call the hooks of its modules.
    with torch.compiler.set_stance("force_eager"), search.watching():
        loss = forward()
    if search.first is not None:
        return Finding(f"first non-finite output: {search.first}", search.outputs)
    if not loss.isfinite().all():
        return Finding("the outputs of all modules are finite, the loss is not")
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.compiler.set_stance("force_eager"):
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    bad = {n for n, g in zip(parameters, gradients, strict=True) if _bad(g)}
    name = search.broken_backward(bad)
    if name is not None:
        return Finding(f"all outputs are finite; first non-finite gradients: {name}, backward")
    if bad:
        return Finding("all outputs are finite; the gradient of the loss itself is not")
    return None


@dataclasses.dataclass(eq=False)
class _Call:
    """One call of a module, and whether gradients that were not finite came to or from it."""

    name: str
    parent: _Call | None
    children: list[_Call] = dataclasses.field(default_factory=list)
    bad_after: bool = False  # of the output
    bad_before: bool = False  # of the input

    def after(self, gradient: Tensor) -> None:
        self.bad_after = self.bad_after or _bad(gradient)

    def before(self, gradient: Tensor) -> None:
        self.bad_before = self.bad_before or _bad(gradient)


class _Search:
    """Hooks on all modules of a network that follow one forward pass and its backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {m: n or type(model).__name__ for n, m in model.named_modules()}
        self.sites = set(activation_modules(model).values())
        self.first: str | None = None
        self.outputs: dict[str, float] = {}
        self._calls: list[_Call] = []  # in the order in which they begin
        self._active: list[_Call] = []

    def watching(self) -> _Hooks:
        return _Hooks(self)

    def begin(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        call = _Call(self.names[module], self._active[-1] if self._active else None)
        if call.parent is not None:
            call.parent.children.append(call)
        self._calls.append(call)
        self._active.append(call)
        return tuple(_probed(value, call.before) for value in inputs)

    def end(self, module: nn.Module, _: Any, output: Any) -> None:
        call = self._active.pop()
        for tensor in _tensors(output):
            if self.first is None and _bad(tensor):
                self.first = call.name
            if self.first is None and module in self.sites and tensor.numel():
                self.outputs[call.name] = float(tensor.detach().abs().max())
            if tensor.requires_grad:
                tensor.register_hook(call.after)  # type: ignore[no-untyped-call]

    def broken_backward(self, bad_parameters: set[str]) -> str | None:
        """Return the innermost module that broke gradients, the first one of the backward pass."""
        root = self._calls[0]
        owners = {name.rpartition(".")[0] or root.name for name in bad_parameters}
        broken: set[_Call] = set()
        for call in reversed(self._calls):  # children before their parents, later ones first
            inside = any(child in broken for child in call.children)
            if call.bad_before or call.name in owners or inside:
                broken.add(call)
                if not call.bad_after:
                    return call.name
        # A module that lends its parameters to others is not called, such as an output matrix.
        lent = owners - {call.name for call in self._calls}
        return max(lent) if lent and not root.bad_after else None


class _Hooks:
    """Put the hooks of a search on its modules for as long as a block runs."""

    def __init__(self, search: _Search) -> None:
        self.search = search
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for module in self.search.names:
            self._handles.append(module.register_forward_pre_hook(self.search.begin))
            self._handles.append(module.register_forward_hook(self.search.end))

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()


def _bad(value: Tensor | None) -> bool:
    return value is not None and not bool(value.detach().isfinite().all())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of floating point in what a module returns."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _probed(value: Any, hook: Callable[[Tensor], None]) -> Any:
    """Return a view of a tensor, whose gradient is that of one use of it, not of all."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    view = value.view_as(value)
    view.register_hook(hook)  # type: ignore[no-untyped-call]
    return view


def advice(finding: Finding | None, model: nn.Module, *, step: int, narrow: bool) -> str:
    """Say what may help against a non-finite value that is not in the data.

    Args:
        finding: what the search found.
        model: the network.
        step: optimizer steps taken so far.
        narrow: it computes in fp16 or bf16.
    """
    peaks = _peaks(finding.outputs if finding is not None else {})
    wider = " or precision=32" if narrow else ""
    if len(peaks) > 1 and peaks[-1][1] > _GROWTH * peaks[0][1]:
        shown = ", ".join(f"{value:.2g} at {name}" for name, value in [peaks[0], *peaks[1:][-3:]])
        return (
            f"The outputs of the activations grow from site to site, at most {shown}: powers of "
            f"powers, where no norm stands between two sites, as on a residual path. "
            f"Try {_smaller(model, step)}{wider}"
        )
    if step == 0:
        return f"No step is taken yet, so recipe.lr has no part in it. Try other data{wider}"
    return f"Try a lower recipe.lr, recipe.clip_grad=1.0, a longer recipe.warmup_epochs{wider}"


def _smaller(model: nn.Module, step: int) -> str:
    """Say what keeps the outputs of the activations small."""
    kinds = (PolyReLU, PolyPReLU, PolyCom)
    wild = [m for m in model.modules() if isinstance(m, kinds) and m.init != "base"]
    start = "act.init=base (coefficients 1, 0, ..., 0 to begin with) or " if wild else ""
    rate = "" if step == 0 else "a lower recipe.lr, recipe.clip_grad=1.0, "
    return f"{rate}{start}act=polynorm, which normalises each power"


def _peaks(outputs: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the outputs that are larger than all before them."""
    peaks: list[tuple[str, float]] = []
    for name, value in outputs.items():
        if not peaks or value > peaks[-1][1]:
            peaks.append((name, value))
    return peaks
