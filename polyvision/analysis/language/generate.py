"""``polyvision generate``: continue prompts with a trained language model."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from polyvision.analysis.language.trained import (
    TrainedModel,
    add_model_arguments,
    open_language_model,
)
from polyvision.data.text.tokenizers import Tokenizer
from polyvision.data.text.utf8 import decode_text
from polyvision.errors import PolyvisionError
from polyvision.models.language.generation import Sampling, prompt_seeds, stream

__all__ = ["Continuation", "add_arguments", "continue_texts", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_model_arguments(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; may be given several times (default: one empty text)",
    )
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="UTF-8 file with a text to continue, - for standard input; may be given several times",
    )
    parser.add_argument("--max-new-tokens", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="divides the logits; 0 takes the most likely token (default: %(default)s)",
    )
    parser.add_argument("--top-k", type=int, help="draw from the k most likely tokens")
    parser.add_argument(
        "--top-p",
        type=float,
        help="draw from the most likely tokens that together have this probability",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="for repeatable samples: each prompt has the same alone and among others "
        "(default: a fresh one)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=16, help="prompts at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--stream", action="store_true", help="print the text while it comes, prompt by prompt"
    )


def run(arguments: argparse.Namespace) -> str:
    """Generate, say to standard error how fast, and return the texts, each after its prompt.

    Raises:
        PolyvisionError: a value is out of range, a file cannot be read, or there is no such model.
    """
    _check(arguments)
    prompts = [*arguments.prompt, *(_read(name) for name in arguments.prompt_file)] or [""]
    trained = open_language_model(arguments)
    live = bool(arguments.stream)
    size = 1 if live else arguments.batch_size
    made: list[Continuation] = []
    encoded = [trained.tokenizer.encode(text) for text in prompts]
    seeds = None
    if arguments.seed is not None:
        seeds = prompt_seeds(arguments.seed, [tokens.tolist() for tokens in encoded])
    started = time.perf_counter()
    for start in range(0, len(prompts), size):
        if live:
            print(_heading(start, len(prompts)) + prompts[start], end="", flush=True)
        made += continue_texts(
            trained,
            encoded[start : start + size],
            arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            stops=arguments.stop,
            seed=None if seeds is None else seeds[start : start + size],
            show=_print if live else None,
        )
        if live:
            print(flush=True)
    seconds = time.perf_counter() - started
    tokens = sum(each.tokens for each in made)
    print(
        f"{tokens:,} tokens in {seconds:.2f} s ({tokens / seconds:,.0f} tokens/s), "
        f"{len(prompts)} prompts, {trained.source}, step {trained.step:,}",
        file=sys.stderr,
    )
    if live:
        return ""
    texts = (p + each.text for p, each in zip(prompts, made, strict=True))
    return "\n".join(_heading(i, len(prompts)) + text for i, text in enumerate(texts))


class Continuation:
    """Turn the tokens of one continuation into text, and find its end.

    A character whose bytes come in several tokens is shown when it is whole; text that may turn
    out to begin one of ``stops`` is held back until it is known.

    Args:
        tokenizer: what the tokens are of. Its end token ends the text.
        stops: the text ends before the first of them.

    Attributes:
        text: what is shown so far.
        tokens: number of tokens so far, the one that ended it included.
        ended: why it ended: ``end token`` or ``stop text``; None while it goes on.

    Example:
        >>> from polyvision.data.text.tokenizers import ByteTokenizer
        >>> said = Continuation(ByteTokenizer(), stops=["es"])
        >>> [said.add(byte) for byte in b"yes!"]
        ['y', '', '', '']
        >>> said.text, said.tokens, said.ended
        ('y', 3, 'stop text')
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        assert all(stops)
        self.text, self.tokens = "", 0
        self.ended: str | None = None
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def add(self, token: int) -> str:
        """Take the next token and return the text that can be shown now."""
        if self.ended:
            return ""
        self.tokens += 1
        if token == self._tokenizer.end:
            self.ended = "end token"
            return self.close()
        self._held += self._decoder.decode(self._tokenizer.vocabulary[token])
        return self._show()

    def close(self) -> str:
        """Return what was held back; no token comes after."""
        self._held += self._decoder.decode(b"", final=True)
        return self._show(final=True)

    def _show(self, *, final: bool = False) -> str:
        found = [i for s in self._stops if (i := self._held.find(s)) >= 0]
        if found:
            self.ended = "stop text"
            shown, self._held = self._held[: min(found)], ""
        else:
            keep = 0 if final else self._open_stop()
            cut = len(self._held) - keep
            shown, self._held = self._held[:cut], self._held[cut:]
        self.text += shown
        return shown

    def _open_stop(self) -> int:
        """Return the length of the longest end of the held text that begins a stop."""
        lengths = [
            n
            for stop in self._stops
            for n in range(1, min(len(stop), len(self._held) + 1))
            if self._held.endswith(stop[:n])
        ]
        return max(lengths, default=0)


def continue_texts(
    trained: TrainedModel,
    prompts: Sequence[np.ndarray],
    max_new_tokens: int,
    *,
    stops: Sequence[str] = (),
    show: Callable[[str], None] | None = None,
    **sampling: Unpack[Sampling],
) -> list[Continuation]:
    """Continue several texts at once; each ends at ``stops``, at an end token, or at the limit.

    Args:
        trained: the language model.
        prompts: the tokens of one or more texts, as ``Tokenizer.encode`` gives them; an empty one
            begins at the start of a document.
        max_new_tokens: the limit.
        stops: texts to end before.
        show: is called with the text of the only prompt's continuation while it comes.
        **sampling: see ``polyvision.models.language.generation.Sampling``.

    Raises:
        PolyvisionError: a value is out of range.
    """
    assert show is None or len(prompts) == 1
    rows = [tokens.tolist() or [trained.first] for tokens in prompts]
    longest = max(map(len, rows))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    starts = torch.tensor([longest - len(row) for row in rows])
    made = [Continuation(trained.tokenizer, stops) for _ in rows]
    tokens = stream(
        trained.model,
        padded.to(trained.device),
        max_new_tokens,
        starts=starts.to(trained.device),
        **sampling,
    )
    with trained.autocast(), closing(tokens):
        for new in tokens:
            texts = [each.add(token) for each, token in zip(made, new.tolist(), strict=True)]
            if show:
                show(texts[0])
            if all(each.ended for each in made):
                break
    rest = [each.close() for each in made]
    if show:
        show(rest[0])
    return made


def _print(text: str) -> None:
    print(text, end="", flush=True)


def _heading(number: int, count: int) -> str:
    return f"--- {number + 1} of {count} ---\n" if count > 1 else ""


def _read(name: str) -> str:
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
    except OSError as error:
        raise PolyvisionError(f"--prompt-file {name}: {error.strerror}") from None
    return decode_text(content, f"--prompt-file {name}")


def _check(arguments: argparse.Namespace) -> None:
    if arguments.batch_size < 1:
        raise PolyvisionError(f"--batch-size must be at least 1, got {arguments.batch_size}")
    if arguments.seed is not None and not 0 <= arguments.seed < 2**63:
        raise PolyvisionError(f"--seed must be a number from 0 to 2^63 - 1, got {arguments.seed}")
    for name in ("prompt", "stop"):
        setattr(arguments, name, [_utf8(text, f"--{name}") for text in getattr(arguments, name)])
    if "" in arguments.stop:
        raise PolyvisionError("--stop '' would end every text at once: give some text")


def _utf8(text: str, place: str) -> str:
    """Read an argument of the command line as UTF-8, also where the locale is ASCII."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise PolyvisionError(f"{place} {text!a} is not UTF-8") from None
