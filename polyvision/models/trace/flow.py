"""The data flow of one forward pass: what each tensor was computed from, and by which function.

The feature dimension is followed along: a convolution, linear layer, batch or group norm tells
where the features of its input and output are, and pointwise functions leave them there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor

from polyvision.models.trace.call import Location
from polyvision.models.trace.known_activations import FUNCTIONS

__all__ = [
    "AFFINE",
    "CONTRACTIONS",
    "MAXIMUM",
    "POINTWISE",
    "QUOTIENT",
    "SAME",
    "SCALE",
    "SHAPES",
    "STATISTICS",
    "Flow",
    "Layout",
    "Node",
]

# Names of functions, without the underscores around them.
SAME = {"float", "double", "half", "bfloat16", "to", "type", "type_as", "clone", "contiguous"}
SAME |= {"detach", "alias", "requires_grad"}
_SUM = {"add", "sub", "subtract", "rsub"}
QUOTIENT = {"div", "divide", "true_divide"}
_PRODUCTS = {"mul", "multiply", "addcmul"}
SCALE = _PRODUCTS | QUOTIENT
AFFINE = SAME | _SUM | SCALE | {"neg", "negative"}
MAXIMUM = {"maximum", "minimum", "max", "min", "fmax", "fmin"}
POINTWISE = {
    *(AFFINE | MAXIMUM | set(FUNCTIONS.values())),
    *("rdiv", "rtruediv", "reciprocal"),
    *("pow", "rpow", "float_power", "square", "sqrt", "rsqrt", "exp", "exp2", "expm1"),
    *("log", "log1p", "log2", "log10", "logaddexp", "logaddexp2", "xlogy", "logit", "sinc"),
    *("erf", "erfc", "special_erf", "special_erfc", "special_expit", "special_ndtr"),
    *("special_log_ndtr", "special_exp2", "special_expm1", "special_log1p", "special_xlogy"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "arctan", "sinh", "cosh", "asinh", "arcsinh"),
    *("acosh", "atanh", "abs", "absolute", "sign", "sgn", "heaviside", "copysign", "hypot"),
    *("clamp", "clip", "clamp_min", "clamp_max", "where", "masked_fill", "lerp", "addcdiv"),
    *("floor", "ceil", "round", "trunc", "frac", "zeros_like", "ones_like", "full_like"),
    *("gt", "lt", "ge", "le", "greater", "greater_equal", "less", "less_equal"),
    *("and", "or", "invert", "logical_and", "logical_or", "logical_not", "bitwise_and"),
    *("bitwise_or", "bitwise_not"),
}
STATISTICS = {
    *("sum", "mean", "var", "std", "var_mean", "std_mean", "norm", "vector_norm", "amax", "amin"),
    *("linalg_vector_norm", "max", "min", "logsumexp", "softmax", "log_softmax", "cdist", "prod"),
    *("avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "cumsum"),
}
SHAPES = {
    *("view", "reshape", "transpose", "permute", "flatten", "unflatten", "unsqueeze", "squeeze"),
    *("getitem", "get", "chunk", "split", "unbind", "cat", "concat", "stack", "pad", "expand"),
    *("expand_as", "repeat", "repeat_interleave", "roll", "flip", "movedim", "swapaxes", "narrow"),
    *("select", "index_select", "gather", "t", "dropout", "split_with_sizes", "view_as", "tile"),
}
CONTRACTIONS = {"matmul", "rmatmul", "bmm", "einsum", "baddbmm", "mm", "tensordot"}
# The feature dimension of what a layer reads and writes.
_FEATURE_DIM = {
    **dict.fromkeys(("linear", "bilinear"), -1),
    **dict.fromkeys(("batch_norm", "group_norm"), 1),
    **{f"conv{kind}{n}d": 1 for kind in ("", "_transpose") for n in (1, 2, 3)},
}
# Functions whose result has its features where the first input of its rank has them.
_KEEPS_FEATURES = POINTWISE | {
    *("getitem", "narrow", "chunk", "split", "cat", "dropout", "pad", "interpolate"),
    *("sum", "mean", "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "layer_norm", "rms_norm", "instance_norm"),
}


@dataclasses.dataclass
class Layout:
    """The feature dimension as far as known; shared by all tensors that are laid out alike."""

    dim: int | None = None


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
        layout: where the features are.
        location: where the call is written; None if in no module's own method.
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
    layout: Layout = dataclasses.field(default_factory=Layout)
    location: Location | None = None
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
        if self.name in SCALE:
            multiplies = self.name in _PRODUCTS
            return len(self.varying) == 1 and (multiplies or self.inputs[0].from_input)
        if self.name in (
            "where",
            "masked_fill",
        ):  # by a mask of the network, as in causal attention
            return not any(i.from_input and i.tensor.dtype == torch.bool for i in self.inputs)
        return self.name in AFFINE

    def lay_out_like(self, given: Node) -> None:
        """Take over the layout of what a module was given for a result of the same shape in it."""
        if self.layout.dim is None and self.tensor.shape == given.tensor.shape:
            self.layout = given.layout

    @property
    def is_masked_assignment(self) -> bool:
        """Whether this is ``x[x < 0] = ...``, with a mask that is a function of ``x``."""
        if self.name != "setitem" or not isinstance(self.args[1], Node):
            return False
        into, mask = self.args[:2]
        return mask.tensor.dtype == torch.bool and mask.from_input and mask.leaf is into.leaf


class Flow:
    """The nodes of one pass.

    Args:
        parameters: the ids of the network's parameters.
    """

    def __init__(self, parameters: Set[int]) -> None:
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
        if name in SAME and inputs and inputs[0].tensor is results[0]:
            return None
        node = None
        for result in results:
            node = self._add(name, function, args, kwargs, result, inputs)
        assert node is not None
        if node.is_masked_assignment:
            return node
        if len(results) > 1 or name not in POINTWISE:
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
        carries = name in POINTWISE or name in SHAPES
        reduces = name in STATISTICS and not (name in MAXIMUM and len(inputs) > 1)
        node.statistic = reduces or (
            carries and bool(node.varying) and all(i.statistic for i in node.varying)
        )
        node.leaf = node if node.from_input else None
        if name in _FEATURE_DIM:
            node.layout.dim = _FEATURE_DIM[name]
            if inputs[0].layout.dim is None:
                inputs[0].layout.dim = node.layout.dim
        elif name in _KEEPS_FEATURES:
            same_rank = (i.layout for i in inputs if i.tensor.ndim == tensor.ndim)
            node.layout = next(same_rank, node.layout)
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


def _plain_name(function: Any) -> str:
    if function in FUNCTIONS:
        return FUNCTIONS[function]
    # What a scripted function calls comes as mul.Tensor.
    return str(getattr(function, "__name__", "")).strip("_").partition(".")[0]
