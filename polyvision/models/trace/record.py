"""What one pass of a network recorded, and what it means: activations, and why some stay."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Set

from torch import Tensor, nn

from polyvision.models.trace.call import Call, Execution, KeptRole, Operand
from polyvision.models.trace.expressions import Expression, Expressions
from polyvision.models.trace.flow import Flow, Node
from polyvision.models.trace.known_activations import GRID, is_bounded, plain_name, recognised
from polyvision.models.trace.purpose import is_kernel, is_of_parameters

__all__ = ["Executed", "Record", "describe", "has_no_state"]


@dataclasses.dataclass
class Executed:
    """A call that was executed with one tensor, and the results in the data flow."""

    call: Call
    given: Node
    result: Node | None = None


class Record:
    """What one pass recorded.

    Args:
        model: the network itself.
        parameters: the ids of the parameters of the twin that runs.
        values: id of a parameter or buffer of the twin -> the one of the network.

    Attributes:
        flow: the functions.
        activations: calls of activations.
        modules: calls of other modules.
        absorbed: activation modules that are part of an expression.
    """

    def __init__(
        self, model: nn.Module, parameters: Set[int], values: Mapping[int, Tensor]
    ) -> None:
        self.flow = Flow(parameters)
        self.activations: list[Executed] = []
        self.modules: list[Executed] = []
        self.absorbed: set[str] = set()
        self._model = model
        self._expressions = Expressions(self.flow, values)

    def in_order(self) -> dict[Call, list[Execution]]:
        """Return the calls and expressions of the pass that has just run."""
        kinds = {a.result.index: plain_name(a.call.kind) for a in self.activations if a.result}
        expressions = [*self._expressions.find(kinds), *self._opaque()]
        part_of_one = {index for expression in expressions for index in expression.inner}
        found: list[tuple[int, Call, Execution]] = []
        for one in self.activations:
            index = (one.result or one.given).index
            if one.result is not None and index in part_of_one:
                self.absorbed.add(one.call.module or "")
                continue
            role = self._role(one.given, one.result, kinds)
            found.append((index, one.call, describe(one.given, one.result, role)))
        every = {*kinds, *(expression.top.index for expression in expressions)}
        for e in expressions:
            role = e.role
            if role in (None, "positive") and is_kernel(e.top, e.root, every):
                role = "kernel"
            elif role is None and e.kind and self._expressions.keeps_positive(e.top, e.root):
                role = "positive"
            found.append((e.top.index, self._call(e), describe(e.root, e.top, role)))
        calls: dict[Call, list[Execution]] = {}
        for _, call, execution in sorted(found, key=lambda item: item[0]):
            calls.setdefault(call, []).append(execution)
        return calls

    def _role(self, given: Node, result: Node | None, kinds: Mapping[int, str]) -> KeptRole | None:
        """Return why a call of an activation stays, None if it is an ordinary one."""
        if result is None or is_bounded(kinds[result.index]):
            return None
        may_be_a_gate = kinds[result.index] in ("relu6", "hardtanh")
        if may_be_a_gate and self._expressions.is_hard_sigmoid(result):
            return "gate"
        if is_kernel(result, given, {*kinds}):
            return "kernel"
        is_positive = is_of_parameters(given) or self._expressions.keeps_positive(result, given)
        return "positive" if is_positive else None

    def _opaque(self) -> Iterator[Expression]:
        """Yield the modules that are an activation whose functions cannot be seen (scripted)."""
        for one in self.modules:
            module = self._model.get_submodule(one.call.module or "")
            if one.result is None or one.result.name or not has_no_state(module):
                continue
            try:
                values = copy.deepcopy(module).forward(GRID)  # without hooks
            except Exception:  # whatever a foreign forward raises for one dimension
                continue
            kind = recognised(values) if isinstance(values, Tensor) else None
            if kind is not None:
                role: KeptRole | None = "gate" if is_bounded(kind) else None
                yield Expression(one.result, one.given, kind, {one.result.index}, role)

    def _call(self, expression: Expression) -> Call:
        """Return the module that computes the whole expression, else the expression."""
        top, root = expression.top, expression.root
        known = expression.kind is not None
        whole = [m.call for m in self.modules if m.result is top and m.given is root]
        whole = [call for call in whole if call.module]
        if whole:
            inmost = max(whole, key=lambda call: (call.module or "").count("."))
            return dataclasses.replace(inmost, known=known)
        return Call(
            module=None,
            kind=expression.kind or top.name,
            location=top.location,
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
        modules = [a.call for a in self.activations if a.call.module and a.given is root]
        modules += [m.call for m in self.modules if m.given is root]
        if modules:
            return Operand(None, modules[0].location)
        (user,) = users
        index = next((i for i, arg in enumerate(user.args) if arg is root), None)
        if index is None or user.location is None:
            return None
        name = getattr(user.call, "__name__", "")
        return Operand(None, user.location, index, getattr(Tensor, name, None) is user.call)


def has_no_state(module: nn.Module) -> bool:
    """Tell whether ``module`` holds no parameter or buffer."""
    return not [*module.parameters(), *module.buffers()]


def describe(given: Node, result: Node | None = None, role: KeptRole | None = None) -> Execution:
    """Describe an execution whose input is ``given``."""
    tensor = given.tensor
    keeps = result is None or result.tensor.shape == tensor.shape
    return Execution(tensor.shape, tensor.device, tensor.dtype, given.layout.dim, keeps, role)
