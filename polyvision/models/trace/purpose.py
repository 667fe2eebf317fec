"""What a result is used for: as features, as a positive scale, or in linear attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

from polyvision.models.trace.flow import (
    AFFINE,
    CONTRACTIONS,
    POINTWISE,
    QUOTIENT,
    SAME,
    SCALE,
    SHAPES,
    STATISTICS,
    Node,
)

__all__ = ["feeds_a_layer", "is_kernel", "is_of_parameters", "is_reduced"]

_LINEAR = SHAPES | AFFINE | CONTRACTIONS | {"sum", "mean", "cumsum"}
_LIMITS = {"clamp", "clamp_min", "clip"}  # of a divisor
_NORMS = {"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"}


def is_of_parameters(node: Node) -> bool:
    """Tell whether ``node`` is a parameter, reshaped and scaled at most."""
    while node.name in SHAPES | AFFINE and not node.from_input and node.inputs:
        node = next((i for i in node.inputs if i.from_parameter), node.inputs[0])
    return node.name == "constant" and node.from_parameter


def feeds_a_layer(node: Node) -> bool:
    """Tell whether a layer reads the result before it scales another tensor or is returned."""
    after = _after(node, lambda user: not _combines(user) and not _is_layer(user))
    return any(map(_is_layer, after))


def is_reduced(node: Node) -> bool:
    """Tell whether the result only enters sums and means, as the square in a norm does."""
    users = list(node.users)
    while users:
        user = users.pop()
        if user.name in SHAPES | SAME and user.users:
            users += user.users
        elif user.name not in STATISTICS:
            return False
    return bool(node.users)


def is_kernel(node: Node, input_: Node, activations: Set[int]) -> bool:
    """Tell whether ``node`` is what linear attention applies to queries, keys or scores.

    Either it is normalised, divided by a sum of its own, or it is linear in two products of
    features without a layer or softmax in between.

    Args:
        node: the result of an activation.
        input_: what it is applied to.
        activations: indices of the results of all activations.
    """
    reached = [node, *filter(_is_linear_or_limit, _after(node, _is_linear_or_limit))]
    indices = {each.index for each in reached}
    for user in reached:
        divides = user.name in QUOTIENT and len(user.inputs) == 2
        if divides and {i.index for i in user.inputs} <= indices:
            return True
    products = [node for node in reached if _is_data_product(node)]
    if products and _products_before(input_):
        return True
    return any(
        _products_before(product) >= 2 and _activated_factors(product, activations) >= 2
        for product in products
    )


def _products_before(node: Node) -> int:
    """Count the products of two features that ``node`` is linear in."""
    return sum(_is_data_product(n) for n, _ in _before(node, set()))


def _activated_factors(node: Node, activations: Set[int]) -> int:
    """Count the ways back to an activation."""
    return sum(index in activations for _, index in _before(node, activations))


def _before(node: Node, stops: Set[int]) -> Iterator[tuple[Node, int]]:
    """Walk back through linear functions, each way once, to the nodes of ``stops``."""
    stack, budget = [node], 2000
    while stack and budget:
        budget -= 1
        node = stack.pop()
        yield node, node.index
        if node.index not in stops and _is_linear(node):
            stack += node.varying


def _after(node: Node, passes: Callable[[Node], bool]) -> list[Node]:
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


def _is_layer(node: Node) -> bool:
    """Tell whether a layer with weights, or a norm, makes the result."""
    pointwise = node.name in POINTWISE or node.name in SHAPES
    return node.name in _NORMS or (
        not pointwise and any(i.from_parameter and not i.from_input for i in node.inputs)
    )


def _is_linear(node: Node) -> bool:
    """Tell whether sums, products and changes of shape make the result."""
    return not _is_layer(node) and (node.name in _LINEAR or node.name == "pow")


def _is_linear_or_limit(node: Node) -> bool:
    return _is_linear(node) or node.name in _LIMITS


def _combines(node: Node) -> bool:
    """Tell whether the result is a product or quotient of two tensors that depend on the input."""
    return node.name in SCALE | CONTRACTIONS and len(node.varying) > 1


def _is_data_product(node: Node) -> bool:
    return node.name in CONTRACTIONS and sum(i.learned for i in node.inputs) > 1
