"""Sampling from a language model: temperature, top-k and nucleus (top-p), each token once.

Source: Fan et al. 2018 (top-k), https://arxiv.org/abs/1805.04833; Holtzman et al. 2019 (nucleus),
https://arxiv.org/abs/1904.09751.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from polyvision.errors import PolyvisionError
from polyvision.models.language.transformer import Transformer

__all__ = [
    "Sampling",
    "eval_mode",
    "generate",
    "next_token_probabilities",
    "prompt_seeds",
    "stream",
]

_COLDEST = 1e-38  # about the smallest normal number of fp32


class Sampling(TypedDict, total=False):
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (default: 1).
        top_k: draw from the k most likely tokens only; None for all.
        top_p: draw from the smallest set of most likely tokens that holds this probability (after
            ``top_k``), greater than 0 and at most 1; None for all.
        seed: for repeatable samples: one for all rows, see ``prompt_seeds``, or one for each; None
            for a fresh one.
    """

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | Sequence[int] | None


def generate(
    model: Transformer, prompt: Tensor, max_new_tokens: int, **sampling: Unpack[Sampling]
) -> Tensor:
    """Continue each prompt by ``max_new_tokens`` tokens.

    The model sees at most its last ``context`` tokens. Up to there it computes each token once (see
    ``KeyValueCache``); beyond, every position moves with each new token, and the whole window is
    computed again. It runs in eval mode and is left in the mode it was in; random numbers come from
    a generator of their own, so a sample taken during training does not change the training.

    Args:
        model: the language model.
        prompt: (B, T) int64 with T at least 1, on the model's device.
        max_new_tokens: number n of tokens to add, 0 or more.
        **sampling: ``temperature``, ``top_k``, ``top_p`` and ``seed``, see ``Sampling``.

    Returns:
        (B, T + n) int64: the prompt and its continuation.

    Raises:
        PolyvisionError: a value is out of range, which the text names; or logits are not finite.

    Example:
        >>> from polyvision.models.language.transformer import TransformerShape
        >>> shape = TransformerShape(
        ...     vocab_size=256, context=64, width=32, layers=2, heads=4, ffn_hidden=96
        ... )
        >>> prompt = torch.zeros(2, 3, dtype=torch.int64)
        >>> generate(Transformer(shape), prompt, 5, top_k=10, seed=0).shape
        torch.Size([2, 8])
    """
    new = stream(model, prompt, max_new_tokens, **sampling)
    return torch.cat((prompt, *(token[:, None] for token in new)), dim=1)


@torch.no_grad()
def stream(
    model: Transformer,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    starts: Tensor | None = None,
    seed: int | Sequence[int] | None = None,
    **sampling: Any,
) -> Generator[Tensor, None, None]:
    """Yield what ``generate`` appends, one token of each row at a time.

    The model is in eval mode until the iterator ends or is closed. A row's continuation does not
    depend on the other rows, but for rounding: each draws from its own random numbers.

    Args:
        model: as in ``generate``, like all that is not explained here.
        prompt: (B, T) int64.
        max_new_tokens: number of tokens to add.
        starts: (B,) int64 where each row's prompt begins, for prompts of different lengths that end
            together; None for 0. What lies before is not looked at.
        seed: see ``Sampling``.
        **sampling: the rest of ``Sampling``.

    Yields:
        (B,) int64.

    Raises:
        PolyvisionError: as ``generate``, at the first token.

    Example:
        >>> from polyvision.models.language.transformer import TransformerShape
        >>> shape = TransformerShape(
        ...     vocab_size=256, context=64, width=32, layers=2, heads=4, ffn_hidden=96
        ... )
        >>> prompt = torch.tensor([[0, 0, 7], [1, 2, 3]])  # of one token and of three
        >>> [t.shape for t in stream(Transformer(shape), prompt, 2, starts=torch.tensor([2, 0]))]
        [torch.Size([2]), torch.Size([2])]
    """
    _check(prompt, max_new_tokens, **sampling)
    starts = torch.zeros_like(prompt[:, 0]) if starts is None else starts
    generators = _generators(prompt, starts, seed)
    assert bool((starts < prompt.shape[1]).all())
    context = model.shape.context
    tokens, cache = prompt[:, -context:], None
    starts = (starts - (prompt.shape[1] - tokens.shape[1])).clamp(min=0)
    with eval_mode(model):
        for left in range(max_new_tokens, 0, -1):
            if cache is None or cache.length == cache.capacity:
                cache = model.new_cache(starts, min(context, tokens.shape[1] + left - 1))
                logits = model.decode(tokens, cache)  # (B, V)
            else:
                logits = model.decode(tokens[:, -1:], cache)
            if not bool(logits.amax(-1).isfinite().all()):
                raise PolyvisionError(
                    "generate: the model's logits are inf or nan; try fp32 (--precision 32), or "
                    "other weights"
                )
            token = _draw(logits, generators, **sampling)
            yield token
            tokens = torch.cat((tokens, token[:, None]), dim=1)
            if tokens.shape[1] > context:  # the window moves on
                tokens, starts = tokens[:, 1:], (starts - 1).clamp(min=0)


def _draw(
    logits: Tensor,
    generators: Sequence[torch.Generator],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Return the next token of each row, (B,)."""
    if temperature == 0:
        return logits.argmax(-1)
    rows = zip(next_token_probabilities(logits, temperature, top_k, top_p), generators, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in rows])


def prompt_seeds(seed: int, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return a seed for each prompt that does not depend on the others.

    So a prompt has the same continuation alone and among others. Only of equal prompts, all but the
    first get seeds of their own, which makes them different samples.

    Args:
        seed: of the first prompt of its kind.
        prompts: the tokens of each.

    Example:
        >>> prompt_seeds(5, [[1, 2], [3]])
        [5, 5]
        >>> prompt_seeds(5, [[3], [3]])[0]
        5
    """
    seeds: list[int] = []
    counts: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        key = tuple(prompt)
        before = counts.get(key, 0)
        counts[key] = before + 1
        seeds.append(seed if not before else _derived(seed, before))
    return seeds


def _derived(seed: int, number: int) -> int:
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # below 2**63


def _generators(
    prompt: Tensor, starts: Tensor, seed: int | Sequence[int] | None
) -> list[torch.Generator]:
    """Return the random numbers of each row."""
    generators = [torch.Generator(prompt.device) for _ in prompt]
    if seed is None:
        for generator in generators:
            generator.seed()
        return generators
    if isinstance(seed, int):
        pairs = zip(prompt.tolist(), starts.tolist(), strict=True)
        seed = prompt_seeds(seed, [row[start:] for row, start in pairs])
    for generator, own in zip(generators, seed, strict=True):
        generator.manual_seed(own)
    return generators


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
    # No overflow near 0, and no 0 / 0 where fp32 rounds the temperature to 0.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, _COLDEST)
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
def eval_mode(model: nn.Module) -> Iterator[None]:
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
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
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
