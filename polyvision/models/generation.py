"""Sampling from a language model: temperature, top-k and nucleus (top-p).

Source: Fan et al. 2018 (top-k), https://arxiv.org/abs/1805.04833; Holtzman et al. 2019 (nucleus),
https://arxiv.org/abs/1904.09751.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from polyvision.errors import PolyvisionError
from polyvision.models.transformer import Transformer

__all__ = ["generate", "next_token_probabilities"]


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Tensor:
    """Continue each prompt by ``max_new_tokens`` tokens.

    The model sees at most its last ``context`` tokens. It runs in eval mode and is left in the mode
    it was in; random numbers come from a generator of their own, so a sample taken during training
    does not change the training.

    Args:
        model: the language model.
        prompt: (B, T) int64 with T at least 1, on the model's device.
        max_new_tokens: number n of tokens to add, 0 or more.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw from the k most likely tokens only; None for all.
        top_p: draw from the smallest set of most likely tokens that holds this probability (after
            ``top_k``), greater than 0 and at most 1; None for all.
        seed: for repeatable samples; None for a fresh one.

    Returns:
        (B, T + n) int64: the prompt and its continuation.

    Raises:
        PolyvisionError: a value is out of range; the text names it.

    Example:
        >>> from polyvision.models.transformer import TransformerShape
        >>> shape = TransformerShape(
        ...     vocab_size=256, context=64, width=32, layers=2, heads=4, ffn_hidden=96
        ... )
        >>> prompt = torch.zeros(2, 3, dtype=torch.int64)
        >>> generate(Transformer(shape), prompt, 5, top_k=10, seed=0).shape
        torch.Size([2, 8])
    """
    _check(prompt, max_new_tokens, temperature, top_k, top_p)
    generator = torch.Generator(prompt.device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    tokens = prompt
    with _eval_mode(model):
        for _ in range(max_new_tokens):
            logits = model(tokens[:, -model.shape.context :])[:, -1]  # (B, V)
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)  # (B, 1)
            else:
                probabilities = next_token_probabilities(logits, temperature, top_k, top_p)
                token = torch.multinomial(probabilities, 1, generator=generator)  # (B, 1)
            tokens = torch.cat((tokens, token), dim=1)
    return tokens


def next_token_probabilities(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Return the distribution that ``generate`` draws from, in fp32 or wider.

    Args:
        logits: (B, V).
        temperature: greater than 0.
        top_k: keep the k most likely tokens; ties at the border stay in.
        top_p: keep tokens in falling order of probability until their sum reaches this value.

    Returns:
        (B, V) probabilities; each row sums to 1.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # no overflow near 0
    if top_k is not None and top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < smallest_kept, -math.inf)
    if top_p is not None and top_p < 1:
        ordered, index = logits.softmax(-1).sort(descending=True, stable=True)  # (B, V)
        likelier = ordered.cumsum(-1) - ordered  # probability of all tokens before this one
        dropped = torch.zeros_like(index, dtype=torch.bool).scatter(-1, index, likelier >= top_p)
        logits = logits.masked_fill(dropped, -math.inf)
    return logits.softmax(-1)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode, and restore each module's own mode in the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check(
    prompt: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    if prompt.ndim != 2 or prompt.dtype != torch.int64 or prompt.shape[1] == 0:
        raise PolyvisionError(
            "generate: prompt must be int64 of shape (batch, length) with at least one token, "
            f"got {prompt.dtype} of shape {tuple(prompt.shape)}"
        )
    if max_new_tokens < 0:
        raise PolyvisionError(f"generate: max_new_tokens must be 0 or more, got {max_new_tokens}")
    if not 0 <= temperature < math.inf:
        raise PolyvisionError(
            f"generate: temperature must be 0 (most likely token) or more, got {temperature}"
        )
    if top_k is not None and top_k < 1:
        raise PolyvisionError(f"generate: top_k must be 1 or more, or None for all, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise PolyvisionError(
            f"generate: top_p must be greater than 0 and at most 1, or None for all, got {top_p}"
        )
