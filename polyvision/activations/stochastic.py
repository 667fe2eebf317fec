"""Activations that draw random numbers in training, and are functions of their input afterwards.

The numbers come from torch's generator of the device, so a seed repeats them.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision.activations.base.coefficients import is_traced, step_of_a_graph
from polyvision.activations.base.shared import number, wide
from polyvision.activations.registry import register_activation
from polyvision.errors import PolyvisionError, unknown
from polyvision.recompute import recompute

__all__ = ["StochA"]

_POSITIVE = ("identity", "silu")

torch.fx.wrap("_stocha")


@register_activation(
    "rrelu",
    kind="stochastic",
    source="Xu et al. 2015, https://arxiv.org/abs/1505.00853",
    formula="x for x >= 0, else a x, a ~ U(lower, upper); (lower + upper) / 2 afterwards",
)
def _rrelu(inplace: bool = False, *, lower: float = 1 / 8, upper: float = 1 / 3) -> nn.RReLU:
    """Randomised leaky rectifier: ``torch.nn.RReLU``, never in place.

    In training each negative element gets a slope drawn evenly between ``lower`` and ``upper``,
    otherwise their mean. No parameters. Not larger than its input while the slopes are at most 1.
    torch trains it in fp16 on GPUs only, and gives a contiguous output. Xu et al. 2015,
    https://arxiv.org/abs/1505.00853; the bounds are torch's.
    """
    module = nn.RReLU()
    low, high = number(module, "lower", lower), number(module, "upper", upper)
    if low > high:
        raise PolyvisionError(
            f"RReLU: lower must be at most upper, got lower={lower!r} and upper={upper!r}"
        )
    return nn.RReLU(low, high)


@register_activation(
    "stocha",
    kind="stochastic",
    source="Lomeli et al. 2025, https://arxiv.org/abs/2509.22358",
    formula="x for x >= 0, else silu(x) with probability p and 0 otherwise; relu(x) at the end",
)
class StochA(nn.Module):
    r"""Stochastic activation: for negative inputs SiLU or ReLU, drawn for each element.

    .. math::
        y = x \text{ for } x \ge 0, \quad
        y = \mathrm{silu}(x) \text{ with probability } p, \text{ else } 0, \text{ for } x < 0

    In eval mode it is ReLU, whose zeros save work. The schedule is the paper's: the last part of
    the training (``relu_share``) uses ReLU too, so that the network gets used to it. Trainers of
    this project tell the module how far the training is; in a loop of your own call
    ``set_progress``. Until it is called, training draws.

    No parameters. Not larger than its input, so finite in fp16 and bf16 for every input. fp16 and
    bf16 are computed in fp32 and rounded once. For the backward pass it keeps its input and a byte
    for each element.

    Args:
        inplace: accepted and ignored.
        p: probability of SiLU for a negative input, 0 to 1. A summary of the paper has 0.7 as its
            best value.
        relu_share: share of the training, at its end, that uses ReLU, 0 to 1; 0.05 in the same
            summary.
        positive: what positive inputs become; the caption of the paper's first figure leaves open
            whether they pass (``identity``, as ReLU has it) or take SiLU too (``silu``).
        sample_in_eval: draw in eval mode as well, for more diverse generated texts.

    Lomeli et al. 2025, https://arxiv.org/abs/2509.22358 (version 3, figure 1; an earlier version
    may mean 1 - p by p).

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> StochA().eval()(torch.tensor([-1.0, 2.0])).tolist()
        [0.0, 2.0]
    """

    def __init__(
        self,
        inplace: bool = False,
        *,
        p: float = 0.7,
        relu_share: float = 0.05,
        positive: Literal["identity", "silu"] = "identity",
        sample_in_eval: bool = False,
    ) -> None:
        super().__init__()
        for key, value in {"p": p, "relu_share": relu_share}.items():
            if not 0 <= number(self, key, value) <= 1:
                raise PolyvisionError(f"StochA: {key} must be from 0 to 1, got {value!r}")
        if positive not in _POSITIVE:
            raise unknown("positive of StochA", positive, _POSITIVE)
        self.p, self.relu_share = p, relu_share
        self.positive, self.sample_in_eval = positive, sample_in_eval
        self._last_part = False

    def set_progress(self, done: float) -> None:
        """Tell the share of the training that is done, 0 to 1."""
        self._last_part = done >= 1 - self.relu_share and self.relu_share > 0

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to ``x``."""
        step: Tensor | None = step_of_a_graph(self, x) if is_traced(x) else None
        if step is not None:  # one that obeys the mode, whatever it is at the time of the trace
            return step
        draws = not self._last_part if self.training else self.sample_in_eval
        return _stocha(x, self.p, self.positive == "silu") if draws else F.relu(x)

    def extra_repr(self) -> str:
        """Show the settings that the function depends on."""
        shown = f"p={self.p}, relu_share={self.relu_share}, positive={self.positive!r}"
        return shown + (", sample_in_eval=True" if self.sample_in_eval else "")


def _stocha(x: Tensor, p: float, silu: bool) -> Tensor:
    passes = torch.rand_like(x, dtype=torch.float32) < p

    def formula(x: Tensor, passes: Tensor) -> Tensor:
        v = wide(x)
        smooth = F.silu(v)
        below = torch.where(passes, smooth, 0.0)
        return torch.where(v < 0, below, smooth if silu else v).to(x.dtype)

    return recompute(formula, x, passes)
