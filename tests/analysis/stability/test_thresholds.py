"""Overflow points: the closed forms agree with a search over every fp16 number."""

from __future__ import annotations

import pytest
import torch

from polyvision import functional
from polyvision.analysis.stability.thresholds import LIMIT, THRESHOLDS, Threshold, neighbours

BY_NAME = {threshold.what: threshold for threshold in THRESHOLDS}


def test_limit_is_the_smallest_number_that_rounds_to_infinity() -> None:
    below = torch.nextafter(torch.tensor(LIMIT), torch.tensor(0.0))
    assert below.half().item() == torch.finfo(torch.float16).max == 65504
    assert torch.tensor(LIMIT).half().isinf()


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda t: t.what)
def test_overflow_begins_between_the_neighbours_of_the_closed_form(threshold: Threshold) -> None:
    safe, broken = neighbours(threshold)
    low, high = sorted((safe, broken))
    assert torch.nextafter(torch.tensor(low).half(), torch.tensor(high).half()).item() == high
    assert low <= threshold.exact <= high
    assert threshold.falling == (broken < safe)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("x^3", 40.3),
        ("mean of x^6 in plain PolyNorm", 6.35),
        ("our PolyReLU of order 3, output", 57.8),
        ("our PolyReLU of order 2, output", 361.5),
        ("our PolyReLU of order 4, output", 22.37),
        ("plain PolyNorm, dx of small rows", 0.2916),
        ("ReLU^2, output", 255.97),
    ],
)
def test_closed_forms_give_the_known_numbers(what: str, expected: float) -> None:
    assert BY_NAME[what].exact == pytest.approx(expected, rel=2e-3)


def test_poly_relu_solves_its_cubic() -> None:
    x = BY_NAME["our PolyReLU of order 3, output"].exact
    assert (x + x**2 + x**3) / 3 == pytest.approx(LIMIT, rel=1e-12)


def test_our_poly_norm_has_no_threshold() -> None:
    # Every finite fp16 number as a constant row: sign(x)^i * 1/3 each, so 1 for large x.
    numbers = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16)
    x = numbers[:, None].expand(-1, 4).clone().requires_grad_()
    weight = torch.full((3,), 1 / 3, requires_grad=True)
    y = functional.poly_norm(x, weight)
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert y.isfinite().all()
    assert dx.isfinite().all()
    assert dweight.isfinite().all()
    assert y[-1].tolist() == [1.0] * 4
