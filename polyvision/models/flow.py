"""The data flow of one forward pass: what each tensor was computed from, and by which function.

It tells three things that a single call does not. Whether several calls together are one activation
written by hand, such as ``x * torch.sigmoid(x)``: the expression is evaluated on a grid. Whether an
activation feeds the normalising quotient or the products of linear attention. And whether a result
that cannot be negative scales something or leaves the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from polyvision.models.functions import (
    BOUNDED,
    FUNCTIONS,
    GRID,
    is_affine,
    is_between_bounds,
    is_defined,
    is_monotone,
    recognised,
)

__all__ = ["Expression", "Flow", "KeptRole", "Node", "Operand", "Place"]

KeptRole = Literal["gate", "kernel", "positive"]

_SAME = {"float", "double", "half", "bfloat16", "to", "type", "type_as", "clone", "contiguous"}
_SAME |= {"detach", "alias", "requires_grad"}
_SUM = {"add", "sub", "subtract", "rsub"}
_QUOTIENT = {"div", "divide", "true_divide"}
_INVERSE = {"rdiv", "rtruediv", "reciprocal"}
_PRODUCT = {"mul", "multiply", "addcmul"}
_SCALE = _PRODUCT | _QUOTIENT
_AFFINE = _SAME | _SUM | _SCALE | {"neg", "negative"}
_MAXIMUM = {"maximum", "minimum", "max", "min", "fmax", "fmin"}
_POINTWISE = {
    *(_AFFINE | _INVERSE | _MAXIMUM | set(FUNCTIONS.values())),
    *("pow", "rpow", "float_power", "square", "sqrt", "rsqrt", "exp", "exp2", "expm1"),
    *("log", "log1p", "log2", "erf", "special_erf", "special_expit", "erfc", "sin", "cos"),
    *("atan", "arctan", "sinh", "cosh", "abs", "absolute", "sign", "heaviside", "clamp", "clip"),
    *("clamp_min", "clamp_max", "where", "masked_fill", "logaddexp", "gt", "lt", "ge"),
    *("le", "greater", "less", "zeros_like", "ones_like", "full_like", "floor", "round", "xlogy"),
}
_STATISTICS = {
    *("sum", "mean", "var", "std", "var_mean", "std_mean", "norm", "vector_norm", "amax", "amin"),
    *("linalg_vector_norm", "max", "min", "logsumexp", "softmax", "log_softmax", "cdist", "prod"),
    *("avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "cumsum"),
}
_SHAPES = {
    *("view", "reshape", "transpose", "permute", "flatten", "unflatten", "unsqueeze", "squeeze"),
    *("getitem", "get", "chunk", "split", "unbind", "cat", "concat", "stack", "pad", "expand"),
    *("expand_as", "repeat", "repeat_interleave", "roll", "flip", "movedim", "swapaxes", "narrow"),
    *("select", "index_select", "gather", "t", "dropout", "split_with_sizes", "view_as", "tile"),
}
_PRODUCTS = {"matmul", "rmatmul", "bmm", "einsum", "baddbmm", "mm", "tensordot"}
_LINEAR = _SHAPES | _AFFINE | _PRODUCTS | {"sum", "mean", "cumsum"}
_NORMS = {"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"}
_FACTORY = {"device", "dtype", "layout", "memory_format", "requires_grad", "pin_memory", "inplace"}
_MOST_VALUES = 1 << 20  # of a constant that is looked at


@dataclasses.dataclass(frozen=True)
class Place:
    """One expression in the source: ``owner`` is the module whose method holds it.

    No two calls end at the same character, so file, line and column of the end name one. An
    operator (``x * y``) may end where a call does: ``start`` is its begin, None for a call.
    """

    owner: str
    file: str
    line: int
    column: int
    start: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Operand:
    """Where the source of an expression has the tensor that it is a function of.

    Attributes:
        name: a local variable that holds it; else None, and the rest tells.
        place: the call or operator that takes it.
        index: the argument's position.
        method: the call is a method of a tensor, which is the argument at 0.
    """

    name: str | None
    place: Place | None = None
    index: int = 0
    method: bool = False


class _NotConstant(Exception):
    """An expression has no value on the grid: it has parameters without data, or one a channel."""


@dataclasses.dataclass(eq=False)
class Node:
    """One result of one function.

    Attributes:
        index: position in the order of execution.
        name: of the function, without underscores around it.
        call: the function.
        args: its arguments, with nodes in the place of tensors.
        kwargs: likewise.
        tensor: the result, without data.
        inputs: the nodes among the arguments.
        from_input: computed from what the network is given.
        from_parameter: computed from a parameter.
        statistic: a reduction, or computed from reductions only.
        leaf: the tensor that this one is a pointwise function of; the node itself if of none, and
            None for what does not depend on the network's input.
        place: where the call is written; None if in no module's own method.
        caller: the function that makes the call.
        names: nodes that local variables of the caller held, with the variable.
        users: the nodes computed from this one.
    """

    index: int
    name: str
    call: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensor: Tensor
    inputs: list[Node]
    from_input: bool = False
    from_parameter: bool = False
    statistic: bool = False
    leaf: Node | None = None
    place: Place | None = None
    caller: str = ""
    names: dict[int, str] = dataclasses.field(default_factory=dict)
    users: list[Node] = dataclasses.field(default_factory=list)

    @property
    def learned(self) -> bool:
        """Whether the tensor depends on both the network's input and its parameters."""
        return self.from_input and self.from_parameter

    @property
    def varying(self) -> list[Node]:
        """The inputs that depend on what the network is given."""
        return [node for node in self.inputs if node.from_input]

    @property
    def is_affine(self) -> bool:
        """Whether the function is affine in what depends on the network's input."""
        if self.name in _SCALE:
            multiplies = self.name in _PRODUCT
            return len(self.varying) == 1 and (multiplies or self.inputs[0].from_input)
        return self.name in _AFFINE


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


class Flow:
    """The nodes of one pass.

    Args:
        values: id of a parameter or buffer of the traced network -> the tensor with data.
        parameters: the ids of the parameters among them.
    """

    def __init__(self, values: dict[int, Tensor], parameters: set[int]) -> None:
        self._values = values
        self._parameters = parameters
        self._of: dict[int, Node] = {}  # by id of the tensor, which the node keeps alive
        self.nodes: list[Node] = []

    def give(self, tensor: Tensor) -> None:
        """Note an input of the network."""
        node = self._add("input", None, (), {}, tensor, [])
        node.from_input, node.leaf = True, node

    def of(self, tensor: Tensor) -> Node:
        """Return the node of ``tensor``: its latest value, if it was changed in place."""
        node = self._of.get(id(tensor))
        if node is None:
            node = self._add("constant", None, (), {}, tensor, [])
            node.from_parameter = id(tensor) in self._parameters
        return node

    def knows(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` has a node."""
        return id(tensor) in self._of

    def record(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Node | None:
        """Note one call; return its node if it is a pointwise function with one result."""
        name = _plain_name(function)
        parts = output if isinstance(output, tuple | list) else (output,)
        if name == "setitem":
            parts = args[:1]
        results = [part for part in parts if isinstance(part, Tensor)]
        if not results:
            return None
        inputs: list[Node] = []
        args = self._replaced(args, inputs)
        kwargs = self._replaced(kwargs, inputs)
        if name in _SAME and inputs and inputs[0].tensor is results[0]:
            return None
        node = None
        for result in results:
            node = self._add(name, function, args, kwargs, result, inputs)
        assert node is not None
        if len(results) > 1 or name not in _POINTWISE:
            return None
        if name in ("max", "min") and len(inputs) < 2:
            return None
        leaves = {id(i.leaf): i.leaf for i in node.varying}
        if len(leaves) == 1:
            (leaf,) = leaves.values()
            if leaf is not None and leaf.tensor.shape == node.tensor.shape:
                node.leaf = leaf
        return node

    def _add(
        self,
        name: str,
        call: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensor: Tensor,
        inputs: list[Node],
    ) -> Node:
        node = Node(len(self.nodes), name, call, args, kwargs, tensor, inputs)
        node.from_input = any(i.from_input for i in inputs)
        node.from_parameter = any(i.from_parameter for i in inputs)
        carries = name in _POINTWISE or name in _SHAPES
        reduces = name in _STATISTICS and not (name in _MAXIMUM and len(inputs) > 1)
        node.statistic = reduces or (
            carries and bool(node.varying) and all(i.statistic for i in node.varying)
        )
        node.leaf = node if node.from_input else None
        for i in inputs:
            i.users.append(node)
        self._of[id(tensor)] = node
        self.nodes.append(node)
        return node

    def _replaced(self, given: Any, inputs: list[Node]) -> Any:
        """Return arguments with nodes in the place of tensors, and collect these."""
        if isinstance(given, Tensor):
            inputs.append(self.of(given))
            return inputs[-1]
        if isinstance(given, tuple | list):
            return tuple(self._replaced(part, inputs) for part in given)
        if isinstance(given, dict):
            return {key: self._replaced(part, inputs) for key, part in given.items()}
        return given

    # What the pass applies.

    def expressions(self, calls: dict[int, str]) -> list[Expression]:
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
            elif _is_maximum_of_two(node):
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
        is_call = top.index in calls or top.name in _SAME or self._scales_a_call(top, calls)
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
                if len(same) != 1 or same[0].name not in _SAME:
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
        if self._is_reduced(top) or (root.statistic and not holds_a_call):
            return None
        if values is None:  # a range between buffers without data is no activation either
            return None if top.name in ("clamp", "clip") else expression
        core = values[: len(GRID.core)]
        if not is_defined(values):  # a logarithm, a quotient
            return expression if holds_a_call else None
        if is_affine(values) or self._is_guard(values):
            return None
        if is_monotone(values) and is_between_bounds(values):
            expression.role = "gate"
        elif (
            bool((core >= 0).all())
            and not is_between_bounds(values)
            and not self.feeds_a_layer(top)
        ):
            expression.role = "positive"
        return expression

    @staticmethod
    def _is_guard(values: Tensor) -> bool:
        """Tell whether the function is x.clamp(min=epsilon), which keeps a divisor from zero."""
        smallest = values[: len(GRID.core)].min()
        return bool(smallest < 0.1) and torch.equal(values, GRID.points.clamp(min=float(smallest)))

    def values(self, top: Node, root: Node) -> Tensor | None:
        """Evaluate ``top`` as a function of ``root`` on the grid, None if it cannot be."""
        known: dict[int, Tensor] = {root.index: GRID.points}
        try:
            with torch.no_grad():
                values = self._value(top, known)
        except Exception:  # whatever a foreign function raises for one dimension and no image
            return None
        if not isinstance(values, Tensor) or values.shape != GRID.points.shape:
            return None
        return values.to(GRID.points.dtype)

    def _value(self, node: Node, known: dict[int, Tensor]) -> Any:
        if node.index in known:
            return known[node.index]
        if not node.from_input:
            return self._constant(node)
        if node.leaf is node or node.call is None:
            raise _NotConstant
        if node.name in _SAME:
            value = self._value(node.inputs[0], known)
        else:
            value = self._called(node, lambda part: self._value(part, known))
        known[node.index] = value
        return value

    def _constant(self, node: Node) -> Any:
        """Return the one value that a constant has everywhere."""
        if node.tensor.numel() > _MOST_VALUES:
            raise _NotConstant
        if node.name == "constant":
            value: Any = self._values.get(id(node.tensor))
            if value is None or value.is_meta:
                raise _NotConstant
            value = value.detach().cpu()
        else:
            value = self._called(node, self._constant)
        if not isinstance(value, Tensor):
            return value
        if value.numel() == 0 or bool((value != value.flatten()[0]).any()):
            raise _NotConstant
        one = value.flatten()[0]
        return one.to(GRID.points.dtype) if one.is_floating_point() else one

    def _called(self, node: Node, value_of: Callable[[Node], Any]) -> Any:
        def real(given: Any) -> Any:
            if isinstance(given, Node):
                value = value_of(given)
                return value.clone() if isinstance(value, Tensor) else value
            if isinstance(given, tuple):
                return tuple(real(part) for part in given)
            return given

        assert node.call is not None
        kwargs = {k: real(v) for k, v in node.kwargs.items() if k not in _FACTORY}
        return node.call(*(real(a) for a in node.args), **kwargs)

    def is_hard_sigmoid(self, node: Node) -> bool:
        """Tell whether ``node`` is relu6(x + 3) for some x, a hard-sigmoid spelled out."""
        forms = (self.values(node, root) for root, _ in self._roots(node))
        return any(v is not None and recognised(v) == "hardsigmoid" for v in forms)

    # Where a result goes.

    def is_of_parameters(self, node: Node) -> bool:
        """Tell whether ``node`` is a parameter, reshaped and scaled at most."""
        while node.name in _SHAPES | _AFFINE and not node.from_input and node.inputs:
            node = next((i for i in node.inputs if i.from_parameter), node.inputs[0])
        return node.name == "constant" and node.from_parameter

    def keeps_positive(self, node: Node, root: Node) -> bool:
        """Tell whether ``node`` is above zero for any ``root``, and no layer reads it as features.

        So are the step sizes of state-space models, and standard deviations at the output. What
        is affine in ``node`` counts with it: elu(x) + 1.
        """
        while True:
            values = self.values(node, root)
            if values is not None and 0 < values[: len(GRID.core)].min() < 0.5:
                return not self.feeds_a_layer(node)
            if len(node.users) != 1 or not node.users[0].is_affine:
                return False
            (node,) = node.users

    def feeds_a_layer(self, node: Node) -> bool:
        """Tell whether a layer reads the result before it scales another tensor or is returned."""
        after = self._after(node, lambda user: not _combines(user) and not _is_layer(user))
        return any(map(_is_layer, after))

    def _is_reduced(self, node: Node) -> bool:
        """Tell whether the result only enters sums and means, as the square in a norm does."""
        users = list(node.users)
        while users:
            user = users.pop()
            if user.name in _SHAPES | _SAME and user.users:
                users += user.users
            elif user.name not in _STATISTICS:
                return False
        return bool(node.users)

    def is_kernel(self, node: Node, input_: Node, activations: set[int]) -> bool:
        """Tell whether ``node`` is what linear attention applies to queries, keys or scores.

        Args:
            node: the result of an activation.
            input_: what it is applied to.
            activations: indices of the results of all activations.
        """
        reached = {u.index for u in self._after(node, _is_linear)}
        reached = {i for i in reached if _is_linear(self.nodes[i])} | {node.index}
        summed = {i for i in reached if self.nodes[i].name in _PRODUCTS | {"sum", "mean", "cumsum"}}
        divisors = {
            u.index
            for i in summed
            for u in [self.nodes[i], *self._after(self.nodes[i], _carries_a_divisor)]
            if u.index in reached or _carries_a_divisor(u)
        }
        for i in reached | divisors:
            for user in self.nodes[i].users:
                if user.name in _QUOTIENT and len(user.inputs) == 2:
                    over, under = user.inputs
                    if over.index in reached and under.index in divisors:
                        return True
                if user.name in _PRODUCT and len(user.inputs) == 2:
                    for one, other in (user.inputs, user.inputs[::-1]):
                        if one.index in reached and self._inverts(other, divisors):
                            return True
        products = [self.nodes[i] for i in reached if _is_data_product(self.nodes[i])]
        if products and self._products_before(input_):
            return True
        return any(
            self._products_before(product) >= 2
            and self._activated_factors(product, activations) >= 2
            for product in products
        )

    def _inverts(self, node: Node, divisors: set[int]) -> bool:
        """Tell whether ``node`` is one over a divisor."""
        is_quotient = node.name in _QUOTIENT and not node.inputs[0].from_input
        if is_quotient or node.name in _INVERSE or node.name == "pow":
            return node.inputs[-1].index in divisors
        return node.name in _SHAPES and any(self._inverts(i, divisors) for i in node.inputs)

    def _products_before(self, node: Node) -> int:
        """Count the products of two features that ``node`` is linear in."""
        return sum(_is_data_product(n) for n, _ in self._before(node, set()))

    def _activated_factors(self, node: Node, activations: set[int]) -> int:
        """Count the ways back to an activation."""
        return sum(index in activations for _, index in self._before(node, activations))

    def _before(self, node: Node, stops: set[int]) -> Iterator[tuple[Node, int]]:
        """Walk back through linear functions, each way once, to the nodes of ``stops``."""
        stack, budget = [node], 2000
        while stack and budget:
            budget -= 1
            node = stack.pop()
            yield node, node.index
            if node.index not in stops and _is_linear(node):
                stack += node.varying

    def _after(self, node: Node, passes: Callable[[Node], bool]) -> list[Node]:
        """Return all nodes computed from ``node`` through functions for which ``passes`` holds."""
        seen: dict[int, Node] = {}
        stack = [node]
        while stack:
            for user in stack.pop().users:
                if user.index not in seen:
                    seen[user.index] = user
                    if passes(user):
                        stack.append(user)
        return list(seen.values())


def _plain_name(function: Any) -> str:
    if function in FUNCTIONS:
        return FUNCTIONS[function]
    return str(getattr(function, "__name__", "")).strip("_")


def _is_maximum_of_two(node: Node) -> bool:
    """Tell whether the result is the larger of two features, as in FReLU."""
    is_feature = node.learned and not node.statistic and node.tensor.is_floating_point()
    return is_feature and node.name in _MAXIMUM and len(node.varying) > 1


def _is_layer(node: Node) -> bool:
    """Tell whether a layer with weights, or a norm, makes the result."""
    pointwise = node.name in _POINTWISE or node.name in _SHAPES
    return node.name in _NORMS or (
        not pointwise and any(i.from_parameter and not i.from_input for i in node.inputs)
    )


def _is_linear(node: Node) -> bool:
    """Tell whether sums, products and changes of shape make the result."""
    return not _is_layer(node) and (node.name in _LINEAR or node.name == "pow")


def _combines(node: Node) -> bool:
    """Tell whether the result is a product or quotient of two tensors that depend on the input."""
    return node.name in _SCALE | _PRODUCTS and len(node.varying) > 1


def _carries_a_divisor(node: Node) -> bool:
    return node.name in _SHAPES | _SAME | _SUM | {"clamp", "clamp_min", "clip"}


def _is_data_product(node: Node) -> bool:
    return node.name in _PRODUCTS and sum(i.learned for i in node.inputs) > 1
