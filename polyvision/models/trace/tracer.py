"""Every call of an activation in a forward pass: a module, a function, a hand-written expression.

A twin of the network runs on fake tensors, which have shapes but no data. Hooks see the modules, a
``TorchFunctionMode`` sees the functions, and the caller's frame tells which expression of which
method made the call. That tells three calls of one module apart, and is what a rewrite needs. The
data flow of the pass (``flow``) tells hand-written expressions, and what a result is used for.
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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from polyvision.activations import is_activation
from polyvision.errors import PolyvisionError, first_line
from polyvision.models.trace.call import Call, Execution, Location, Operand
from polyvision.models.trace.flow import Node
from polyvision.models.trace.inputs import Inputs
from polyvision.models.trace.known_activations import (
    FUNCTIONS,
    INPLACE,
    is_activation_module,
    is_whole_norm,
)
from polyvision.models.trace.made_up_values import MadeUpValues
from polyvision.models.trace.record import Executed, Record, describe, has_no_state

__all__ = ["HOOKS", "Tracer", "hooks_of"]

_TORCH = str(Path(torch.__file__).parent)
_OWN = {str(file) for file in Path(__file__).parent.glob("*.py")}
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
        absorbed: activation modules that are part of an expression.
    """

    def __init__(self, model: nn.Module, activations: Iterable[str] = ()) -> None:
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        parameter = next(itertools.chain(model.parameters(), model.buffers()), torch.empty(0))
        self._device = parameter.device
        self.made_up = False
        self.absorbed: set[str] = set()
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
        names: dict[int, str] = {id(module): name for name, module in self._twin.named_modules()}
        self._names = names
        # What happens inside of these is not recorded: in activations and norms of one piece no
        # call at all, in our activations no function either.
        whole = {id(m) for m in self._twin.modules() if is_whole_norm(m)}
        self._unseen = whole | {id(m) for m in self._twin.modules() if is_activation(m)}
        self._one = whole | {id(m) for m in self._twin.modules() if is_activation_module(m)}
        self._model = model
        self._values, self._parameters = _data(self._twin, model)
        self._start()
        for name, module in self._twin.named_modules():
            counts = is_activation_module(module) or name in activations
            module.register_forward_pre_hook(partial(self._enter, name, counts))
            module.register_forward_hook(partial(self._leave, name))

    def run(self, inputs: Inputs, *, training: bool) -> dict[Call, list[Execution]]:
        """Run the twin and return its activation calls in order.

        Where the network reads values, it runs with zeros and with ones; the calls of both count.

        Raises:
            Exception: whatever the network's forward raises for these inputs.
        """
        values = MadeUpValues(0)
        calls: dict[Call, list[Execution]] = {}
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
                calls |= {call: seen for call, seen in other.items() if call not in calls}
        self.made_up |= values.used
        return calls

    def _pass(
        self, inputs: Inputs, training: bool, values: MadeUpValues
    ) -> dict[Call, list[Execution]]:
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
                    self._record.flow.give(tensor)
            with _Functions(self, values):
                self._twin(*args, **kwargs)
        with torch.device("cpu"):  # expressions are recognised by their values
            calls = self._record.in_order()
        self.absorbed |= self._record.absorbed
        return calls

    def outputs(self, inputs: Inputs, names: Iterable[str]) -> dict[str, Execution]:
        """Run the twin and describe what the modules called ``names`` return, like an input.

        Raises:
            Exception: whatever the network's forward raises for these inputs.
        """
        seen: dict[str, Node] = {}

        def note(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen[name] = self._record.flow.of(output[0] if isinstance(output, tuple) else output)

        handles = [
            self._twin.get_submodule(name).register_forward_hook(partial(note, name))
            for name in names
        ]
        try:
            self.run(inputs, training=False)
        finally:
            for handle in handles:
                handle.remove()
        return {name: describe(node) for name, node in seen.items()}

    def _start(self) -> None:
        self._record = Record(self._model, self._parameters, self._values)
        # The modules that run now, what they were given, and their record if that is one tensor.
        self._running: list[tuple[nn.Module, Node | None, Executed | None]] = []
        self._ran_last: dict[str, str] = {}  # name of a module -> its child that ran last

    def _enter(
        self, name: str, is_an_activation: bool, module: nn.Module, args: tuple[Any, ...]
    ) -> None:
        """Record that a module is called."""
        given, executed = None, None
        if args and isinstance(args[0], Tensor) and not self._inside(self._one):
            given = self._record.flow.of(args[0])
            if len(args) == 1:
                location, caller, frame = self._caller()
                dropped = is_an_activation and _drops_result(frame)
                call = Call(name, type(module).__name__, location, caller, dropped=dropped)
                executed = Executed(call, given)
                kind = self._record.activations if is_an_activation else self._record.modules
                kind.append(executed)
        self._running.append((module, given, executed))

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Record what a module returns."""
        _, given, executed = self._running.pop()
        flow = self._record.flow
        if isinstance(output, Tensor) and not self._inside(self._one):
            if not flow.knows(output):  # what happens inside cannot be seen
                flow.record(module, (args, tuple(module.parameters())), {}, output)
            result = flow.of(output)
            if given is not None:
                result.lay_out_like(given)
            if executed is not None:
                executed.result = result
        owner, rest = "", name
        while rest:
            child, _, rest = rest.partition(".")
            self._ran_last[owner] = child
            owner = f"{owner}.{child}" if owner else child

    def function(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Record a call of a torch function."""
        if self._inside(self._unseen):
            return
        flow = self._record.flow
        given = args[0] if args else kwargs.get("input")
        source = flow.of(given) if isinstance(given, Tensor) else None
        node = flow.record(function, args, kwargs, output)
        around = self._running[-1][1] if self._running else None
        if around is not None and isinstance(output, Tensor):
            flow.of(output).lay_out_like(around)
        if node is None:
            return
        node.location, node.caller, frame = self._caller()
        for name, value in frame.f_locals.items():
            if value is given and value is output and source is not None:  # changed in place
                node.names[source.index] = name
            elif isinstance(value, Tensor) and flow.knows(value):
                node.names[flow.of(value).index] = name
        if function in FUNCTIONS and source is not None and not self._inside(self._one):
            method = getattr(Tensor, getattr(function, "__name__", ""), None) is function
            operand = Operand(None, node.location, method=method)
            kind, inplace = FUNCTIONS[function], function in INPLACE
            call = Call(None, kind, node.location, node.caller, operand, inplace)
            self._record.activations.append(Executed(call, source, flow.of(output)))

    def _inside(self, modules: set[int]) -> bool:
        """Tell whether one of ``modules`` runs now."""
        return any(id(module) in modules for module, _, _ in self._running)

    def _caller(self) -> tuple[Location | None, str, FrameType]:
        """Return where the call is written, in which function, and the frame of it."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and _is_machinery(frame.f_code.co_filename):
            frame = frame.f_back
        assert frame is not None
        code, owner = frame.f_code, self._owner(frame)
        first, line, start, column = next(
            itertools.islice(code.co_positions(), frame.f_lasti // 2, None)
        )
        if owner is None or first is None or line is None or start is None or column is None:
            return None, code.co_qualname, frame
        begin = None if _is_call(code, frame.f_lasti) else (first, start)
        after = self._ran_last.get(owner)
        location = Location(owner, code.co_filename, line, column, begin, after)
        return location, code.co_qualname, frame

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
