"""How DTensor may shard the operations: along any dimension but the feature dimension.

A tensor sharded along the feature dimension is gathered first; ``poly_norm_stats`` and
``poly_norm_apply`` of ``polyvision.functional`` avoid that.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["register"]

Strategies = list[tuple[list[Any], list[Any]]]


@functools.cache
def register() -> None:
    """Tell DTensor the rules, once; imported only where DTensor is in use."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    library, same = torch.ops.polyvision, Replicate()

    def shards(x: Any, dim: int | None) -> list[tuple[Any, Any]]:
        """Return the placements of x, each with that of a tensor of its rows."""
        count = len(x.shape)
        feature = count if dim is None else dim % count
        rows = [(Shard(d), Shard(d - (d > feature))) for d in range(count) if d != feature]
        return [(Replicate(), Replicate()), *rows]

    def given(operand: Any, placement: Any) -> Any:
        return None if operand is None else placement

    def stats_of(row: Any) -> Any:
        return Shard(row.dim + 1) if isinstance(row, Shard) else row  # order comes first

    def total(full: Any) -> Any:
        return Partial() if isinstance(full, Shard) else full

    def gradients(full: Any, *needs: bool) -> list[Any]:
        kinds = [full, *[total(full)] * (len(needs) - 2), full]
        return [kind if need else same for kind, need in zip(kinds, needs, strict=True)]

    def norm(
        x: Any, weight: Any, bias: Any, eps: Any, dim: int, mul: Any, group: Any, *_: Any
    ) -> Strategies:
        return [
            (
                [full, stats_of(row)],
                [full, same, given(bias, same), None, None]
                + [given(mul, full), given(group, row), None, None],
            )
            for full, row in shards(x, dim)
        ]

    def norm_backward(*arguments: Any) -> Strategies:
        _, x, _, _, bias, _, dim, mul, group, _, _, needs = arguments
        return [
            (
                gradients(full, *needs),
                [full, full, stats_of(row), same, given(bias, same), None, None]
                + [given(mul, full), given(group, row), None, None, None],
            )
            for full, row in shards(x, dim)
        ]

    def relu(
        x: Any, weight: Any, bias: Any, slope: Any, mul: Any, group: Any, backend: Any
    ) -> Strategies:
        return [
            (
                [full],
                [full, same, given(bias, same), given(slope, same)]
                + [given(mul, full), given(group, row), None],
            )
            for full, row in shards(x, _relu_dim(slope, group))
        ]

    def relu_backward(*arguments: Any) -> Strategies:
        _, x, _, bias, slope, mul, group, _, needs = arguments
        return [
            (
                gradients(full, *needs),
                [full, full, same, given(bias, same), given(slope, same)]
                + [given(mul, full), given(group, row), None, None],
            )
            for full, row in shards(x, _relu_dim(slope, group))
        ]

    rules = {
        library.poly_norm: norm,
        library.poly_norm_backward: norm_backward,
        library.poly_relu: relu,
        library.poly_relu_backward: relu_backward,
    }
    for operation, rule in rules.items():
        register_sharding(operation.default)(rule)


def _relu_dim(slope: Any, group: Any) -> int | None:
    """Return the dimension that must stay whole: that of the channels or of the rows."""
    if group is not None:
        return -1
    return 1 if slope is not None and slope.shape.numel() > 1 else None
