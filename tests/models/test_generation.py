"""Sampling against closed forms, and what it must leave untouched."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polyvision.errors import PolyvisionError
from polyvision.models.generation import complete, generate, stream
from polyvision.models.sampling import Sampling, next_token_probabilities
from polyvision.models.transformer import MoEShape, Transformer, TransformerShape

SHAPE = TransformerShape(vocab_size=23, context=8, width=16, layers=1, heads=2, ffn_hidden=24)


class Fixed(nn.Module):
    """A language model that always expects the same distribution."""

    shape = SimpleNamespace(context=4, vocab_size=4)

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(probabilities).log()

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] <= self.shape.context
        return self.logits.expand(*tokens.shape, -1)

    def decode(self, tokens: Tensor, cache: Any) -> Tensor:
        return self.logits.expand(tokens.shape[0], -1)


def prompt(*size: int) -> Tensor:
    return torch.randint(SHAPE.vocab_size, size)


def following(model: Transformer, row: list[int], context: int, count: int) -> list[int]:
    """Greedy tokens of one row by plain forward passes; from a full context the older half goes."""
    seen, new = row[-context:], []
    for _ in range(count):
        new.append(int(model(torch.tensor([seen]))[0, -1].argmax()))
        seen = [*(seen if len(seen) < context else seen[context // 2 + 1 :]), new[-1]]
    return new


def sharp(**changes: Any) -> Transformer:
    """A float64 model whose most likely tokens differ, so that rounding decides nothing."""
    model = Transformer(dataclasses.replace(SHAPE, layers=2, **changes)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) + (parameter.ndim == 1))
    return model


MODELS = {
    "plain": {},
    "grouped": {"heads": 4, "kv_heads": 2},
    "moe": {"qk_norm": True, "moe": MoEShape(4, 2)},
    "odd": {"context": 7},
    "one": {"context": 1},
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_plain_forward_passes_also_beyond_the_context(name: str) -> None:
    model, context = sharp(**MODELS[name]), MODELS[name].get("context", 8)
    rows = [prompt(n).tolist() for n in (3, 1, 5, 20)]  # of different lengths, one too long
    expected = [following(model, row, context, 15) for row in rows]
    for cache in (True, False):
        found = complete(model, rows, 15, sampling=Sampling(temperature=0), cache=cache)
        assert found == expected


@pytest.mark.parametrize("name", MODELS)
def test_samples_with_the_cache_equal_those_without(name: str) -> None:
    model, start = sharp(**MODELS[name]), prompt(3, 4)
    options = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 2}
    with_cache, without = (generate(model, start, 14, **options, cache=c) for c in (True, False))
    assert torch.equal(with_cache, without)
    assert torch.equal(with_cache[:, :4], start)
    assert torch.equal(generate(model, start, 0), start)


def test_each_token_is_read_once() -> None:
    """A prompt of 3 and single tokens; at the context of 8 the newer half is read again."""
    model, read = sharp(), []
    decode = model.decode
    model.decode = lambda tokens, cache: read.append(tokens.shape[1]) or decode(tokens, cache)
    generate(model, prompt(2, 3), 12, seed=0)
    assert read == [3, 1, 1, 1, 1, 1, 4, 1, 1, 1, 1, 4]


def test_a_row_does_not_depend_on_the_others() -> None:
    model, rows = sharp(), [prompt(n).tolist() for n in (2, 6, 11)]
    greedy = Sampling(temperature=0)
    alone = [complete(model, [row], 10, sampling=greedy)[0] for row in rows]
    assert complete(model, rows, 10, sampling=greedy) == alone


def test_stop_sequences() -> None:
    model, rows = sharp(), [prompt(3).tolist(), prompt(4).tolist()]
    greedy = Sampling(temperature=0)
    whole = complete(model, rows, 12, sampling=greedy)
    stop = [whole[0][4:6], whole[1][7:8]]
    ends = [min(_end(row, s) for s in stop) for row in whole]
    found = complete(model, rows, 12, sampling=greedy, stop=stop)
    for row, text, (end, size) in zip(found, whole, ends, strict=True):
        assert row == text[: end - size]
    steps = list(stream(model, rows, 12, sampling=greedy, stop=stop))
    assert len(steps) == min(12, max(end for end, _ in ends))
    for row, (end, _) in enumerate(ends):  # the stop sequence itself is streamed
        assert [step[row] for step in steps] == whole[row][:end] + [None] * (len(steps) - end)


def _end(row: list[int], stop: list[int]) -> tuple[int, int]:
    """Where a sequence first ends in a row, and its size."""
    places = (i for i in range(1, len(row) + 1) if row[max(0, i - len(stop)) : i] == stop)
    return next(places, len(row) + len(stop)), len(stop)


def test_a_stream_can_be_left() -> None:
    model = sharp().train()
    steps = stream(model, [[1, 2]], 1000, seed=1)
    first = [next(steps)[0] for _ in range(5)]
    assert model.training  # also between two tokens
    steps.close()
    assert complete(model, [[1, 2]], 5, seed=1) == [first]


def test_seeds() -> None:
    model, start = Transformer(SHAPE), prompt(4, 5)
    first, again, other = (generate(model, start, 16, seed=s) for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    fresh = [generate(model, start, 16) for _ in range(2)]
    assert not torch.equal(*fresh)


@pytest.mark.parametrize("seed", [None, 5])
def test_the_random_state_of_training_is_untouched(seed: int | None) -> None:
    model, start = Fixed([0.5, 0.5]), prompt(2, 3) % 2
    before = torch.get_rng_state()
    generate(model, start, 4, seed=seed)
    assert torch.equal(torch.get_rng_state(), before)


class Failing(nn.Module):
    """Two parts in different modes; notes the modes it is called in, then fails."""

    shape = SHAPE

    def __init__(self) -> None:
        super().__init__()
        self.active, self.frozen = nn.Dropout(), nn.Dropout().eval()

    def forward(self, tokens: Tensor) -> Tensor:
        raise RuntimeError(f"training: {[m.training for m in self.modules()]}")


def test_modes_and_gradients_are_restored_even_after_an_error() -> None:
    model = Failing()
    with pytest.raises(RuntimeError, match=r"training: \[False, False, False\]"):
        generate(model, prompt(1, 2), 1, cache=False)
    assert [m.training for m in model.modules()] == [True, True, False]
    assert torch.is_grad_enabled()


P = [0.1, 0.4, 0.2, 0.3]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, None, None, P),
        (0.5, None, None, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),  # squares
        (1.0, 1, None, [0, 1, 0, 0]),
        (1.0, 2, None, [0, 4 / 7, 0, 3 / 7]),
        (1.0, 9, None, P),
        (1.0, None, 1.0, P),
        (1.0, None, 0.95, P),
        (1.0, None, 0.85, [0, 4 / 9, 2 / 9, 3 / 9]),
        (1.0, None, 0.5, [0, 4 / 7, 0, 3 / 7]),
        (1.0, None, 1e-9, [0, 1, 0, 0]),
        (0.5, None, 0.8, [0, 16 / 25, 0, 9 / 25]),  # top_p sees the tempered distribution
        (1.0, 2, 0.55, [0, 1, 0, 0]),  # and what top_k left: 4/7 > 0.55
        (1e-40, None, None, [0, 1, 0, 0]),
        (1e30, None, None, [0.25] * 4),
    ],
)
def test_distribution(
    temperature: float, top_k: int | None, top_p: float | None, expected: list[float]
) -> None:
    logits = torch.tensor([P, P[::-1]]).log() + torch.tensor([[50.0], [-70.0]])
    got = next_token_probabilities(logits, temperature, top_k, top_p)
    torch.testing.assert_close(got, torch.tensor([expected, expected[::-1]], dtype=got.dtype))


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40),
    top_p=st.floats(0.01, 0.999),
)
@settings(deadline=None)
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits: list[float], top_p: float) -> None:
    row = torch.tensor([logits], dtype=torch.float64)
    p, kept = row.softmax(-1)[0], next_token_probabilities(row, 1.0, None, top_p)[0]
    inside = p[kept > 0]
    assert inside.sum() >= top_p - 1e-12
    assert inside.sum() - inside.min() < top_p + 1e-12
    assert inside.min() >= p[kept == 0].max() if (kept == 0).any() else True
    torch.testing.assert_close(kept[kept > 0], inside / inside.sum())


def test_half_precision_logits_are_treated_in_fp32() -> None:
    logits = torch.randn(2, 1000).bfloat16()
    got = next_token_probabilities(logits, 1.0, None, None)
    torch.testing.assert_close(got, logits.double().softmax(-1).float())


def test_samples_follow_the_distribution() -> None:
    """Pearson's chi-square of 20,000 draws; 3 degrees of freedom exceed 16.3 once in 1,000."""
    n = 20_000
    out = generate(Fixed(P), torch.zeros(n, 1, dtype=torch.int64), 1, seed=0)[:, 1]
    expected = n * torch.tensor(P)
    counts = torch.bincount(out, minlength=4)
    assert ((counts - expected) ** 2 / expected).sum() < 16.3
    few = generate(Fixed(P), torch.zeros(n, 1, dtype=torch.int64), 1, seed=0, top_k=2)[:, 1]
    assert set(few.tolist()) == {1, 3}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prompt": torch.zeros(2, 0, dtype=torch.int64)}, r"at least one token, got .*\(2, 0\)"),
        ({"prompt": torch.zeros(3, dtype=torch.int64)}, r"shape \(batch, length\)"),
        ({"prompt": torch.zeros(1, 3)}, r"must be int64 .* got torch.float32"),
        ({"max_new_tokens": -1}, "max_new_tokens must be 0 or more, got -1"),
        ({"temperature": -0.5}, "temperature must be 0 .* got -0.5"),
        ({"temperature": math.nan}, "got nan"),
        ({"temperature": math.inf}, "got inf"),
        ({"top_k": 0}, "top_k must be 1 or more, or None for all, got 0"),
        ({"top_p": 0.0}, "top_p must be greater than 0 and at most 1"),
        ({"top_p": 1.5}, "got 1.5"),
    ],
)
def test_errors(arguments: dict[str, Any], text: str) -> None:
    valid = {"prompt": torch.zeros(1, 3, dtype=torch.int64), "max_new_tokens": 2}
    with pytest.raises(PolyvisionError, match=text):
        generate(Fixed(P), **(valid | arguments))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": [[1], []]}, r"prompt 1 must be a list of at least one token number, got \[\]"),
        ({"prompts": ["hello"]}, "prompt 0 must be a list of at least one token number"),
        ({"prompts": [[1, 4]]}, "prompt 0 holds 4; tokens of this model are .* from 0 to 3"),
        ({"prompts": [[-1]]}, "prompt 0 holds -1"),
        ({"prompts": [[1.5]]}, "prompt 0 holds 1.5"),
        ({"stop": [[]]}, "stop sequence 0 must be a list"),
        ({"stop": [[9]]}, "stop sequence 0 holds 9"),
        ({"max_new_tokens": -2}, "max_new_tokens must be 0 or more"),
    ],
)
def test_errors_come_before_the_first_token(arguments: dict[str, Any], text: str) -> None:
    valid = {"prompts": [[1], [2, 3]], "max_new_tokens": 2}
    with pytest.raises(PolyvisionError, match=text):
        stream(Fixed(P), **(valid | arguments))
