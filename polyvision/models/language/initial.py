"""Initial values of the matrices of a language model.

The paper draws from a normal distribution of standard deviation 1/sqrt(2.5 width), for the mixture
of experts cut off at three standard deviations. Its released code differs: 0.02 for the mixture
of experts, and 1/sqrt(2 layers) less for the outputs of the dense model's layers.

Source: Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (Table 7).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from polyvision.models.language.shape import TransformerShape

__all__ = ["Draw", "matrix_draw"]

# Fills a matrix; the second argument tells whether it writes to the residual stream.
Draw = Callable[[Tensor, bool], None]


def matrix_draw(shape: TransformerShape) -> Draw:
    """Return the function that fills the matrices of a model of this shape."""
    inner = shape.matrix_std
    outer = inner / math.sqrt(2 * shape.layers) if shape.init_depth_scaled else inner
    cutoff = shape.init_cutoff

    def draw(matrix: Tensor, writes_residual: bool) -> None:
        std = outer if writes_residual else inner
        if cutoff is None:
            nn.init.normal_(matrix, std=std)
        else:
            nn.init.trunc_normal_(matrix, std=std, a=-cutoff * std, b=cutoff * std)

    return draw
