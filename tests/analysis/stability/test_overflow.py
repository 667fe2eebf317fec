"""Overflow maps: what they measure, and what they show."""

from __future__ import annotations

import pytest
import torch

from polyvision.analysis.stability.overflow import (
    CONTENDERS,
    DTYPES,
    EXPONENTS,
    FORMS,
    QUANTITIES,
    Cell,
    measure,
    overflow_maps,
)

WEIGHTS = {0: [], 2: [0.5, -0.25], 3: [0.5, -0.25, 0.125], 4: [0.5, -0.25, 0.125, 1.5]}

FORMULAS = {
    "polynorm": lambda x, w: sum(
        w[i] * x ** (i + 1) / ((x ** (2 * i + 2)).mean(-1, keepdim=True) + 1e-6).sqrt()
        for i in range(3)
    ),
    "relu2": lambda x, w: torch.where(x > 0, x * x, 0.0),
    "gelu": lambda x, w: x * torch.special.ndtr(x),
    "swiglu": lambda x, w: x * x / (1 + torch.exp(-x)),
} | {
    f"polyrelu-{r}": lambda x, w: sum(
        w[i] * torch.where(x > 0, x, 0.0) ** (i + 1) for i in range(len(w))
    )
    for r in (2, 3, 4)
}


@pytest.fixture(scope="module")
def cells() -> dict[tuple[str, str, str, str, int], Cell]:
    made = overflow_maps(range(-24, 16, 3))
    return {(c.contender, c.form, c.dtype, c.quantity, c.exponent): c for c in made}


@pytest.mark.parametrize("name", CONTENDERS)
@pytest.mark.parametrize("form", FORMS)
def test_both_forms_are_the_formula(name: str, form: str) -> None:
    contender = CONTENDERS[name]
    x = torch.randn(5, 16, dtype=torch.float64)
    weight = torch.tensor(WEIGHTS[contender.order], dtype=torch.float64)
    y = (contender.plain if form == "plain" else contender.ours)(x, weight)
    torch.testing.assert_close(y, FORMULAS[name](x, weight), rtol=1e-12, atol=1e-12)


def test_plain_form_stays_in_the_dtype() -> None:
    x = torch.full((1, 4), 6.4, dtype=torch.float16)
    function, weight = CONTENDERS["polynorm"].form("plain", torch.float16)
    assert weight.dtype == torch.float16
    y = function(x, weight)
    # The mean of x^6 is infinite, its rsqrt 0: the cubic term is silently lost.
    torch.testing.assert_close(y.double(), torch.full((1, 4), 2 / 3).double(), rtol=0, atol=1e-3)


def test_maps_cover_what_they_promise() -> None:
    assert (min(EXPONENTS), max(EXPONENTS)) == (-24, 15)
    made = overflow_maps([0])
    keys = {(c.contender, c.form, c.dtype, c.quantity) for c in made}
    gradients = {name: 3 if c.order else 2 for name, c in CONTENDERS.items()}
    assert len(made) == len(keys) == sum(gradients.values()) * len(FORMS) * len(DTYPES)


def test_shares_count_what_overflows() -> None:
    # Uniform on [-512, 512): x^2 is 65520 or more for |x| >= 255.97, of which half is positive.
    cell = measure(CONTENDERS["relu2"], "ours", "fp16", 9)[0]
    assert cell.non_finite == cell.unavoidable == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_our_poly_norm_never_overflows_and_errs_by_rounding_only(dtype: str, cells) -> None:
    bound = {"fp16": 3e-4, "bf16": 2.5e-3, "fp32": 1e-6}[dtype]
    for (name, form, kind, quantity, exponent), cell in cells.items():
        if (name, form, kind) == ("polynorm", "ours", dtype):
            assert cell.non_finite == 0
            # At the ends results are subnormal in fp16: outputs of about 1000/3 times the input,
            # and dx, which falls as 1/x. Rounding alone then exceeds half a unit in the last place.
            subnormal = dtype == "fp16" and not -20 <= exponent < 13
            limit = 1e-6 if quantity == "dweight" else 2e-3 if subnormal else bound
            assert cell.error is not None
            assert cell.error < limit, (quantity, exponent)


def test_plain_poly_norm_breaks_on_both_sides_in_fp16(cells) -> None:
    def cell(quantity: str, exponent: int) -> Cell:
        return cells["polynorm", "plain", "fp16", quantity, exponent]

    assert cell("output", 0).error < 1e-3
    assert cell("output", 3).non_finite == 0
    assert cell("output", 3).error > 0.2  # wrong without a sign: the cubic term is gone
    assert cell("output", 6).non_finite > 0
    assert cell("dx", -9).non_finite == 1
    assert cell("dx", 6).non_finite == 1
    assert all(c.unavoidable == 0 for k, c in cells.items() if k[0] == "polynorm")


@pytest.mark.parametrize("order", [2, 3, 4])
def test_poly_relu_overflows_in_any_arithmetic(order: int, cells) -> None:
    first = {2: 9, 3: 6, 4: 6}[order]  # beyond 361, 57.8 and 22.4, on this grid of 2^(3n)
    for exponent in range(-24, 16, 3):
        cell = cells[f"polyrelu-{order}", "ours", "fp16", "output", exponent]
        assert (cell.unavoidable > 0) == (exponent >= first)
        assert cell.non_finite == cell.unavoidable  # ours adds nothing to it
    # Coefficients are fp32 in training, and so are their gradients: finite.
    assert all(
        cells[f"polyrelu-{order}", "ours", "fp16", "dweight", e].non_finite == 0
        for e in range(-24, 16, 3)
    )


def test_range_of_bf16_and_fp32_holds_everything(cells) -> None:
    for (_, _, dtype, _, _), cell in cells.items():
        if dtype != "fp16":
            assert cell.non_finite == 0


@pytest.mark.parametrize("form", FORMS)
def test_gelu_never_overflows(form: str, cells) -> None:
    for quantity in QUANTITIES[:2]:
        for exponent in range(-24, 16, 3):
            assert cells["gelu", form, "fp16", quantity, exponent].non_finite == 0
