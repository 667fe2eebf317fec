"""Every use of an activation in a forward pass: a module, a function or an expression by hand.

A twin of the network runs on fake tensors, which have shapes but no data. Hooks see the modules, a
``TorchFunctionMode`` sees the functions, and the caller's frame tells which expression of which
method made the call. That is what tells apart three uses of one module, and what a rewrite needs.
The data flow of the pass (``flow``) tells expressions by hand, and what a result is used for.
"""

from __future__ import annotations

import copy
import dis
import itertools
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from polyvision.activations import is_activation
from polyvision.errors import PolyvisionError, first_line
from polyvision.models.trace.flow import Node
from polyvision.models.trace.functions import (
    FUNCTIONS,
    INPLACE,
    is_activation_module,
    is_whole_norm,
)
from polyvision.models.trace.inputs import Inputs
from polyvision.models.trace.layout import Layouts
from polyvision.models.trace.recorded import ModuleCall, Noted, Recorded, has_no_state
from polyvision.models.trace.target import Call, Place, Target
from polyvision.models.trace.values import MadeUpValues

__all__ = ["HOOKS", "Call", "Place", "Target", "Tracer", "hooks_of"]

_TORCH = str(Path(torch.__file__).parent)
_BESIDE = ("layout.py", "flow.py", "values.py")
_OWN = (__file__, *(str(Path(__file__).with_name(name)) for name in _BESIDE))
# Functions whose results are laid out like their first argument if they have its rank.
_KEEP = {
    *(torch.chunk, Tensor.chunk, torch.split, Tensor.split, Tensor.__getitem__, Tensor.narrow),
    *(torch.mean, Tensor.mean, torch.sum, Tensor.sum, torch.cat, Tensor.contiguous),
    *(torch.add, Tensor.add, Tensor.__add__, Tensor.__sub__, torch.mul, Tensor.mul),
    *(Tensor.__mul__, Tensor.__truediv__, Tensor.div, F.dropout, F.interpolate, F.pad),
    *(torch.clamp, Tensor.clamp, torch.pow, Tensor.pow, torch.square, Tensor.square),
}
HOOKS = (
    *("forward_hooks", "forward_hooks_with_kwargs", "forward_hooks_always_called"),
    *("forward_pre_hooks", "forward_pre_hooks_with_kwargs"),
    *("backward_hooks", "backward_pre_hooks"),
)
_TO_NUMPY: set[Any] = {Tensor.numpy, Tensor.__array__}
_CACHE = 0  # the code of the empty operations that follow a call


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
        # Asked at every function, so told once: what happens inside of these is not looked at.
        whole = {id(m) for m in self._twin.modules() if is_whole_norm(m)}
        self._ours = whole | {id(m) for m in self._twin.modules() if is_activation(m)}
        self._one = whole | {id(m) for m in self._twin.modules() if is_activation_module(m)}
        self._model = model
        self._values, self._parameters = _data(self._twin, model)
        self.absorbed: set[str] = set()  # activation modules that are part of an expression
        self._start()
        for name, module in self._twin.named_modules():
            module.register_forward_pre_hook(lambda *a: self._layouts.before(*a))
            self._watch(name, module, is_activation_module(module) or name in activations)
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
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self._recorded.flow.give(tensor)
            with _Functions(self, values):
                self._twin(*args, **kwargs)
        with torch.device("cpu"):  # expressions are recognised by their values
            calls = self._recorded.in_order()
        self.absorbed |= self._recorded.absorbed
        return calls

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
        self._recorded = Recorded(self._model, self._layouts, self._parameters, self._values)
        self._ran_last: dict[str, str] = {}  # name of a module -> its child that ran last

    def _leave(self, name: str, *hooked: Any) -> None:
        """Note that a module has run, for itself and those that hold it."""
        owner, rest = "", name
        while rest:
            child, _, rest = rest.partition(".")
            self._ran_last[owner] = child
            owner = f"{owner}.{child}" if owner else child

    def _watch(self, name: str, module: nn.Module, is_site: bool) -> None:
        kind = type(module).__name__
        running: list[Noted | ModuleCall | None] = []

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            noted: Noted | ModuleCall | None = None
            if len(args) == 1 and isinstance(args[0], Tensor) and not self._inside(1):
                place, caller, frame = self._caller()
                if is_site:
                    dropped = _drops_result(frame)
                    noted = self._note(Target(name, kind, place, caller, dropped=dropped), args[0])
                else:
                    noted = ModuleCall(name, kind, place, caller, self._recorded.flow.of(args[0]))
                    self._recorded.module_calls.append(noted)
            running.append(noted)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            noted = running.pop()
            if not isinstance(output, Tensor) or self._inside(1):
                return
            if not self._recorded.flow.knows(output):  # what happens inside cannot be seen
                self._recorded.flow.record(module, (args, tuple(module.parameters())), {}, output)
            if isinstance(noted, Noted):
                self._finish(noted, output)
            elif noted is not None:
                noted.result = self._recorded.flow.of(output)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def function(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note a call of a torch function."""
        given = args[0] if args else kwargs.get("input")
        if function in _KEEP and isinstance(given, Tensor):
            parts = output if isinstance(output, tuple | list) else (output,)
            for part in parts:
                if isinstance(part, Tensor) and part.ndim == given.ndim:
                    self._layouts.adopt(part, self._layouts.here(given))
        if any(id(module) in self._ours for module, _ in self._layouts.running):
            return
        source = self._recorded.flow.of(given) if isinstance(given, Tensor) else None
        node = self._recorded.flow.record(function, args, kwargs, output)
        if node is None:
            return
        place, caller, frame = self._caller()
        node.place, node.caller = place, caller
        for name, value in frame.f_locals.items():
            if value is given and value is output and source is not None:  # changed in place
                node.names[source.index] = name
            elif isinstance(value, Tensor) and self._recorded.flow.knows(value):
                node.names[self._recorded.flow.of(value).index] = name
        if not isinstance(given, Tensor) or source is None or self._inside(0):
            return
        if not node.is_affine and node.leaf is not None:
            self._layouts.here(node.leaf.tensor)
        if function in FUNCTIONS:
            self._layouts.here(given)
            method = getattr(Tensor, getattr(function, "__name__", ""), None) is function
            kind, inplace = FUNCTIONS[function], function in INPLACE
            dropped = _drops_result(frame)
            target = Target(None, kind, place, caller, method, inplace, dropped)
            self._finish(self._note(target, given, source), output)
            self._layouts.of(output, like=given)

    def _note(self, target: Target, given: Tensor, source: Node | None = None) -> Noted:
        layout = self._layouts.of(given)
        call = Call(given.shape, layout, given.device, given.dtype)
        self._recorded.noted.append(Noted(target, call, source or self._recorded.flow.of(given)))
        return self._recorded.noted[-1]

    def _finish(self, noted: Noted, output: Tensor) -> None:
        noted.call.keeps_shape = output.shape == noted.call.shape
        noted.result = self._recorded.flow.of(output)

    def _inside(self, own: int) -> bool:
        """Tell whether an activation or a norm with a nonlinearity of its own makes the call."""
        outer = self._layouts.running[: len(self._layouts.running) - own]
        return any(id(module) in self._one for module, _ in outer)

    def _caller(self) -> tuple[Place | None, str, FrameType]:
        """Return where the call is written, in which function, and the frame of it."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and _is_machinery(frame.f_code.co_filename):
            frame = frame.f_back
        assert frame is not None
        code, owner = frame.f_code, self._owner(frame)
        position = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
        first, line, start, column = position
        if owner is None or first is None or line is None:
            return None, code.co_qualname, frame
        if start is None or column is None:
            return None, code.co_qualname, frame
        begin = None if _is_call(code, frame.f_lasti) else (first, start)
        after = self._ran_last.get(owner)
        place = Place(owner, code.co_filename, line, column, begin, after)
        return place, code.co_qualname, frame

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
        self._tracer.function(func, args, kwargs, output)
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
            if child is not None and (is_activation_module(child) or has_no_state(child)):
                if id(child) in seen:
                    parent._modules[attribute] = copy.deepcopy(child)
                seen.add(id(child))


def _is_call(code: CodeType, at: int) -> bool:
    """Tell whether the instruction at ``at`` is a call, not an operator."""
    while dis.opname[code.co_code[at]] == "CACHE":
        at -= 2
    return "CALL" in dis.opname[code.co_code[at]]


def _data(twin: nn.Module, model: nn.Module) -> tuple[dict[int, Tensor], set[int]]:
    """Return the values of the parameters and buffers by id of their twins; ids of the former."""
    values: dict[int, Tensor] = {}
    parameters: set[int] = set()
    for name, tensor in twin.named_parameters(remove_duplicate=False):
        values[id(tensor)] = model.get_parameter(name)
        parameters.add(id(tensor))
    for name, buffer in twin.named_buffers(remove_duplicate=False):
        values[id(buffer)] = model.get_buffer(name)
    return values, parameters


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
