"""What a network is run on when its activations are looked for: example inputs, and other sizes.

Only shapes and dtypes matter. A second size tells the feature dimension from the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from polyvision.errors import PolyvisionError

__all__ = ["Inputs", "example_inputs", "image_inputs", "other_sizes"]

_Resize = Callable[[torch.Size], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one forward call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, given: Tensor | Sequence[Any] | Mapping[str, Any]) -> Inputs:
        """Read one tensor, a sequence of arguments or a mapping of keywords."""
        if isinstance(given, Mapping):
            return cls(kwargs=dict(given))
        return cls((given,)) if isinstance(given, Tensor) else cls(tuple(given))

    def describe(self) -> str:
        """Return the shapes of all tensors, for messages."""
        leaves = tree_leaves((self.args, dict(self.kwargs)))
        return ", ".join(str(tuple(t.shape)) for t in leaves if isinstance(t, Tensor)) or "none"


def image_inputs(model: nn.Module, size: int, channels: int | None = None) -> Inputs:
    """Return a batch of two square images in the dtype of ``model``."""
    parameter = next(model.parameters(), torch.empty(0))
    if channels is None:
        channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
    shape = (2, channels, size, size)
    return Inputs((torch.empty(shape, dtype=parameter.dtype, device="meta"),))


def example_inputs(model: nn.Module) -> Inputs:
    """Guess the inputs of a timm, transformers or torchvision model.

    timm models carry their input size, transformers models ``dummy_inputs`` or an image size; for
    anything else with a 2-d convolution, images of its ``image_size`` or of 224 pixels are
    taken (299 for Inception v3, whose auxiliary head needs them).

    Raises:
        PolyvisionError: none of that applies.
    """
    timm_config = getattr(model, "pretrained_cfg", None)
    if timm_config:
        channels, size, _ = timm_config["input_size"]
        return image_inputs(model, size, getattr(model, "in_chans", None) or channels)
    config: Any = getattr(model, "config", None)
    if getattr(model, "main_input_name", None) == "pixel_values":
        size = config.image_size
        size = size if isinstance(size, int) else size[0]
        images = image_inputs(model, size, config.num_channels)
        return Inputs(kwargs={"pixel_values": images.args[0]})
    if getattr(model, "main_input_name", None) == "input_ids":
        return Inputs(kwargs={"input_ids": torch.zeros(2, 16, dtype=torch.int64, device="meta")})
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        usual = 299 if type(model).__name__ == "Inception3" else 224
        size = getattr(model, "image_size", usual)
        return image_inputs(model, size if isinstance(size, int) else usual)
    raise PolyvisionError(
        f"{type(model).__name__} does not tell what it takes; pass inputs=<a tensor, a tuple of "
        "arguments or a dictionary of keywords> (only shapes and dtypes matter)"
    )


def other_sizes(inputs: Inputs) -> list[Inputs]:
    """Return the same inputs at other sizes; the network may refuse any of them.

    Images get twice the height and width. Integer sequences get half the length. Three-dimensional
    tensors get twice the one or the other length, since either can be the features.
    """
    ndims = {
        (t.ndim, t.is_floating_point())
        for t in tree_leaves((inputs.args, dict(inputs.kwargs)))
        if isinstance(t, Tensor)
    }
    resizes: list[_Resize] = []
    if any(ndim >= 4 for ndim, _ in ndims):
        resizes = [lambda s: (*s[:2], *(2 * n for n in s[2:])) if len(s) >= 4 else s]
    elif (3, True) in ndims:
        resizes = [
            lambda s: (*s[:1], 2 * s[1], *s[2:]) if len(s) >= 2 else s,
            lambda s: (*s[:2], 2 * s[2]) if len(s) == 3 else s,
        ]
    elif (2, False) in ndims:
        resizes = [lambda s: (s[0], max(1, s[1] // 2)) if len(s) == 2 else s]
    return [_resized(inputs, resize) for resize in resizes]


def _resized(inputs: Inputs, resize: _Resize) -> Inputs:
    args, kwargs = tree_map_only(
        Tensor,
        lambda t: torch.empty(tuple(resize(t.shape)), dtype=t.dtype, device="meta"),
        (inputs.args, dict(inputs.kwargs)),
    )
    return Inputs(args, kwargs)
