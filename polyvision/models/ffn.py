"""Feed-forward network of a transformer, with any registered activation at equal parameters.

Ungated, ``down(act(up(x)))``, or gated, ``down(act(gate(x), up(x)))``. A gated one has three
matrices, so its hidden size is 2/3 of the ungated one's.

Source: Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (equation 4 and Tables 5, 6 and 10);
Shazeer 2020, https://arxiv.org/abs/2002.05202 (gated form and the factor 2/3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from polyvision.activations import activation_info, create_activation
from polyvision.errors import PolyvisionError, did_you_mean

__all__ = ["FeedForward", "gated_hidden"]


def gated_hidden(hidden: int) -> int:
    """Return the hidden size of a gated network with the parameters of an ungated one.

    Exactly 2/3 of ``hidden`` when that is an integer; otherwise the nearest multiple of 8 (which
    matrix units like) if it is within 1 % of 2/3, else the nearest integer.

    Example:
        >>> gated_hidden(3072), gated_hidden(4096), gated_hidden(128)
        (2048, 2728, 85)
    """
    exact = 2 * hidden / 3
    aligned = 8 * round(exact / 8)
    return aligned if hidden % 3 and abs(aligned - exact) <= 0.01 * exact else round(exact)


class FeedForward(nn.Module):
    """Two or three matrices without bias around an activation.

    Args:
        width: size of the input and of the output.
        hidden: size of the hidden layer of an ungated network; a gated one takes
            ``gated_hidden(hidden)``.
        activation: a registered name; its kind decides between the two forms. A normalising
            activation normalises over the hidden layer.
        options: keywords of the activation's constructor.

    Shape:
        (..., width) -> (..., width).

    Raises:
        PolyvisionError: unknown activation or option, or a value that the activation refuses.

    Example:
        >>> FeedForward(8, 24, "swiglu").down.in_features
        16
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: str,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        gated = activation_info(activation).kind == "gated"
        if gated:
            hidden = gated_hidden(hidden)
        self.gate = nn.Linear(width, hidden, bias=False) if gated else None
        self.up = nn.Linear(width, hidden, bias=False)
        self.activation = _hidden_activation(activation, options or {})
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last dimension of ``x``."""
        if self.gate is None:
            h = self.activation(self.up(x))  # (..., hidden)
        else:
            h = self.activation(self.gate(x), self.up(x))  # (..., hidden)
        y: Tensor = self.down(h)  # (..., width)
        return y

    def init_matrices(self, std: float) -> None:
        """Draw the matrices from a normal distribution; the activation keeps its own values."""
        for linear in (self.gate, self.up, self.down):
            if linear is not None:
                nn.init.normal_(linear.weight, std=std)


def _hidden_activation(name: str, options: Mapping[str, Any]) -> nn.Module:
    """Build the activation for (..., hidden) tensors."""
    info = activation_info(name)
    valid = sorted(info.options.__dataclass_fields__)
    for key in options:
        if key not in valid:
            has = f"its options: {', '.join(valid)}" if valid else "it has none"
            raise PolyvisionError(
                f"activation {name!r} has no option {key!r};{did_you_mean(key, valid)} {has}."
            )
    site = {"dim": -1} if info.kind == "normalising" else {}
    return create_activation(name, **site, **options)
