"""What benchmark tasks ask of a language model: likelihoods of texts, and continuations.

The requests and their answers are those of the LM Evaluation Harness (Gao et al. 2024,
https://doi.org/10.5281/zenodo.12608602), but on plain strings, so the package is not needed here:

- a text is split from its context where the tokens of the context alone end; spaces at the end of
  the context count as the text's;
- an empty context, or one of spaces alone, is the token before a text (``TrainedModel.first``);
- what is longer than the model's context is cut on the left; a text that is itself longer is
  predicted in several passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from polyvision.analysis.language.generate import continue_texts
from polyvision.analysis.language.perplexity import Span, spans
from polyvision.analysis.language.trained import TrainedModel
from polyvision.errors import PolyvisionError
from polyvision.models.language.generation import prompt_seeds

__all__ = ["Answerer", "CutContexts"]

# Logits held at once: 256 MiB of fp32.
_LOGITS = 2**26
# New tokens where a task does not say how many.
_NEW_TOKENS = 256

Progress = Callable[[int], None]


@dataclasses.dataclass
class CutContexts:
    """How many contexts were longer than the model's, so that their beginning was not seen.

    Attributes:
        requests: number of requests.
        cut: number of those whose context was cut.
        most: the most tokens that one of them lost.
    """

    requests: int = 0
    cut: int = 0
    most: int = 0

    def add(self, lost: int) -> None:
        """Count a request whose context lost so many tokens."""
        self.requests += 1
        self.cut += lost > 0
        self.most = max(self.most, lost)

    def warning(self, context: int) -> str | None:
        """Return one line for a person; None where nothing was cut."""
        if not self.cut:
            return None
        return (
            f"{self.cut:,} of {self.requests:,} requests do not fit the model's context of "
            f"{context:,} tokens: the beginning of each was cut, up to {self.most:,} tokens, so "
            "scores are lower than with a longer context; fewer examples (--few-shot) are shorter"
        )


class Answerer:
    """Answers requests of benchmark tasks.

    Args:
        trained: the language model.
        batch_size: texts at a time.
        progress: is called with the number of passes or texts done since the last call.

    Attributes:
        cut_contexts: counts the contexts that did not fit, over all requests so far.
    """

    def __init__(
        self, trained: TrainedModel, *, batch_size: int = 16, progress: Progress | None = None
    ) -> None:
        self.trained = trained
        self.batch_size = batch_size
        self.cut_contexts = CutContexts()
        self._progress = progress or (lambda done: None)

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return for each (context, text) the log-likelihood of the text in nats.

        Returns:
            The log-likelihood, and whether each token of the text is the most likely one.
        """
        return self._score([self._split(context, text) for context, text in requests])

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihood in nats of whole texts, of any length."""
        return [value for value, _ in self.loglikelihood([("", text) for text in texts])]

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return the continuation of each context.

        Args:
            requests: context and options: ``until`` (a text or several to end before),
                ``max_gen_toks``, and ``do_sample``, without which ``temperature``, ``top_k`` and
                ``top_p`` do not count. Contexts keep at least half of the model's context.

        Raises:
            PolyvisionError: an option is not known.
        """
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, (_, options) in enumerate(requests):
            groups.setdefault(repr(sorted(options.items())), []).append(i)
        for members in groups.values():
            keywords = _keywords(requests[members[0]][1])
            longest = self.trained.model.shape.context
            room = max(longest - keywords["max_new_tokens"], (longest + 1) // 2)
            members.sort(key=lambda i: -len(requests[i][0]))
            whole = [self.trained.tokenizer.encode(requests[i][0]) for i in members]
            for tokens in whole:
                self.cut_contexts.add(max(0, len(tokens) - room))
            seeds = prompt_seeds(0, [tokens.tolist() for tokens in whole])
            for start in range(0, len(members), self.batch_size):
                here = slice(start, start + self.batch_size)
                batch, contexts = members[here], [tokens[-room:] for tokens in whole[here]]
                made = continue_texts(self.trained, contexts, **keywords, seed=seeds[here])
                for i, each in zip(batch, made, strict=True):
                    answers[i] = each.text
                self._progress(len(batch))
        return answers

    def _split(self, context: str, text: str) -> tuple[list[int], int]:
        """Return the tokens of both, and where those of the text begin."""
        encode = self.trained.tokenizer.encode
        whole = encode(context + text).tolist()
        bare = context.rstrip()
        if bare:
            # A text that only makes the context's last token longer is that token.
            first = min(len(encode(bare)), len(whole) - bool(text))
            if first:
                return whole, first
        return [self.trained.first, *whole], 1

    def _score(self, requests: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        context = self.trained.model.shape.context
        passes = []
        for i, (tokens, first) in enumerate(requests):
            cut = list(spans(first, len(tokens), context))
            # A later pass over a long text sees what its window reaches, which is no cut.
            self.cut_contexts.add(cut[0].start if cut else 0)
            passes += [(i, span) for span in cut]
        passes.sort(key=lambda each: each[1].start - each[1].end)  # similar lengths together
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        for batch in self._batches(passes):
            rows = [requests[i][0][s.start : s.end] for i, s in batch]
            found = self._pass(rows, [span for _, span in batch])
            for (i, _), (value, best) in zip(batch, found, strict=True):
                totals[i] += value
                greedy[i] &= best
            self._progress(len(batch))
        return list(zip(totals, greedy, strict=True))

    def _batches(self, passes: Sequence[tuple[int, Span]]) -> Iterator[list[tuple[int, Span]]]:
        most = max(1, _LOGITS // self.trained.model.shape.vocab_size)
        batch: list[tuple[int, Span]] = []
        positions = 0
        for each in passes:
            wanted = each[1].end - each[1].scored
            if batch and (len(batch) == self.batch_size or positions + wanted > most):
                yield batch
                batch, positions = [], 0
            batch.append(each)
            positions += wanted
        if batch:
            yield batch

    @torch.no_grad()
    def _pass(self, rows: Sequence[list[int]], batch: Sequence[Span]) -> list[tuple[float, bool]]:
        """Return log-likelihood and greediness of what each span scores."""
        longest = max(map(len, rows)) - 1
        # Padding on the right changes nothing to its left.
        inputs = np.array([row[:-1] + [0] * (longest - len(row) + 1) for row in rows])
        counts = [span.end - span.scored for span in batch]
        columns = np.concatenate(
            [np.arange(s.scored - s.start - 1, s.end - s.start - 1) for s in batch]
        )
        targets = np.concatenate([row[len(row) - n :] for row, n in zip(rows, counts, strict=True)])
        tokens, row, column, target = (
            torch.from_numpy(each.astype(np.int64)).to(self.trained.device)
            for each in (inputs, np.repeat(np.arange(len(rows)), counts), columns, targets)
        )
        with self.trained.autocast():
            logits = self.trained.model.logits_at(tokens, row, column)  # (N, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        best = (logits.argmax(-1) == target).tolist()
        values = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0].double().tolist()
        ends = np.cumsum([0, *counts]).tolist()
        return [(sum(values[a:b]), all(best[a:b])) for a, b in pairwise(ends)]


def _keywords(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the options of a task into those of ``continue_texts``."""
    given = dict(options)
    until = given.pop("until", None) or []
    sample = given.pop("do_sample", False)
    drawing = {key: given.pop(key, None) for key in ("temperature", "top_k", "top_p")}
    keywords: dict[str, Any] = {
        "max_new_tokens": int(given.pop("max_gen_toks", _NEW_TOKENS)),
        "stops": [until] if isinstance(until, str) else [text for text in until if text],
        "temperature": 0.0,
    }
    if given:
        raise PolyvisionError(
            f"generate_until: unknown options {given}. Valid: until, max_gen_toks, do_sample, "
            f"temperature, top_k, top_p"
        )
    if sample:
        keywords |= {"temperature": 1.0}
        keywords |= {k: v for k, v in drawing.items() if v is not None}
    return keywords
