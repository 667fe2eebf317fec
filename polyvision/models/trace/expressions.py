"""Activations written by hand, such as ``x * torch.sigmoid(x)``, recognised by their values.

The largest expression that depends on one tensor is evaluated on a grid. One that is nonlinear and
equals no known activation is found too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyvision.models.trace.call import KeptRole
from polyvision.models.trace.flow import MAXIMUM, SAME, Flow, Node
from polyvision.models.trace.known_activations import (
    BOUNDED,
    GRID,
    is_affine,
    is_between_bounds,
    is_defined,
    is_monotone,
    near,
    recognised,
)
from polyvision.models.trace.purpose import feeds_a_layer, is_reduced

__all__ = ["Expression", "Expressions"]

_FACTORY = {"device", "dtype", "layout", "memory_format", "requires_grad", "pin_memory", "inplace"}
_MOST_VALUES = 1 << 20  # of a constant that is looked at


class _NotConstant(Exception):
    """An expression has no value on the grid: it has parameters without data, or one a channel."""


@dataclasses.dataclass
class Expression:
    """A pointwise nonlinear function of one tensor that is no single call of an activation.

    Attributes:
        top: the result.
        root: the tensor it is a function of.
        kind: the activation that it equals, None if none is known.
        inner: the nodes in between, which have no other use.
        role: ``gate``, ``kernel`` or ``positive``, None for an ordinary activation.
    """

    top: Node
    root: Node
    kind: str | None
    inner: set[int]
    role: KeptRole | None = None


class Expressions:
    """Finds and evaluates the expressions of one pass.

    Args:
        flow: the pass.
        values: id of a parameter or buffer of the traced network -> the tensor with data.
    """

    def __init__(self, flow: Flow, values: Mapping[int, Tensor]) -> None:
        self.nodes = flow.nodes
        self._values = values

    def find(self, calls: dict[int, str]) -> list[Expression]:
        """Return the pointwise nonlinear expressions that are no single call of an activation.

        Args:
            calls: index of the result of every call of an activation -> plain name of it.
        """
        found: dict[int, Expression] = {}
        seen = set[int]()
        for node in self.nodes:
            if node.leaf is not None and node.leaf is not node:
                if not node.users or any(user.leaf is not node.leaf for user in node.users):
                    self._explain(node, calls, found, seen)
            elif _is_maximum_of_two(node) or (node.learned and node.is_masked_assignment):
                found[node.index] = Expression(node, node.varying[0], None, set())
        return [found[index] for index in sorted(found)]

    def _explain(
        self, top: Node, calls: dict[int, str], found: dict[int, Expression], seen: set[int]
    ) -> None:
        """Find the activations in the expression that ends with ``top``, the largest first."""
        if top.index in seen or top.leaf is None or top.leaf is top:
            return
        seen.add(top.index)
        if not (top.learned and top.tensor.is_floating_point()):
            return
        further = top.varying
        is_call = top.index in calls or top.name in SAME or self._scales_a_call(top, calls)
        expression = None if is_call else self._known(top)
        if expression is None and not is_call and not top.is_affine:
            expression = self._unknown(top, calls)
        if expression is not None:
            found[top.index] = expression
            further = [expression.root]
        for node in further:
            self._explain(node, calls, found, seen)

    def _known(self, top: Node) -> Expression | None:
        """Return the largest expression that ends with ``top`` and equals a known activation."""
        for root, inner in self._roots(top):
            if all(self.nodes[index].is_affine for index in inner):
                continue
            values = self.values(top, root)
            kind = None if values is None else recognised(values)
            if values is None or kind is None:
                continue
            if kind == "relu" and (root.statistic or values.min() > 0):
                return None  # a guard, such as variance.clamp(min=0)
            while True:  # a copy or cast is no part of it
                same = [u for u in root.users if u.index in inner and u is not top]
                if len(same) != 1 or same[0].name not in SAME:
                    break
                (root,) = same
                inner = inner - {root.index}
            return Expression(top, root, kind, inner, "gate" if kind in BOUNDED else None)
        return None

    def _scales_a_call(self, top: Node, calls: dict[int, str]) -> bool:
        """Tell whether ``top`` is affine in one activation, such as 1.4 * F.leaky_relu(x)."""
        node = top
        while node.is_affine and len(node.varying) == 1 and node.index not in calls:
            (node,) = node.varying
        kind = calls.get(node.index)
        return kind is not None and kind not in BOUNDED and kind not in ("relu6", "hardtanh")

    def _roots(self, top: Node) -> list[tuple[Node, set[int]]]:
        """Return the tensors that ``top`` is a function of, the farthest first.

        Nothing between the two is used elsewhere. Each comes with what lies in between.
        """
        found = []
        candidates = {top.index: top}
        stack = [top]
        while stack:
            for i in stack.pop().varying:
                if i.index not in candidates:
                    candidates[i.index] = i
                    if i.leaf is not i:
                        stack.append(i)
        for index in sorted(candidates):
            root = candidates[index]
            if root is top:
                continue
            inner: set[int] = set()
            if self._cut(top, root, inner) and all(
                {u.index for u in candidates[i].users} <= inner for i in inner - {top.index}
            ):
                found.append((root, inner))
        return found

    def _cut(self, node: Node, root: Node, inner: set[int]) -> bool:
        """Collect what lies between; tell whether ``node`` depends on ``root`` alone."""
        if node is root or not node.from_input or node.index in inner:
            return True
        if node.leaf is node:
            return False
        inner.add(node.index)
        return all(self._cut(i, root, inner) for i in node.varying)

    def _unknown(self, top: Node, calls: dict[int, str]) -> Expression | None:
        """Return the largest expression that ends with ``top`` if it is nonlinear as a whole.

        It does not go beyond a call of an activation: in sin(relu(x)), the relu is one of its own.
        """
        roots = self._roots(top)
        if not roots:  # a product of two results that are used elsewhere too
            return None
        first = max((root.index for root, _ in roots if root.index in calls), default=0)
        root, inner = next((r, inner) for r, inner in roots if r.index >= first)
        expression = Expression(top, root, None, inner)
        holds_a_call = bool(inner & calls.keys())
        values = self.values(top, root)
        if is_reduced(top) or (root.statistic and not holds_a_call):
            return None
        if values is None:  # a range between buffers without data is no activation either
            return None if top.name in ("clamp", "clip") else expression
        if not is_defined(values):  # a logarithm, a quotient
            return expression if holds_a_call else None
        if is_affine(values) or self._is_guard(values):
            return None
        if is_monotone(values) and is_between_bounds(values):
            expression.role = "gate"
        elif (
            bool((near(values) >= 0).all())
            and not is_between_bounds(values)
            and not feeds_a_layer(top)
        ):
            expression.role = "positive"
        return expression

    @staticmethod
    def _is_guard(values: Tensor) -> bool:
        """Tell whether the function is x.clamp(min=epsilon), which keeps a divisor from zero.

        So is any limit below, and x.clamp(max=7), a limit above.
        """
        low, high = float(near(values).min()), float(near(values).max())
        is_low = low < 0.1 and torch.equal(values, GRID.clamp(min=low))
        return is_low or (high > 0.1 and torch.equal(values, GRID.clamp(max=high)))

    def values(self, top: Node, root: Node) -> Tensor | None:
        """Evaluate ``top`` as a function of ``root`` on the grid, None if it cannot be."""
        try:
            with torch.no_grad():
                values = self._value(top, {root.index: GRID})
        except Exception:  # whatever a foreign function raises for one dimension and no image
            return None
        if not isinstance(values, Tensor) or values.shape != GRID.shape:
            return None
        return values.to(GRID.dtype)

    def _value(self, node: Node, known: dict[int, Any]) -> Any:
        """Evaluate a node; what does not depend on the input must have one value everywhere."""
        if node.index in known:
            return known[node.index]
        if node.leaf is node or (not node.from_input and node.tensor.numel() > _MOST_VALUES):
            raise _NotConstant
        if node.call is None:
            value: Any = self._values.get(id(node.tensor))
            if value is None or value.is_meta:
                raise _NotConstant
            value = value.detach().cpu()
        elif node.name in SAME:
            value = self._value(node.inputs[0], known)
        else:
            args, kwargs = (self._with_values(given, known) for given in (node.args, node.kwargs))
            value = node.call(*args, **{k: v for k, v in kwargs.items() if k not in _FACTORY})
        if isinstance(value, Tensor) and not node.from_input:
            one = value.flatten()[0]
            if bool((value != one).any()):
                raise _NotConstant
            value = one.to(GRID.dtype) if one.is_floating_point() else one
        known[node.index] = value
        return value

    def _with_values(self, given: Any, known: dict[int, Any]) -> Any:
        """Return arguments with values in the place of nodes."""
        if isinstance(given, Node):
            value = self._value(given, known)
            return value.clone() if isinstance(value, Tensor) else value
        if isinstance(given, tuple):
            return tuple(self._with_values(part, known) for part in given)
        if isinstance(given, dict):
            return {key: self._with_values(part, known) for key, part in given.items()}
        return given

    def is_hard_sigmoid(self, node: Node) -> bool:
        """Tell whether ``node`` is relu6(x + 3) for some x, a hard-sigmoid spelled out."""
        forms = (self.values(node, root) for root, _ in self._roots(node))
        return any(v is not None and recognised(v) == "hardsigmoid" for v in forms)

    def keeps_positive(self, node: Node, root: Node) -> bool:
        """Tell whether ``node`` is above zero for any ``root``, and no layer reads it as features.

        So are the step sizes of state-space models, and standard deviations at the output. What
        is affine in ``node`` counts with it: elu(x) + 1.
        """
        while True:
            values = self.values(node, root)
            if values is not None and 0 < near(values).min() < 0.5:
                return not feeds_a_layer(node)
            if len(node.users) != 1 or not node.users[0].is_affine:
                return False
            (node,) = node.users


def _is_maximum_of_two(node: Node) -> bool:
    """Tell whether the result is the larger of two features, as in FReLU."""
    is_feature = node.learned and not node.statistic and node.tensor.is_floating_point()
    return is_feature and node.name in MAXIMUM and len(node.varying) > 1
