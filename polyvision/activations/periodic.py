"""Periodic activations, and those with a periodic part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polyvision.activations.base.pointwise import Pointwise, Value, learned
from polyvision.activations.registry import register_activation

__all__ = ["EUAF", "GCU", "SIREN", "TESLA", "Cos", "Fourier", "Sin", "Snake"]

_SINE = "Sitzmann et al. 2020, https://arxiv.org/abs/2006.09661"


@register_activation(
    "sin",
    kind="pointwise",
    source="Parascandolo et al. 2017, https://openreview.net/forum?id=Sks3zF9eg",
    formula="sin(x)",
)
class Sin(Pointwise):
    """Sine, sin(x), in [-1, 1]."""

    @staticmethod
    def formula(x: Tensor) -> Tensor:
        """Compute the function."""
        return torch.sin(x)


@register_activation(
    "cos",
    kind="pointwise",
    source="Rahimi and Recht 2007, "
    "https://papers.nips.cc/paper/3182-random-features-for-large-scale-kernel-machines",
    formula="cos(x)",
)
class Cos(Pointwise):
    """Cosine, cos(x), in [-1, 1]."""

    @staticmethod
    def formula(x: Tensor) -> Tensor:
        """Compute the function."""
        return torch.cos(x)


@register_activation("siren", kind="pointwise", source=_SINE, formula="sin(w0 x)")
class SIREN(Pointwise):
    """Sine of a high frequency, sin(w0 x), w0 = 30, fixed; in [-1, 1], for |x| <= 1e37 / w0.

    It is meant for weights drawn from U(-c, c), c = sqrt(6 / inputs) / w0, which it does not set.
    Sitzmann et al. 2020, https://arxiv.org/abs/2006.09661.
    """

    positive = frozenset({"w0"})

    @staticmethod
    def formula(x: Tensor, *, w0: float = 30.0) -> Tensor:
        """Compute the function."""
        return torch.sin(w0 * x)


@register_activation(
    "gcu",
    kind="pointwise",
    source="Noel et al. 2021, https://arxiv.org/abs/2108.12943",
    formula="x cos(x)",
)
class GCU(Pointwise):
    """Growing cosine unit, x cos(x), in (-inf, inf).

    Noel et al. 2021, https://arxiv.org/abs/2108.12943.
    """

    @staticmethod
    def formula(x: Tensor) -> Tensor:
        """Compute the function."""
        return x * torch.cos(x)


@register_activation(
    "euaf",
    kind="pointwise",
    source="Shen et al. 2021, https://arxiv.org/abs/2107.02397",
    formula="|x - 2 floor((x + 1) / 2)| for x >= 0, else x / (1 + |x|)",
)
class EUAF(Pointwise):
    """Elementary universal activation: a triangle wave for x >= 0, else x / (1 + |x|), in (-1, 1].

    Networks of a fixed size with it approximate any continuous function. Shen et al. 2021,
    https://arxiv.org/abs/2107.02397.
    """

    @staticmethod
    def formula(x: Tensor) -> Tensor:
        """Compute the function."""
        wave = (x - 2 * torch.floor((x + 1) / 2)).abs()
        return torch.where(x >= 0, wave, x / (1 + x.abs()))


@register_activation(
    "snake",
    kind="pointwise",
    source="Ziyin et al. 2020, https://arxiv.org/abs/2006.08195",
    formula="x + sin(a x)^2 / a",
)
class Snake(Pointwise):
    """Identity with a periodic part, x + sin(a x)^2 / a.

    a = 1, learned; fixed with ``trainable=False``. In (-inf, inf). Ziyin et al. 2020,
    https://arxiv.org/abs/2006.08195.
    """

    @staticmethod
    def formula(x: Tensor, *, a: Tensor = learned(1.0)) -> Tensor:
        """Compute the function."""
        sine = torch.sin(a * x)
        return x + sine * sine / a


@register_activation(
    "tesla",
    kind="pointwise",
    source="TESLA, AISTATS 2026, https://openreview.net/forum?id=cMQ9GE4msQ",
    formula="sum_k (a_k sin(k x) + b_k cos(k x)) / k, k = 1 ... terms",
)
class TESLA(Pointwise):
    """Learned sines and cosines, sum over k = 1 ... terms of (a_k sin(k x) + b_k cos(k x)) / k.

    terms = 2; a = (1, 0, ...), b = (0, 0, ...), learned. The source gives no initial values: these,
    sin(x), are ours. Neither value nor slope exceeds sum(|a_k| + |b_k|), which the source puts an
    l1 penalty of 0.001 on; that is left to the loss. https://openreview.net/forum?id=cMQ9GE4msQ.
    """

    counts = frozenset({"terms"})

    @staticmethod
    def initial(*, terms: int = 2) -> dict[str, Value]:
        """Return the initial values."""
        return {"a": (1.0, *[0.0] * (terms - 1)), "b": (0.0,) * terms}

    @staticmethod
    def formula(x: Tensor, *, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        """Compute the function."""
        y = torch.zeros_like(x)
        for k, (sine, cosine) in enumerate(zip(a, b, strict=True), start=1):
            y = y + (sine * torch.sin(k * x) + cosine * torch.cos(k * x)) / k
        return y


@register_activation(
    "fourier",
    kind="pointwise",
    source="Khalfaoui-Hassani and Kesselheim 2025, https://arxiv.org/abs/2502.01247",
    formula="f0 + sum_k c_k cos(g_k x - phi_k) / k!, k = 1 ... degree",
)
class Fourier(Pointwise):
    """Learned cosines, f0 + sum over k = 1 ... degree of c_k cos(g_k x - phi_k) / k!.

    degree = 3; with c = 0.66232645879: f0 = c sqrt(1 - 1 / (degree!)^2), c_k = c, g_k = k,
    phi_k = pi / 4, all learned. Bounded by |f0| + sum |c_k| / k!. Khalfaoui-Hassani and Kesselheim
    2025, https://arxiv.org/abs/2502.01247.
    """

    counts = frozenset({"degree"})

    @staticmethod
    def initial(*, degree: int = 3) -> dict[str, Value]:
        """Return the initial values."""
        c = 0.66232645879
        return {
            "f0": c * math.sqrt(1 - 1 / math.factorial(degree) ** 2),
            "c": (c,) * degree,
            "g": tuple(float(k) for k in range(1, degree + 1)),
            "phi": (math.pi / 4,) * degree,
        }

    @staticmethod
    def formula(
        x: Tensor, *, f0: Tensor, c: Sequence[Tensor], g: Sequence[Tensor], phi: Sequence[Tensor]
    ) -> Tensor:
        """Compute the function."""
        y = torch.zeros_like(x) + f0
        for k, (amplitude, frequency, phase) in enumerate(zip(c, g, phi, strict=True), start=1):
            y = y + amplitude * torch.cos(frequency * x - phase) / math.factorial(k)
        return y
