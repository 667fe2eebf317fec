"""Activations that are sums of basis functions with learned weights, and quotients of such sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from polyvision.activations.base.pointwise import Pointwise, Value
from polyvision.activations.polynomial import PolyCom
from polyvision.activations.registry import register_activation

__all__ = ["PAU", "Hermite", "Monomial", "Poly", "Tropical"]

_BASES = "Khalfaoui-Hassani and Kesselheim 2025, https://arxiv.org/abs/2502.01247"


@register_activation(
    "poly",
    kind="pointwise",
    source="Zhuo et al. 2024, https://arxiv.org/abs/2411.03884",
    formula="sum_i w_i x^i + b",
)
class Poly(PolyCom):
    """Learned polynomial, sum over i = 1 ... order of w_i x^i, plus b: PolyCom of the identity.

    w_i = 1 / order, b = 0, learned. The paper names it as the baseline whose training is unstable,
    and gives no initial values; these are those of PolyCom. With order 3 finite in fp16 for
    |x| <= 57. Zhuo et al. 2024, https://arxiv.org/abs/2411.03884.
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        order: int = 3,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(rho="identity", order=order, bias=bias, device=device, dtype=dtype)


@register_activation(
    "monomial",
    kind="pointwise",
    source="Zhuo et al. 2024, https://arxiv.org/abs/2411.03884",
    formula="x^k",
)
class Monomial(Pointwise):
    """Power of the input, x^k, k = 2, fixed.

    With k = 2 in [0, inf), finite in fp16 for |x| < 256. The term of a polynomial in Zhuo et al.
    2024, https://arxiv.org/abs/2411.03884.
    """

    counts = frozenset({"k"})

    @staticmethod
    def formula(x: Tensor, *, k: int = 2) -> Tensor:
        """Compute the function."""
        return x**k


@register_activation(
    "hermite",
    kind="pointwise",
    source=_BASES,
    formula="sum_k c_k He_k(x) / k!, k = 0 ... degree",
)
class Hermite(Pointwise):
    """Learned Hermite polynomials, sum over k = 0 ... degree of c_k He_k(x) / k!.

    degree = 3; c_0 = sqrt(1 - 1 / degree!) / sqrt(e), the others 1 / sqrt(e), learned: function and
    derivative then have the same mean square for normal inputs. In (-inf, inf), with degree 3
    finite in fp16 for |x| <= 80. Khalfaoui-Hassani and Kesselheim 2025,
    https://arxiv.org/abs/2502.01247.
    """

    counts = frozenset({"degree"})

    @staticmethod
    def initial(*, degree: int = 3) -> dict[str, Value]:
        """Return the initial values."""
        first = math.sqrt((1 - 1 / math.factorial(degree)) / math.e)
        return {"c": (first, *[1 / math.sqrt(math.e)] * degree)}

    @staticmethod
    def formula(x: Tensor, *, c: Sequence[Tensor]) -> Tensor:
        """Compute the function; h_k = He_k / k! has h_{k+1} = (x h_k - h_{k-1}) / (k + 1)."""
        before, h = torch.zeros_like(x), torch.ones_like(x)
        y = c[0] * h
        for k in range(1, len(c)):
            before, h = h, (x * h - before) / k
            y = y + c[k] * h
        return y


@register_activation(
    "tropical",
    kind="pointwise",
    source=_BASES,
    formula="sqrt(2) / degree max_k (k x + c_k), k = 0 ... degree",
)
class Tropical(Pointwise):
    """Learned convex piecewise linear function, sqrt(2) / n times the maximum of k x + c_k.

    k = 0 ... n, degree n = 3; c_k = 1, learned. In [sqrt(2) c_0 / n, inf), finite in fp16 for
    x <= 46000. Khalfaoui-Hassani and Kesselheim 2025, https://arxiv.org/abs/2502.01247.
    """

    counts = frozenset({"degree"})

    @staticmethod
    def initial(*, degree: int = 3) -> dict[str, Value]:
        """Return the initial values."""
        return {"c": (1.0,) * (degree + 1)}

    @staticmethod
    def formula(x: Tensor, *, c: Sequence[Tensor]) -> Tensor:
        """Compute the function."""
        y = torch.zeros_like(x) + c[0]
        for k in range(1, len(c)):
            y = torch.maximum(y, k * x + c[k])
        return y * (math.sqrt(2) / (len(c) - 1))


# Molina et al.: coefficients fitted on [-3, 3], of x^0 ... x^5 above and of x ... x^4 below; for
# form C below of x^0 ... x^4. By form and function.
_PADE: dict[str, dict[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "A": {
        "leaky_relu": (
            (
                0.029792778657264946,
                0.6183735264987601,
                2.323309062531321,
                3.051936237265109,
                1.4854203263828845,
                0.2510244961111299,
            ),
            (-1.1419548357285474, 4.393159974992486, 0.8714712309957245, 0.34719662339598834),
        ),
        "gelu": (
            (
                -0.0012423594497499122,
                0.5080497063245629,
                0.41586363182937475,
                0.13022718688035761,
                0.024355900098993424,
                0.00290283948155535,
            ),
            (-0.06675015696494944, 0.17927646217001553, 0.03746682605496631, 1.65616108532761e-10),
        ),
        "swish": (
            (
                3.054879741161051e-07,
                0.5000007853744493,
                0.24999783422824703,
                0.05326628273219478,
                0.005803034571292244,
                0.0002751961022402342,
            ),
            (
                -4.111554955950634e-06,
                0.10652899335007572,
                -1.2690007399796238e-06,
                0.0005502331264140556,
            ),
        ),
    },
    "B": {
        "leaky_relu": (
            (
                0.03355815733452378,
                0.5050059186781659,
                1.6534697310952233,
                2.0100501552600014,
                0.9319195586484518,
                0.15242646398275836,
            ),
            (4.812831860534153e-05, 3.9802479055059194, 1.5837587665720e-05, 0.30183382839661377),
        ),
        "gelu": (
            (
                -0.0004221071456647063,
                0.49999955516606254,
                0.40270535451115536,
                0.07366976895222031,
                -0.012954788054484537,
                -0.0037414002583076983,
            ),
            (
                4.9585381197087913e-05,
                0.1472977407631199,
                1.1645825701440633e-05,
                -0.007483871514842074,
            ),
        ),
        "swish": (
            (
                3.2597006782059475e-07,
                0.500000007624051,
                0.2500169540800127,
                0.05327519598927768,
                0.005804580590860159,
                0.00027529600705133663,
            ),
            (
                3.917294261258692e-05,
                0.1065308384054887,
                3.7991514117509955e-06,
                0.0005503052126186067,
            ),
        ),
    },
}


@register_activation(
    "pau",
    kind="pointwise",
    source="Molina et al. 2019, https://arxiv.org/abs/1907.06732",
    formula="sum_j a_j x^j / (1 + sum_k |b_k x^k|), j = 0 ... 5, k = 1 ... 4",
)
class PAU(Pointwise):
    """Pade activation unit: a learned quotient of polynomials of degree 5 and 4.

    Form A divides by 1 + sum_k |b_k x^k|, form B by 1 + |sum_k b_k x^k|. a and b start as the
    authors' fits of leaky ReLU (slope 0.01), GELU or Swish on [-3, 3], with errors up to 0.030,
    0.0041 and 1.2e-6 (A), 0.034, 0.00095 and 1.2e-6 (B), and are learned. In (-inf, inf), for
    |x| <= 1e7. Molina et al. 2019, https://arxiv.org/abs/1907.06732.
    """

    @staticmethod
    def initial(
        *,
        init: Literal["leaky_relu", "gelu", "swish"] = "leaky_relu",
        form: Literal["A", "B"] = "A",
    ) -> dict[str, Value]:
        """Return the initial values."""
        a, b = _PADE[form][init]
        return {"a": a, "b": b}

    @staticmethod
    def formula(
        x: Tensor, *, a: Sequence[Tensor], b: Sequence[Tensor], form: Literal["A", "B"] = "A"
    ) -> Tensor:
        """Compute the function."""
        power, numerator, below = x, a[0] + a[1] * x, torch.zeros_like(x)
        for k, coefficient in enumerate(b, start=1):
            term = coefficient * power
            below = below + (term.abs() if form == "A" else term)
            power = power * x
            numerator = numerator + a[k + 1] * power
        return numerator / (1 + below.abs())
