"""Every call of an activation in a forward pass: of a module or of a function, and from where.

A twin of the network runs on fake tensors, which have shapes but no data. Hooks see the modules, a
``TorchFunctionMode`` sees the functions, and the caller's frame tells which expression of which
method made the call. That is what tells apart three uses of one module, and what a rewrite needs.
"""

from __future__ import annotations

import copy
import dataclasses
import dis
import itertools
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from polyvision.errors import PolyvisionError, first_line
from polyvision.models.functions import FUNCTIONS, INPLACE, is_activation_module, is_whole_norm
from polyvision.models.inputs import Inputs
from polyvision.models.layout import Layout, Layouts
from polyvision.models.values import MadeUpValues

__all__ = ["HOOKS", "Call", "Place", "Target", "Tracer", "hooks_of"]

_TORCH = str(Path(torch.__file__).parent)
_OWN = (__file__, str(Path(__file__).with_name("layout.py")))
# Functions whose results are laid out like their first argument if they have its rank.
_KEEP = {
    *(torch.chunk, Tensor.chunk, torch.split, Tensor.split, Tensor.__getitem__, Tensor.narrow),
    *(torch.mean, Tensor.mean, torch.sum, Tensor.sum, torch.cat, Tensor.contiguous),
    *(torch.add, Tensor.add, Tensor.__add__, Tensor.__sub__, torch.mul, Tensor.mul),
    *(Tensor.__mul__, Tensor.__truediv__, F.dropout, F.interpolate, F.pad),
}
HOOKS = (
    *("forward_hooks", "forward_hooks_with_kwargs", "forward_hooks_always_called"),
    *("forward_pre_hooks", "forward_pre_hooks_with_kwargs"),
    *("backward_hooks", "backward_pre_hooks"),
)
_TO_NUMPY: set[Any] = {Tensor.numpy, Tensor.__array__}
_CACHE = 0  # the code of the empty operations that follow a call
_SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}


@dataclasses.dataclass(frozen=True)
class Place:
    """One expression in the source: ``owner`` is the module whose method holds it.

    No two calls end at the same character, so file, line and column of the end name one. ``after``
    is the child of the owner that ran last before.
    """

    owner: str
    file: str
    line: int
    column: int
    after: str | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Target:
    """What is called, and from where; the unit that can get an activation of its own.

    Attributes:
        module: name of the activation module, None for a function.
        kind: name of the module's class or of the function.
        place: where the call is written; None if in no module's own method.
        caller: for messages: the function that makes the call.
        method: a function that is called as a method of the tensor, ``x.relu()``.
        inplace: a function that changes its argument, such as ``relu_``.
        dropped: the call is a statement, made only for what it does to its argument.
    """

    module: str | None
    kind: str
    place: Place | None
    caller: str
    method: bool = False
    inplace: bool = False
    dropped: bool = False


@dataclasses.dataclass
class Call:
    """One call in one pass.

    Attributes:
        shape: of the input.
        layout: of the input.
        device: of the input.
        dtype: of the input.
        keeps_shape: the output has the input's shape.
        shifted: the input is a sum with the number 3, as in relu6(x + 3) / 6, a hard-sigmoid.
    """

    shape: torch.Size
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    keeps_shape: bool = True
    shifted: bool = False


class Tracer:
    """A twin of a network that holds no data, and records the activation calls of each pass.

    Args:
        model: left as it is, on any device including meta.
        activations: names of modules that count as activations whatever their class.

    Attributes:
        made_up: what a pass ran depended on values, which were made up.
    """

    def __init__(self, model: nn.Module, activations: Iterable[str] = ()) -> None:
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        parameter = next(itertools.chain(model.parameters(), model.buffers()), torch.empty(0))
        self._device = parameter.device
        self.made_up = False
        # Some networks cache tensors in eval mode; a twin keeps fake ones out of the real network.
        # It has none of the user's hooks, which are not made for fake tensors.
        hooks: dict[int, Any] = {id(d): type(d)() for m in model.modules() for d in hooks_of(m)}
        try:
            with FakeCopyMode(self._fake):
                self._twin = copy.deepcopy(model, hooks)
        except Exception as error:  # what a network holds beside tensors may be anything
            raise PolyvisionError(
                f"{type(model).__name__} cannot be copied to be traced: {first_line(error)}"
            ) from error
        _separate(self._twin)
        modules = self._twin.named_modules()
        self._names: dict[int, str] = {id(module): name for name, module in modules}
        self._start()
        for name, module in self._twin.named_modules():
            module.register_forward_pre_hook(lambda *a: self._layouts.before(*a))
            if is_activation_module(module) or name in activations:
                self._watch(name, module)
            module.register_forward_hook(lambda *a: self._layouts.after(*a))
            module.register_forward_hook(partial(self._leave, name))

    def run(self, inputs: Inputs, *, training: bool) -> dict[Target, list[Call]]:
        """Run the twin and return its activation calls in order.

        Where the network reads values, it runs with zeros and with ones; the calls of both count.

        Raises:
            Exception: whatever the network's forward raises for these inputs.
        """
        values = MadeUpValues(0)
        calls: dict[Target, list[Call]] = {}
        try:
            calls = self._pass(inputs, training, values)
        except Exception:
            if not values.read:
                raise
        if values.read:
            try:
                other = self._pass(inputs, training, MadeUpValues(1))
            except Exception:  # ones may stand for a mistake that the network checks for
                if not calls:
                    raise
            else:
                calls = {**calls, **{t: seen for t, seen in other.items() if t not in calls}}
        self.made_up |= values.used
        return calls

    def _pass(
        self, inputs: Inputs, training: bool, values: MadeUpValues
    ) -> dict[Target, list[Call]]:
        self._start()
        self._twin.train(training)
        with torch.no_grad(), _quiet(), _no_global_hooks(), self._fake, values:
            args, kwargs = tree_map_only(
                Tensor,
                lambda t: torch.empty(t.shape, dtype=t.dtype, device=self._device),
                (inputs.args, inputs.kwargs),
            )
            with _Functions(self, values):
                self._twin(*args, **kwargs)
        return self._calls

    def outputs(self, inputs: Inputs, names: Iterable[str]) -> dict[str, Call]:
        """Run the twin and return what the modules called ``names`` give out, as if it were input.

        Raises:
            Exception: whatever the network's forward raises for these inputs.
        """
        seen: dict[str, Call] = {}

        def hook(name: str) -> Any:
            def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                state = output[0] if isinstance(output, tuple) else output
                layout = self._layouts.of(state)
                seen[name] = Call(state.shape, layout, state.device, state.dtype)

            return after

        handles = [self._twin.get_submodule(n).register_forward_hook(hook(n)) for n in names]
        try:
            self.run(inputs, training=False)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def _start(self) -> None:
        self._layouts = Layouts()
        self._ran_last: dict[str, str] = {}  # name of a module -> its child that ran last
        self._calls: dict[Target, list[Call]] = {}
        self._shifted: dict[int, Tensor] = {}  # sums with 3, by id; the tensors are kept alive

    def _leave(self, name: str, *hooked: Any) -> None:
        """Note that a module has run, for itself and those that hold it."""
        owner, rest = "", name
        while rest:
            child, _, rest = rest.partition(".")
            self._ran_last[owner] = child
            owner = f"{owner}.{child}" if owner else child

    def _watch(self, name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if len(args) == 1 and isinstance(args[0], Tensor) and not self._inside(1):
                place, caller, dropped = self._caller()
                kind = type(module).__name__
                self._note(Target(name, kind, place, caller, dropped=dropped), args[0])

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if len(args) == 1 and isinstance(output, Tensor) and not self._inside(1):
                self._finish(args[0], output)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def function(self, function: Any, args: tuple[Any, ...], output: Any, given: Any) -> None:
        """Note a call of a torch function; ``given`` is its first argument."""
        if function in _KEEP and isinstance(given, Tensor):
            parts = output if isinstance(output, tuple | list) else (output,)
            for part in parts:
                if isinstance(part, Tensor) and part.ndim == given.ndim:
                    self._layouts.adopt(part, self._layouts.here(given))
        if function in _SUMS:
            if 3 in [a for a in args if isinstance(a, int | float)]:
                self._shifted[id(output)] = output
        elif function in FUNCTIONS and isinstance(given, Tensor) and not self._inside(0):
            self._layouts.here(given)
            place, caller, dropped = self._caller()
            method = getattr(Tensor, getattr(function, "__name__", ""), None) is function
            kind, inplace = FUNCTIONS[function], function in INPLACE
            self._note(Target(None, kind, place, caller, method, inplace, dropped), given)
            self._finish(given, output)
            self._layouts.of(output, like=given)

    def _note(self, target: Target, given: Tensor) -> None:
        shifted = id(given) in self._shifted
        layout = self._layouts.of(given)
        call = Call(given.shape, layout, given.device, given.dtype, shifted=shifted)
        self._calls.setdefault(target, []).append(call)
        self._latest = call

    def _finish(self, given: Tensor, output: Tensor) -> None:
        self._latest.keeps_shape = output.shape == self._latest.shape

    def _inside(self, own: int) -> bool:
        """Tell whether an activation or a norm with a nonlinearity of its own makes the call."""
        outer = self._layouts.running[: len(self._layouts.running) - own]
        return any(is_activation_module(m) or is_whole_norm(m) for m, _ in outer)

    def _caller(self) -> tuple[Place | None, str, bool]:
        """Return where the call is written, in which function, and whether it is a statement."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and _is_machinery(frame.f_code.co_filename):
            frame = frame.f_back
        assert frame is not None
        code, owner = frame.f_code, self._owner(frame)
        position = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
        _, line, _, column = position
        dropped = _drops_result(frame)
        if owner is None or line is None or column is None:
            return None, code.co_qualname, dropped
        place = Place(owner, code.co_filename, line, column, self._ran_last.get(owner))
        return place, code.co_qualname, dropped

    def _owner(self, frame: FrameType) -> str | None:
        """Name the module whose method runs, also from a function written inside of the method."""
        method: FrameType | None = frame
        while method is not None:
            code, held = method.f_code, method.f_locals
            first = code.co_varnames[0] if code.co_argcount else "self"
            if id(held.get(first)) in self._names:
                return self._names[id(held[first])]
            method = method.f_back
            while method is not None and not any(c is code for c in method.f_code.co_consts):
                method = method.f_back
        return None


class _Functions(TorchFunctionMode):
    """Shows every torch function to a tracer."""

    def __init__(self, tracer: Tracer, values: MadeUpValues) -> None:
        super().__init__()
        self._tracer = tracer
        self._values = values

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TO_NUMPY:
            return func(self._values.real(args[0]), *args[1:], **kwargs)
        output = func(*args, **kwargs)
        self._tracer.function(func, args, output, args[0] if args else kwargs.get("input"))
        return output


def _drops_result(frame: FrameType) -> bool:
    """Tell whether the call that ``frame`` makes is a statement."""
    following = frame.f_code.co_code[frame.f_lasti + 2 :: 2]
    return next((op for op in following if op != _CACHE), None) == dis.opmap["POP_TOP"]


def _is_machinery(file: str) -> bool:
    """Tell whether ``file`` only stands between the code of a network and the tracer."""
    if not file.startswith(f"{_TORCH}/"):
        return file in _OWN
    modules = f"{_TORCH}/nn/modules/"
    return not file.startswith(modules) or file == f"{modules}module.py"


def _separate(twin: nn.Module) -> None:
    """Give every place of an activation module an object of its own."""
    seen: set[int] = set()
    for parent in list(twin.modules()):
        for attribute, child in list(parent._modules.items()):
            if child is not None and is_activation_module(child):
                if id(child) in seen:
                    parent._modules[attribute] = copy.deepcopy(child)
                seen.add(id(child))


def hooks_of(owner: Any, prefix: str = "") -> list[dict[int, Any]]:
    """Return the dictionaries of the hooks that a forward or backward pass of a module runs."""
    return [vars(owner)[f"_{prefix}{name}"] for name in HOOKS if f"_{prefix}{name}" in vars(owner)]


@contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Keep hooks on all modules, of profilers and the like, from a twin."""
    places = hooks_of(torch.nn.modules.module, "global_")
    before = [dict(place) for place in places]
    for place in places:
        place.clear()
    try:
        yield
    finally:
        for place, hooks in zip(places, before, strict=True):
            place.update(hooks)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging a traceback where a network refuses a size, and from warnings."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = disabled
