"""Text from a language model, token by token, each at the cost of one token.

Keys and values of earlier tokens are kept (``KeyValueCache``). The context is finite: when a row
has filled it, the older half of what the model sees is forgotten and the rest is read anew, once
in half a context. So a row costs the same however long it gets, and a model with the cache
gives what it would give without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyvision.errors import PolyvisionError
from polyvision.models.cache import KeyValueCache
from polyvision.models.sampling import Sampling, next_token_probabilities
from polyvision.models.transformer import Transformer

__all__ = ["complete", "generate", "next_token_probabilities", "stream"]

Prompts = Sequence[Sequence[int]]


def generate(
    model: Transformer,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    cache: bool = True,
) -> Tensor:
    """Continue prompts of one length by ``max_new_tokens`` tokens; see ``stream``.

    Args:
        model: the language model.
        prompt: (B, T) int64 with T at least 1, on the model's device.
        max_new_tokens: number n of tokens to add, 0 or more.
        temperature: as in ``Sampling``, like the next two.
        top_k: the k most likely tokens only.
        top_p: the most likely tokens of this probability only.
        seed: for repeatable samples; None for a fresh one.
        cache: keep keys and values.

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
    if prompt.ndim != 2 or prompt.dtype != torch.int64 or prompt.shape[1] == 0:
        raise PolyvisionError(
            "generate: prompt must be int64 of shape (batch, length) with at least one token, "
            f"got {prompt.dtype} of shape {tuple(prompt.shape)}"
        )
    sampling = Sampling(temperature, top_k, top_p)
    steps = stream(
        model, prompt.tolist(), max_new_tokens, sampling=sampling, seed=seed, cache=cache
    )
    new = [torch.tensor(step, device=prompt.device) for step in steps]  # n of (B,)
    return torch.cat((prompt, torch.stack(new, dim=1)), dim=1) if new else prompt


def complete(
    model: Transformer,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop: Prompts = (),
    seed: int | None = None,
    cache: bool = True,
) -> list[list[int]]:
    """Return the continuation of each prompt, without the stop sequence that ended it.

    Arguments and errors are those of ``stream``.

    Example:
        >>> from polyvision.models.transformer import TransformerShape
        >>> model = Transformer(TransformerShape(9, 8, 8, 1, 2, 12))
        >>> [len(row) for row in complete(model, [[1], [2, 3]], 20, seed=0)]
        [20, 20]
    """
    rows: list[list[int]] = [[] for _ in prompts]
    for step in stream(
        model, prompts, max_new_tokens, sampling=sampling, stop=stop, seed=seed, cache=cache
    ):
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    for row in rows:
        found = _stopped(row, stop)
        if found:
            del row[-found:]
    return rows


def stream(
    model: Transformer,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop: Prompts = (),
    seed: int | None = None,
    cache: bool = True,
) -> Iterator[list[int | None]]:
    """Yield the next token of every row, again and again.

    The model sees at most ``context`` tokens. Of a longer prompt these are the last ones; a row
    that outgrows the context goes on with the newer half. The model runs in eval mode and is
    left in the mode it was in; random numbers come from a generator of their own, so a sample taken
    during training does not change the training. Rows do not affect each other, but the numbers
    drawn for a row depend on its place in the batch.

    Args:
        model: the language model.
        prompts: a list of token numbers for each row, of any lengths of at least 1.
        max_new_tokens: number of tokens to add to each row, 0 or more.
        sampling: how to draw; None for the model's distribution itself.
        stop: a row ends with the first of these sequences that it generates.
        seed: for repeatable samples; None for a fresh one.
        cache: keep keys and values; without, everything is computed anew for each token.

    Yields:
        A token for each row, None for a row that has ended.

    Raises:
        PolyvisionError: a prompt, stop sequence or value does not fit; the text names it.
    """
    _check(model, prompts, max_new_tokens, stop)
    return _stream(model, prompts, max_new_tokens, sampling or Sampling(), stop, seed, cache)


def _stream(
    model: Transformer,
    prompts: Prompts,
    max_new_tokens: int,
    sampling: Sampling,
    stop: Prompts,
    seed: int | None,
    cache: bool,
) -> Iterator[list[int | None]]:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    reader = _Reader(model, prompts, max_new_tokens, device) if cache else None
    windows = [list(prompt[-model.shape.context :]) for prompt in prompts]
    new: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for _ in range(max_new_tokens):
        with torch.no_grad(), _eval_mode(model):
            logits = reader(windows) if reader else _anew(model, windows, device)
        drawn = sampling.draw(logits, generator).tolist()
        for row, token in enumerate(drawn):
            windows[row] = _appended(windows[row], token, model.shape.context)
            new[row].append(token)
        yield [None if end else token for end, token in zip(ended, drawn, strict=True)]
        ended = [e or _stopped(row, stop) > 0 for e, row in zip(ended, new, strict=True)]
        if all(ended):
            return


def _appended(window: list[int], token: int, context: int) -> list[int]:
    """Add a token to what the model sees; from a full context the older half goes."""
    return [*(window if len(window) < context else window[len(window) // 2 + 1 :]), token]


def _stopped(row: list[int], stop: Prompts) -> int:
    """Return the length of the stop sequence that the row ends with, or 0."""
    return max((len(s) for s in stop if row[-len(s) :] == list(s)), default=0)


def _anew(model: nn.Module, windows: Sequence[list[int]], device: torch.device) -> Tensor:
    """Return the logits (B, V) of the next token of each row, with nothing kept."""
    return torch.cat([model(torch.tensor([w], device=device))[:, -1] for w in windows])


class _Reader:
    """Reads what is new in the windows, and everything again when one of them has slid."""

    def __init__(
        self, model: Transformer, prompts: Prompts, max_new_tokens: int, device: torch.device
    ) -> None:
        self.model = model
        longest = max(map(len, prompts), default=0)
        self.capacity = min(model.shape.context, longest + max_new_tokens)
        self.device = device
        self.cache: KeyValueCache | None = None
        self.lengths: list[int] = []

    def __call__(self, windows: Sequence[list[int]]) -> Tensor:
        """Return the logits (B, V) of the next token of each row."""
        grown = [n + 1 for n in self.lengths]
        self.lengths = [len(w) for w in windows]
        if self.cache is not None and self.lengths == grown:
            last = torch.tensor([w[-1:] for w in windows], device=self.device)  # (B, 1)
            return self.model.decode(last, self.cache)
        longest = max(self.lengths)
        starts = torch.tensor([longest - n for n in self.lengths], device=self.device)
        self.cache = KeyValueCache(self.model.shape, starts, self.capacity)
        padded = [[0] * (longest - len(w)) + w for w in windows]
        return self.model.decode(torch.tensor(padded, device=self.device), self.cache)


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


def _check(model: Transformer, prompts: Prompts, max_new_tokens: int, stop: Prompts) -> None:
    for what, rows in (("prompt", prompts), ("stop sequence", stop)):
        for number, row in enumerate(rows):
            if isinstance(row, str | bytes) or len(row) == 0:
                raise PolyvisionError(
                    f"generate: {what} {number} must be a list of at least one token number, "
                    f"got {row!r}"
                )
            _check_tokens(row, what, number, model.shape.vocab_size)
    if not len(prompts):
        raise PolyvisionError("generate: prompts is empty; give at least one prompt")
    if max_new_tokens < 0:
        raise PolyvisionError(f"generate: max_new_tokens must be 0 or more, got {max_new_tokens}")


def _check_tokens(row: Sequence[Any], what: str, number: int, vocab_size: int) -> None:
    for token in row:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise PolyvisionError(
                f"generate: {what} {number} holds {token!r}; tokens of this model are the integers "
                f"from 0 to {vocab_size - 1}"
            )
