"""What a step costs, without running it: FLOPs of the forward pass and bytes kept for backward."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from polyvision.activations import activation_info, activation_modules
from polyvision.analysis.cost.flops import count_flops, flops_per_element, matrix_counter
from polyvision.analysis.cost.saved_bytes import SavedTensors
from polyvision.analysis.layers import watch_outputs
from polyvision.errors import PolyvisionError
from polyvision.models.language.ffn import gated_hidden
from polyvision.models.language.transformer import Transformer

__all__ = ["Cost", "estimate_cost", "token_flops"]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of one forward pass of a batch.

    Attributes:
        flops: floating-point operations of matrix products, convolutions and attention (two for a
            multiply-add), and of the activations by the paper's rules (``analysis.cost.flops``).
            Other element-wise work is not counted. For a language model: ``token_flops``.
        saved_bytes: bytes of the tensors that are kept for the backward pass, parameters left out.
    """

    flops: int
    saved_bytes: int


def estimate_cost(model: nn.Module, make_input: Callable[[], Tensor], dtype: torch.dtype) -> Cost:
    """Trace one training forward pass of ``model`` on tensors without data.

    A language model is traced with its loss, the inputs serving as targets.

    Args:
        model: the network; only the shapes of its tensors count, which may be on any device.
        make_input: makes the input of a batch.
        dtype: compute dtype; below fp32 the pass runs under autocast.

    Raises:
        PolyvisionError: a layer refuses the batch, as norms over one value do.
    """
    matrices = matrix_counter()
    sites = activation_modules(model)
    elements: Counter[tuple[str, int]] = Counter()

    def see(name: str, inputs: tuple[Any, ...], output: Tensor) -> None:
        elements[name, len(inputs)] += output.numel()

    low = dtype != torch.float32
    language = isinstance(model, Transformer)
    parameters = list(model.named_parameters())
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        SavedTensors() as saved,
        torch.autocast("cpu", dtype=dtype if low else torch.bfloat16, enabled=low),
        watch_outputs({} if language else sites, see),
        matrices,
    ):
        inputs = make_input()
        own = {name: _twin(tensor) for name, tensor in (*parameters, *model.named_buffers())}
        try:
            functional_call(model, own, (inputs, inputs) if language else (inputs,))
        except ValueError as error:
            raise PolyvisionError(
                f"the network does not train on passes of shape {tuple(inputs.shape)}: {error}. A "
                f"pass is recipe.batch_size / (devices x recipe.accumulate)"
            ) from error
        kept = saved.bytes_without(own[name] for name, _ in parameters)
    if isinstance(model, Transformer):
        return Cost(inputs.numel() * token_flops(model, inputs.shape[1]), kept)
    active = sum(n * count_flops(sites[name], given) for (name, given), n in elements.items())
    return Cost(matrices.get_total_flops() + active, kept)


def _twin(tensor: Tensor) -> Tensor:
    """Return a tensor of the same kind on the CPU, without data where tensors are fake."""
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad
    )


def token_flops(model: Transformer, length: int) -> int:
    r"""Return the forward FLOPs of a token in a sequence; model FLOP utilisation divides by them.

    For each token of a sequence of T, with width w, L layers, key and value width k, hidden size h,
    m matrices in an FFN (3 when gated), K experts visited (1 in a dense model), E experts,
    vocabulary V and f FLOPs that the activation takes for each hidden element:

    .. math::
        forward = L\,(2 w (2w + 2k) + K (2 m w h + f h) + 2 w E + 4 T w) + 2 w V

    The terms are projections, FFN, activation, router (none in a dense model), the two products of
    attention, and the output matrix. A training step takes three times as much: the backward pass
    has two products for each. In a dense model that is 6 FLOPs for each matrix element, 12 L T w
    for attention, and 3 f h L. The causal mask is not taken off, norms and softmax are not counted,
    and neither is what is computed a second time to save memory.

    Source: Kaplan et al. 2020 (6 N), https://arxiv.org/abs/2001.08361; Chowdhery et al. 2022 (MFU
    and 12 L T w), https://arxiv.org/abs/2204.02311.

    Args:
        model: the model.
        length: T, tokens of a sequence.
    """
    shape = model.shape
    per_element = flops_per_element(shape.activation, **shape.activation_options)
    info = activation_info(shape.activation)
    gated = info.kind == "gated"
    hidden = gated_hidden(shape.ffn_hidden) if gated else shape.ffn_hidden
    width = shape.width
    kv_width = (shape.kv_heads or shape.heads) * shape.head_dim
    visits, experts = (1, 0) if shape.moe is None else (shape.moe.top_k, shape.moe.experts)
    projections = 2 * width * (2 * width + 2 * kv_width)
    ffn = 2 * (3 if gated else 2) * width * hidden + per_element * hidden
    ffn += 2 * width * getattr(info.factory, "mixing", 0)
    layer = projections + visits * ffn + 2 * width * experts + 4 * length * width
    return shape.layers * layer + 2 * width * shape.vocab_size
