"""What one pass of a network recorded, and what it means: activations, and why some stay."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Set

from torch import Tensor, nn

from polyvision.models.trace.expressions import Expression, Expressions
from polyvision.models.trace.flow import Flow, Node
from polyvision.models.trace.functions import GRID, is_bounded, recognised
from polyvision.models.trace.layout import Layouts
from polyvision.models.trace.purpose import is_kernel, is_of_parameters
from polyvision.models.trace.target import Call, KeptRole, Operand, Place, Target

__all__ = ["ModuleCall", "Noted", "Recorded", "has_no_state"]


@dataclasses.dataclass
class Noted:
    """One call of an activation, with what the data flow knows of it."""

    target: Target
    call: Call
    given: Node
    result: Node | None = None


@dataclasses.dataclass
class ModuleCall:
    """One call of a module with one tensor, which returns one."""

    name: str
    kind: str
    place: Place | None
    caller: str
    given: Node
    result: Node | None = None


class Recorded:
    """What one pass recorded.

    Args:
        model: the network itself.
        layouts: where the features of each tensor are.
        parameters: the ids of the parameters of the twin that runs.
        values: id of a parameter or buffer of the twin -> the one of the network.

    Attributes:
        flow: the functions.
        noted: the calls of activations.
        module_calls: the calls of other modules.
        absorbed: activation modules that are part of an expression.
    """

    def __init__(
        self, model: nn.Module, layouts: Layouts, parameters: Set[int], values: Mapping[int, Tensor]
    ) -> None:
        self.flow = Flow(parameters)
        self.noted: list[Noted] = []
        self.module_calls: list[ModuleCall] = []
        self.absorbed: set[str] = set()
        self._model = model
        self._layouts = layouts
        self._expressions = Expressions(self.flow, values)

    def in_order(self) -> dict[Target, list[Call]]:
        """Return the calls and expressions of the pass that has just run."""
        kinds = {n.result.index: _plain(n.target.kind) for n in self.noted if n.result}
        expressions = [*self._expressions.find(kinds), *self._opaque()]
        part_of_one = {index for expression in expressions for index in expression.inner}
        found: list[tuple[int, Target, Call]] = []
        for noted in self.noted:
            index = (noted.result or noted.given).index
            if noted.result is not None and index in part_of_one:
                self.absorbed.add(noted.target.module or "")
                continue
            noted.call.role = self._role(noted.given, noted.result, kinds)
            found.append((index, noted.target, noted.call))
        activations = {*kinds, *(expression.top.index for expression in expressions)}
        for e in expressions:
            root = e.root.tensor
            call = Call(root.shape, self._layouts.of(root), root.device, root.dtype)
            call.keeps_shape = e.top.tensor.shape == root.shape
            call.role = e.role
            if e.role in (None, "positive") and is_kernel(e.top, e.root, activations):
                call.role = "kernel"
            elif e.role is None and e.kind and self._expressions.keeps_positive(e.top, e.root):
                call.role = "positive"
            found.append((e.top.index, self._target(e), call))
        calls: dict[Target, list[Call]] = {}
        for _, target, call in sorted(found, key=lambda item: item[0]):
            calls.setdefault(target, []).append(call)
        return calls

    def _role(self, given: Node, result: Node | None, kinds: Mapping[int, str]) -> KeptRole | None:
        """Return why a call of an activation stays, None if it is an ordinary one."""
        if result is None or is_bounded(kinds[result.index]):
            return None
        if kinds[result.index] in ("relu6", "hardtanh") and self._expressions.is_hard_sigmoid(
            result
        ):
            return "gate"
        if is_kernel(result, given, {*kinds}):
            return "kernel"
        is_positive = is_of_parameters(given) or self._expressions.keeps_positive(result, given)
        return "positive" if is_positive else None

    def _opaque(self) -> Iterator[Expression]:
        """Yield the modules that are an activation whose functions cannot be seen (scripted)."""
        for call in self.module_calls:
            module = self._model.get_submodule(call.name)
            if call.result is None or call.result.name or not has_no_state(module):
                continue
            try:
                values = copy.deepcopy(module).forward(GRID.points)  # without hooks
            except Exception:  # whatever a foreign forward raises for one dimension
                continue
            if isinstance(values, Tensor) and values.shape == GRID.points.shape:
                kind = recognised(values)
                if kind is not None:
                    role: KeptRole | None = "gate" if is_bounded(kind) else None
                    yield Expression(call.result, call.given, kind, {call.result.index}, role)

    def _target(self, expression: Expression) -> Target:
        """Return the module that computes the whole expression, else the expression."""
        top, root = expression.top, expression.root
        known = expression.kind is not None
        whole = [c for c in self.module_calls if c.name and c.result is top and c.given is root]
        if whole:
            inmost = max(whole, key=lambda call: call.name.count("."))
            return Target(inmost.name, inmost.kind, inmost.place, inmost.caller, known=known)
        return Target(
            module=None,
            kind=expression.kind or top.name,
            place=top.place,
            caller=top.caller,
            inplace=top.inputs[0].tensor is top.tensor,
            expression=True,
            operand=self._operand(expression) if known else None,
            known=known,
        )

    def _operand(self, expression: Expression) -> Operand | None:
        """Find the tensor that the expression is a function of in its source."""
        top, root = expression.top, expression.root
        if root.index in top.names:
            return Operand(top.names[root.index])
        users = [u for u in root.users if u.index in expression.inner]
        if len(users) != 1 or users[0].inputs.count(root) != 1:
            return None
        modules = [n.target.place for n in self.noted if n.target.module and n.given is root]
        modules += [call.place for call in self.module_calls if call.given is root]
        if modules:
            return Operand(None, modules[0])
        (user,) = users
        index = next((i for i, arg in enumerate(user.args) if arg is root), None)
        if index is None or user.place is None:
            return None
        name = getattr(user.call, "__name__", "")
        return Operand(None, user.place, index, getattr(Tensor, name, None) is user.call)


def has_no_state(module: nn.Module) -> bool:
    """Tell whether ``module`` holds no parameter or buffer."""
    return not [*module.parameters(), *module.buffers()]


def _plain(kind: str) -> str:
    return kind.lower().replace("_", "").removesuffix("me")
