"""Sampling against closed forms, and what it must leave untouched."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polyvision.errors import PolyvisionError
from polyvision.models.language.generation import (
    generate,
    next_token_probabilities,
    prompt_seeds,
    stream,
)
from polyvision.models.language.shape import MoEShape
from polyvision.models.language.transformer import Transformer, TransformerShape

SHAPE = TransformerShape(vocab_size=23, context=8, width=16, layers=1, heads=2, ffn_hidden=24)


class Fixed(nn.Module):
    """A language model that always expects the same distribution."""

    shape = SimpleNamespace(context=4)

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(probabilities).log()

    def new_cache(self, starts: Tensor, capacity: int) -> SimpleNamespace:
        assert capacity <= self.shape.context
        return SimpleNamespace(length=0, capacity=capacity)

    def decode(self, tokens: Tensor, cache: SimpleNamespace) -> Tensor:
        cache.length += tokens.shape[1]
        assert cache.length <= cache.capacity
        return self.logits.expand(len(tokens), -1)


def prompt(*size: int) -> Tensor:
    return torch.randint(SHAPE.vocab_size, size)


def test_greedy_equals_a_loop_of_argmax_over_the_last_context() -> None:
    model, start = Transformer(SHAPE), prompt(3, 5)
    expected = start
    for _ in range(9):
        following = model(expected[:, -8:])[:, -1].argmax(-1)
        expected = torch.cat((expected, following[:, None]), dim=1)
    assert torch.equal(generate(model, start, 9, temperature=0), expected)
    assert torch.equal(generate(model, start, 0), start)


MODELS = {
    "dense": {"kv_heads": 2, "rope_theta": 50.0},
    "experts": {"qk_norm": True, "moe": MoEShape(experts=4, top_k=2)},
}


@pytest.mark.parametrize("kind", MODELS)
def test_cached_logits_equal_those_of_the_whole_window(kind: str) -> None:
    """Rows of different lengths, from the first token to beyond the context, in float64."""
    shape = TransformerShape(
        vocab_size=23, context=8, width=16, layers=2, heads=4, ffn_hidden=24, **MODELS[kind]
    )
    model = Transformer(shape).double()
    calls: list[Tensor] = []
    decode = model.decode
    model.decode = lambda tokens, cache: calls.append(decode(tokens, cache)) or calls[-1]
    padded, starts = prompt(3, 5), torch.tensor([0, 4, 2])
    new = torch.stack(list(stream(model, padded, 9, starts=starts, temperature=0)), dim=1)
    for row, start in enumerate(starts.tolist()):
        tokens = padded[row, start:]
        for step, logits in enumerate(calls):
            expected = model(tokens[None, -8:])[0, -1]
            torch.testing.assert_close(logits[row], expected, rtol=1e-10, atol=1e-10)
            assert new[row, step] == expected.argmax()
            tokens = torch.cat((tokens, new[row, step : step + 1]))


def test_each_token_is_computed_once_within_the_context() -> None:
    model, lengths = Transformer(SHAPE), []
    decode = model.decode
    model.decode = lambda tokens, cache: lengths.append(tokens.shape[1]) or decode(tokens, cache)
    list(stream(model, prompt(2, 3), 8))
    assert lengths == [3, 1, 1, 1, 1, 1, 8, 8]


def test_a_closed_stream_restores_the_mode() -> None:
    model = Transformer(SHAPE)
    running = stream(model, prompt(1, 2), 5)
    next(running)
    assert not model.training
    running.close()
    assert model.training


def test_bf16_autocast_keeps_a_bf16_cache() -> None:
    model = Transformer(SHAPE)
    with torch.autocast("cpu", torch.bfloat16):
        assert generate(model, prompt(2, 3), 4, seed=0).shape == (2, 7)
        cache = model.new_cache(torch.zeros(2, dtype=torch.int64), 4)
        model.decode(prompt(2, 3), cache)
    assert cache._room[0].dtype == torch.bfloat16


def test_a_prompt_longer_than_the_context_is_kept_and_cropped() -> None:
    model, start = Transformer(SHAPE), prompt(2, 20)
    out = generate(model, start, 3, temperature=0)
    assert torch.equal(out[:, :20], start)
    assert torch.equal(out[:, 20:], generate(model, start[:, -8:], 3, temperature=0)[:, 8:])


def test_seeds() -> None:
    model, start = Transformer(SHAPE), prompt(4, 5)
    first, again, other = (generate(model, start, 16, seed=s) for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    fresh = [generate(model, start, 16) for _ in range(2)]
    assert not torch.equal(*fresh)


def test_a_row_has_the_same_samples_alone_and_among_others() -> None:
    model = Fixed([0.25] * 4)
    rows = torch.tensor([[0, 0, 1], [0, 2, 3], [1, 1, 1], [0, 2, 3]])
    starts = torch.tensor([2, 1, 0, 1])
    together = torch.stack(list(stream(model, rows, 30, starts=starts, seed=5)), dim=1)
    for row in range(3):
        alone = generate(model, rows[row : row + 1, starts[row] :], 30, seed=5)[0, -30:]
        assert torch.equal(together[row], alone)
    assert not torch.equal(together[3], together[1])  # a second sample of the same prompt
    own = generate(model, rows, 30, seed=[7, 8, 7, 9])
    assert torch.equal(own[0, 3:], own[2, 3:])
    assert not torch.equal(own[0, 3:], own[1, 3:])


def test_seeds_of_prompts() -> None:
    seeds = prompt_seeds(3, [[1], [2], [1], [1], []])
    assert [seeds[i] for i in (0, 1, 4)] == [3, 3, 3]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert prompt_seeds(3, [[9], [1], [1]])[2] == seeds[2]


@pytest.mark.parametrize("seed", [None, 5])
def test_the_random_state_of_training_is_untouched(seed: int | None) -> None:
    model, start = Fixed([0.5, 0.5]), prompt(2, 3)
    before = torch.get_rng_state()
    generate(model, start, 4, seed=seed)
    assert torch.equal(torch.get_rng_state(), before)


class Failing(nn.Module):
    """Two parts in different modes; notes the modes it is called in, then fails."""

    shape = SHAPE

    def __init__(self) -> None:
        super().__init__()
        self.active, self.frozen = nn.Dropout(), nn.Dropout().eval()

    def new_cache(self, starts: Tensor, capacity: int) -> None:
        raise RuntimeError(f"training: {[m.training for m in self.modules()]}")


def test_modes_and_gradients_are_restored_even_after_an_error() -> None:
    model = Failing()
    with pytest.raises(RuntimeError, match=r"training: \[False, False, False\]"):
        generate(model, prompt(1, 2), 1)
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
        (1e-320, None, None, [0, 1, 0, 0]),  # 0 in fp32
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


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_one_line(value: float, temperature: float) -> None:
    model = Fixed(P)
    model.logits[2] = value
    with pytest.raises(PolyvisionError, match=r"logits are inf or nan; try fp32"):
        generate(model, torch.zeros(1, 3, dtype=torch.int64), 2, temperature=temperature)


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
