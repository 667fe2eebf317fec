"""Activations that normalise over a feature dimension, besides PolyNorm.

Each takes ``dim``, the feature dimension: -1 for (..., features), 1 for NCHW. The swap and the
language model set it. Only the input is kept for the backward pass. fp16 and bf16 are computed in
fp32 and rounded once; large values are scaled by powers of two, so no square overflows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from polyvision.activations.base.coefficients import integer
from polyvision.activations.base.shared import Device, Dtype, number, parameter, wide
from polyvision.activations.registry import register_activation
from polyvision.errors import PolyvisionError, unknown
from polyvision.kernels.reference import row_scale
from polyvision.recompute import recompute

__all__ = ["ASH", "NormSiLU", "RadialBounding"]

_OVER = ("features", "sample")

for _name in ("_ash", "_norm_silu", "_radial_bounding"):
    torch.fx.wrap(_name)


class _OverDim(nn.Module):
    """An activation over the dimension ``dim``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        if not integer(dim):
            raise PolyvisionError(f"{type(self).__name__}: dim must be an integer, got {dim!r}")
        self.dim = dim


@register_activation(
    "normsilu",
    kind="normalising",
    source="Song et al. 2026, https://arxiv.org/abs/2605.10933",
    formula="silu(g c / rms(c)), c = x - mean(x)",
)
class NormSiLU(_OverDim):
    r"""NormSiLU: SiLU of the normalised input.

    .. math::
        y = \mathrm{silu}\Big(g\, c / \sqrt{\mathrm{mean}_{dim}(c^2) + \epsilon}\Big), \quad
        c = x - \mathrm{mean}_{dim}(x)

    Within [-0.28, |g| sqrt(n)] for rows of n, so finite in fp16 for every input. In the paper a row
    is the hidden layer of all experts for the mean and that of one expert for the RMS; here both
    are over ``dim``.

    Args:
        inplace: accepted and ignored.
        subtract_mean: False for the paper's variant without the mean, c = x.
        rms: False for its variant without the RMS and the gain, silu(c).
        eps: added to the mean of squares.
        dim: the feature dimension.
        features: the number of features, for a gain g each, as in the paper; the feed-forward
            network of the language model gives it. None for one gain for all, where the place does
            not tell the number (networks for images).
        device: where the gain lives.
        dtype: dtype of the gain.

    Shape:
        Input and output: any shape with ``dim``. Parameter: ``gain`` (features,) or (1,), each 1.

    Song et al. 2026 (DECO), https://arxiv.org/abs/2605.10933 and its code.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> NormSiLU(subtract_mean=False)(torch.tensor([2.0, -2.0])).round(decimals=2).tolist()
        [0.7300000190734863, -0.27000001072883606]
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        subtract_mean: bool = True,
        rms: bool = True,
        eps: float = 1e-6,
        dim: int = -1,
        features: int | None = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(dim)
        if features is not None and (not integer(features) or features < 1):
            raise PolyvisionError(
                f"NormSiLU: features must be a positive integer or None, got {features!r}"
            )
        self.subtract_mean, self.rms = subtract_mean, rms
        self.eps = number(self, "eps", eps, above=0)
        self.gain = parameter(self, [1.0] * (features or 1), device, dtype) if rms else None

    def reset_parameters(self) -> None:
        """Set the gain to 1."""
        if self.gain is not None:
            nn.init.ones_(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        return _norm_silu(x, self.gain, self.dim, self.eps, self.subtract_mean)

    def extra_repr(self) -> str:
        """Show the settings that the function depends on."""
        shown = f"eps={self.eps}, dim={self.dim}"
        shown += "" if self.subtract_mean else ", subtract_mean=False"
        return shown + ("" if self.rms else ", rms=False")


def _norm_silu(x: Tensor, gain: Tensor | None, dim: int, eps: float, subtract_mean: bool) -> Tensor:
    def formula(x: Tensor, gain: Tensor | None) -> Tensor:
        v = wide(x)
        scale = row_scale(v, dim)
        c = v / scale
        if subtract_mean:
            c = c - c.mean(dim, keepdim=True)
        if gain is None:
            return nn.functional.silu(c * scale).to(x.dtype)
        square = c.square().mean(dim, keepdim=True) + eps / scale**2
        c = c * square.clamp_min(torch.finfo(v.dtype).tiny).rsqrt()
        return nn.functional.silu(_along(gain, v, dim) * c).to(x.dtype)

    return recompute(formula, x, gain)


def _along(values: Tensor, v: Tensor, dim: int) -> Tensor:
    """Lay one value for each feature along ``dim``; a single one serves all."""
    if len(values) not in (1, v.shape[dim]):
        raise PolyvisionError(
            f"NormSiLU: the gain has {len(values)} values, and dim {dim} of x, of shape "
            f"{tuple(v.shape)}, has {v.shape[dim]} features"
        )
    return values.to(v.dtype).view(-1, *[1] * (v.ndim - 1 - dim % v.ndim))


@register_activation(
    "ash",
    kind="normalising",
    source="Lee et al. 2022, https://arxiv.org/abs/2210.11672",
    formula="x sigmoid(2 alpha (x - mean(x) - z std(x)))",
)
class ASH(_OverDim):
    r"""Adaptive SwisH: a Swish whose threshold follows mean and standard deviation of the input.

    .. math:: y = x\, \sigma\big(2 \alpha (x - \mu - z\, \sqrt{var + \epsilon})\big)

    What is above the threshold passes: for normally distributed inputs the top 2.5 % with z = 1.96.
    Smaller than its input, so finite in fp16 and bf16 for every input. The variance is that of the
    population. eps is ours: without it a constant row has no gradient.

    Args:
        inplace: accepted and ignored.
        alpha: initial value of the steepness.
        z: initial value of the threshold, in standard deviations. The paper gives neither initial
            value; these are those of a layer in the authors' code.
        over: ``features`` takes mean and variance over ``dim`` at each position, our choice, which
            serves texts too. ``sample`` takes them over all dimensions but the first, as the
            authors' code does for images: for NCHW over channels, height and width. A language
            model refuses it, since a token would depend on later ones.
        eps: added to the variance.
        dim: the feature dimension.
        device: where the parameters live.
        dtype: dtype of the parameters.

    Shape:
        Input and output: any shape with ``dim``. Parameters: ``alpha`` and ``z``, (1,) each.

    Lee et al. 2022, https://arxiv.org/abs/2210.11672 and the authors' code.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> ASH(z=1.0)(torch.tensor([0.0, 8.0])).round(decimals=3).tolist()
        [0.0, 4.0]
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        alpha: float = 1.0,
        z: float = 0.0,
        over: Literal["features", "sample"] = "features",
        eps: float = 1e-6,
        dim: int = -1,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(dim)
        if over not in _OVER:
            raise unknown("over of ASH", over, _OVER)
        self.over = over
        self.eps = number(self, "eps", eps, above=0)
        self._initial = number(self, "alpha", alpha), number(self, "z", z)
        self.alpha = parameter(self, [alpha], device, dtype)
        self.z = parameter(self, [z], device, dtype)

    @property
    def mixes_positions(self) -> bool:
        """Whether the output at one position depends on others."""
        return self.over == "sample"

    def reset_parameters(self) -> None:
        """Set the parameters to their initial values."""
        for values, initial in zip((self.alpha, self.z), self._initial, strict=True):
            nn.init.constant_(values, initial)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        return _ash(x, self.alpha, self.z, self.dim, self.eps, self.mixes_positions)

    def extra_repr(self) -> str:
        """Show the settings that the function depends on."""
        alpha, z = self._initial
        return f"alpha={alpha}, z={z}, over={self.over!r}, eps={self.eps}, dim={self.dim}"


def _ash(x: Tensor, alpha: Tensor, z: Tensor, dim: int, eps: float, whole: bool) -> Tensor:
    dims = tuple(range(min(1, x.ndim - 1), x.ndim)) if whole else (dim,)

    def formula(x: Tensor, alpha: Tensor, z: Tensor) -> Tensor:
        v = wide(x)
        scale = row_scale(v, dims)
        u = v / scale
        mean = u.mean(dims, keepdim=True)
        variance = (u - mean).square().mean(dims, keepdim=True) + eps / scale**2
        deviation = variance.clamp_min(torch.finfo(v.dtype).tiny).sqrt()
        threshold = scale * (mean + z.to(v.dtype) * deviation)
        return (v * torch.sigmoid(2 * alpha.to(v.dtype) * (v - threshold))).to(x.dtype)

    return recompute(formula, x, alpha, z)


@register_activation(
    "radial_bounding",
    kind="normalising",
    source="Goo et al. 2026, https://arxiv.org/abs/2606.15669",
    formula="x / max(1, |x|_2) in groups of features",
)
class RadialBounding(_OverDim):
    r"""Radial bounding: groups of features longer than 1 are shortened to 1.

    .. math:: y = x / \max(1, \lVert x \rVert_2) \text{ for each group of } size \text{ features}

    No parameters. Every value is within [-1, 1], so finite in fp16 and bf16 for every input; no
    difference of two inputs grows (1-Lipschitz). Groups are neighbours along ``dim``; where their
    number does not divide, the last group is shorter, which the paper leaves open.

    Args:
        inplace: accepted and ignored.
        size: features of a group, 2 in the paper.
        dim: the feature dimension.

    Goo et al. 2026, https://arxiv.org/abs/2606.15669.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> RadialBounding()(torch.tensor([3.0, 4.0, 0.5, 0.0])).round(decimals=2).tolist()
        [0.6000000238418579, 0.800000011920929, 0.5, 0.0]
    """

    def __init__(self, inplace: bool = False, *, size: int = 2, dim: int = -1) -> None:
        super().__init__(dim)
        if not integer(size) or size < 1:
            raise PolyvisionError(f"RadialBounding: size must be a positive integer, got {size!r}")
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        return _radial_bounding(x, self.size, self.dim)

    def extra_repr(self) -> str:
        """Show the settings that the function depends on."""
        return f"size={self.size}, dim={self.dim}"


def _radial_bounding(x: Tensor, size: int, dim: int) -> Tensor:
    def formula(x: Tensor) -> Tensor:
        v = wide(x).movedim(dim, -1)
        features = v.shape[-1]
        padded = nn.functional.pad(v, (0, -features % size))
        groups = padded.view(*v.shape[:-1], padded.shape[-1] // size, size)
        scale = row_scale(groups, -1)
        square = (groups / scale).square().sum(-1, keepdim=True)
        factor = torch.maximum(square, scale**-2).rsqrt() / scale
        factor = factor.expand(groups.shape).flatten(-2)[..., :features]
        return (wide(x) * factor.movedim(-1, dim)).to(x.dtype)

    return recompute(formula, x)
