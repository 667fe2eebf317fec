"""Encoding pieces of text in several processes, in order and within bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

import numpy as np

from polyvision.data.text.shards import token_dtype
from polyvision.data.text.sources import Piece
from polyvision.data.text.tokenizers import Tokenizer, tokenizer_from_json
from polyvision.errors import PolyvisionError

__all__ = ["Encoded", "Item", "encode_in_order"]

# The number of a file, the part of the corpus (train or val), and a piece of the file.
Item = tuple[int, str, Piece]
# Token ids, (n,), and the bytes of text that they stand for.
Encoded = tuple[np.ndarray, int]

_BATCH = 1 << 19  # characters that are handed out together
_tokenizer: Tokenizer | None = None  # of a worker process


@contextmanager
def encode_in_order(
    tokenizer: Tokenizer, items: Iterable[Item], workers: int
) -> Iterator[Iterator[tuple[Item, Encoded]]]:
    """Give an iterator over the items, in their order, with the tokens of each.

    Args:
        tokenizer: encodes.
        items: read as they are needed, at most about ``2 * workers`` batches ahead.
        workers: processes; 1 encodes in this one.

    Raises:
        PolyvisionError: a process died, or could not be started.
    """
    if workers == 1:
        yield ((item, _encode(tokenizer, item[-1].text)) for item in items)
        return
    methods = multiprocessing.get_all_start_methods()
    # A plain fork would copy a process that may have threads; the server starts clean, and once.
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(workers, context, _start, (tokenizer.to_json(),))
    try:
        yield _through(pool, items, 2 * workers)
    except BrokenProcessPool:
        raise PolyvisionError(
            "a worker process was killed, perhaps for want of memory: run the same command again "
            "with fewer --workers, it goes on where it stopped"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _through(
    pool: ProcessPoolExecutor, items: Iterable[Item], ahead: int
) -> Iterator[tuple[Item, Encoded]]:
    waiting: deque[tuple[list[Item], Future[list[Encoded]]]] = deque()
    for batch in _batches(items):
        try:
            future = pool.submit(_work, [piece.text for *_, piece in batch])
        except OSError as error:
            raise PolyvisionError(
                f"a worker process cannot be started ({error.strerror}): run the same command "
                "again with fewer --workers, it goes on where it stopped"
            ) from None
        waiting.append((batch, future))
        if len(waiting) > ahead:
            batch, future = waiting.popleft()
            yield from zip(batch, future.result(), strict=True)
    for batch, future in waiting:
        yield from zip(batch, future.result(), strict=True)


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item[-1].text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _start(definition: str) -> None:
    """Prepare a worker process: one thread, its own tokenizer; Ctrl-C is for the main process."""
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = tokenizer_from_json(definition)


def _work(texts: list[str]) -> list[Encoded]:
    assert _tokenizer is not None
    return [_encode(_tokenizer, text) for text in texts]


def _encode(tokenizer: Tokenizer, text: str) -> Encoded:
    tokens = tokenizer.encode(text)
    text_bytes = int(tokenizer.byte_lengths[tokens].sum())
    return tokens.astype(token_dtype(tokenizer.vocab_size)), text_bytes
