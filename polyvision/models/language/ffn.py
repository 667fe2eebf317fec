"""Feed-forward network of a transformer, with any registered activation at equal parameters.

Ungated, ``down(act(up(x)))``, or gated, ``down(act(gate(x), up(x)))``. A gated one has three
matrices, so its hidden size is 2/3 of the ungated one's. Of the hidden layer only what enters the
activation is kept for the backward pass, which computes the activation again (``ffn_down``).

Source: Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (equation 4 and Tables 5, 6 and 10);
Shazeer 2020, https://arxiv.org/abs/2002.05202 (gated form and the factor 2/3).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyvision.activations import activation_info, create_activation
from polyvision.errors import PolyvisionError, did_you_mean
from polyvision.functional import ffn_down
from polyvision.models.language.shape import Draw

__all__ = ["FeedForward", "gated_hidden", "hidden_activation"]


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
        kind = activation_info(activation).kind
        gated = kind == "gated"
        if gated:
            hidden = gated_hidden(hidden)
        self._repeatable = kind != "stochastic"
        self.gate = nn.Linear(width, hidden, bias=False) if gated else None
        self.up = nn.Linear(width, hidden, bias=False)
        self.activation = hidden_activation(activation, options or {}, hidden)
        # Logits by which a token weighs the functions of a mixture.
        logits = getattr(self.activation, "mixing", 0)
        self.mixing = nn.Linear(width, logits, bias=False) if logits else None
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last dimension of ``x``."""
        made_of_x = (self.gate, self.up, self.mixing)
        h = tuple(m(x) for m in made_of_x if m is not None)  # (..., hidden), (..., logits)
        if self._repeatable and torch.is_grad_enabled():
            return ffn_down(h, self.down.weight, self.activation)  # (..., width)
        y: Tensor = self.down(self.activation(*h))
        return y

    def init_matrices(self, draw: Draw) -> None:
        """Draw the matrices; the activation keeps its own values."""
        for linear in (self.gate, self.up):
            if linear is not None:
                draw(linear.weight, False)
        if self.mixing is not None:
            nn.init.zeros_(self.mixing.weight)
        draw(self.down.weight, True)


def hidden_activation(
    name: str, options: Mapping[str, Any], hidden: int, groups: int | None = None
) -> nn.Module:
    """Build a registered activation for (..., hidden) tensors.

    Args:
        name: its name.
        options: keywords of its constructor.
        hidden: the number of features.
        groups: a set of coefficients for each of so many groups of rows; None for one set.

    Raises:
        PolyvisionError: unknown name or option, or a token would depend on later ones.
    """
    info = activation_info(name)
    valid = sorted(info.options.__dataclass_fields__)
    for key in options:
        if key not in valid:
            has = f"its options: {', '.join(valid)}" if valid else "it has none"
            raise PolyvisionError(
                f"activation {name!r} has no option {key!r};{did_you_mean(key, valid)} {has}."
            )
    site: dict[str, int] = {"dim": -1} if info.needs_dim(options) else {}
    if "features" in inspect.signature(info.factory).parameters:
        site["features"] = hidden
    if groups is not None:
        site["groups"] = groups
    module = create_activation(name, **site, **options)
    if getattr(module, "mixes_positions", False):
        chosen = ", ".join(f"act.{key}={value}" for key, value in options.items())
        raise PolyvisionError(
            f"act={name} with {chosen} takes statistics over all tokens, so that a token would "
            f"depend on later ones; a language model needs those of each token alone"
        )
    return module
