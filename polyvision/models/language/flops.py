r"""FLOPs of a language model, by one formula: what model FLOP utilisation (MFU) divides.

For each token of a sequence of T, with width w, L layers, key and value width k, hidden size h, m
matrices in an FFN (3 when gated), K experts visited (1 in a dense model), E experts, vocabulary V
and f FLOPs that the activation takes for each hidden element:

.. math::
    forward = L\,(2 w (2w + 2k) + K (2 m w h + f h) + 2 w E + 4 T w) + 2 w V

The terms are projections, FFN, activation, router (none in a dense model), the two products of
attention, and the output matrix. A training step takes three times as much: the backward pass has
two products for each. In a dense model that is 6 FLOPs for each matrix element, 12 L T w for
attention, and 3 f h L. The causal mask is not taken off, norms and softmax are not counted, and
neither is what is computed a second time to save memory.

Source: Kaplan et al. 2020 (6 N), https://arxiv.org/abs/2001.08361; Chowdhery et al. 2022 (MFU and
12 L T w), https://arxiv.org/abs/2204.02311.
"""

from __future__ import annotations

from polyvision.activations import activation_info
from polyvision.models.language.ffn import gated_hidden
from polyvision.models.language.shape import TransformerShape

__all__ = ["forward_flops"]


def forward_flops(shape: TransformerShape, length: int, activation_flops: int) -> int:
    """Return the forward FLOPs of a token in a sequence; three times that for training.

    Args:
        shape: the model.
        length: T, tokens of a sequence.
        activation_flops: f.

    Example:
        >>> shape = TransformerShape(
        ...     vocab_size=50, context=8, width=4, layers=1, heads=2, ffn_hidden=6
        ... )
        >>> forward_flops(shape, 8, 18) == 2 * (4 * 16 + 2 * 24) + 18 * 6 + 4 * 8 * 4 + 2 * 4 * 50
        True
    """
    gated = activation_info(shape.activation).kind == "gated"
    hidden = gated_hidden(shape.ffn_hidden) if gated else shape.ffn_hidden
    width = shape.width
    kv_width = (shape.kv_heads or shape.heads) * shape.head_dim
    visits, experts = (1, 0) if shape.moe is None else (shape.moe.top_k, shape.moe.experts)
    projections = 2 * width * (2 * width + 2 * kv_width)
    ffn = 2 * (3 if gated else 2) * width * hidden + activation_flops * hidden
    layer = projections + visits * ffn + 2 * width * experts + 4 * length * width
    return shape.layers * layer + 2 * width * shape.vocab_size
