"""What a network is run on when its activations are looked for: example inputs, and other sizes.

Only shapes and dtypes matter. A second size tells the feature dimension from the others.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from polyvision.errors import PolyvisionError

__all__ = ["Inputs", "example_inputs", "image_inputs", "other_sizes"]

_Resize = Callable[[torch.Size], Sequence[int]]
# How arguments of transformers are written in messages; sizes are those of most checkpoints.
_TOKENS = "torch.zeros(2, 16, dtype=torch.int64)"
_EXAMPLES = {
    "input_ids": _TOKENS,
    "decoder_input_ids": _TOKENS,
    "pixel_values": "torch.empty(2, 3, 224, 224)",
    "input_features": "torch.empty(2, 80, 3000)",  # of a log-mel spectrogram
    "input_values": "torch.empty(2, 16000)",  # of a waveform
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one forward call; ``guessed`` if nobody said what the network takes."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    guessed: bool = False

    @classmethod
    def of(cls, given: Tensor | Sequence[Any] | Mapping[str, Any]) -> Inputs:
        """Read one tensor, a sequence of arguments or a mapping of keywords."""
        if isinstance(given, Mapping):
            return cls(kwargs=dict(given))
        return cls((given,)) if isinstance(given, Tensor) else cls(tuple(given))

    def advice(self, model: nn.Module) -> str:
        """Return what to do where ``model`` refuses these inputs."""
        if self.guessed:
            example = _example(model, self.kwargs)
            return f"They are a guess: pass {example} (--image-size for swap-report)."
        return "Check that the network runs on such inputs, or choose another size."

    def describe(self) -> str:
        """Return the shapes of all tensors, for messages."""
        leaves = tree_leaves((self.args, dict(self.kwargs)))
        return ", ".join(str(tuple(t.shape)) for t in leaves if isinstance(t, Tensor)) or "none"


def image_inputs(
    model: nn.Module, size: int | Sequence[int], channels: int | None = None
) -> Inputs:
    """Return a batch of two images, square or of (height, width), in the dtype of ``model``."""
    if channels is None:
        channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
    height, width = (size, size) if isinstance(size, int) else size
    return Inputs((_images(model, channels, height, width),))


def _images(model: nn.Module, *shape: int) -> Tensor:
    parameter = next(model.parameters(), torch.empty(0))
    return torch.empty((2, *shape), dtype=parameter.dtype, device="meta")


def example_inputs(model: nn.Module) -> Inputs:
    """Guess the inputs of a timm, transformers or torchvision model.

    timm models carry their input size, transformers models a configuration; for anything else with
    a 2-d convolution, images of its ``image_size`` or of 224 pixels are taken (299 for Inception
    v3, whose auxiliary head needs them), with a 3-d one, videos of 16 frames.

    Raises:
        PolyvisionError: none of that applies.
    """
    guess = _of_timm(model) or _of_transformers(model) or _of_images(model)
    if guess is None:
        raise PolyvisionError(
            f"{type(model).__name__} does not tell what it takes; pass {_example(model)}, or a "
            "tensor or a tuple of arguments (only shapes and dtypes matter)"
        )
    return dataclasses.replace(guess, guessed=True)


def _example(model: nn.Module, guess: Mapping[str, Any] | None = None) -> str:
    """Return for a message how the arguments that ``model`` needs can be given."""
    written = _EXAMPLES | {
        name: f"torch.empty{tuple(tensor.shape)}"
        for name, tensor in (guess or {}).items()
        if tensor.is_floating_point()
    }
    takes = inspect.signature(model.forward).parameters.values()
    usual = (getattr(model, "main_input_name", None), "decoder_input_ids")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        p.name
        for p in takes
        if p.name in usual or (p.default is p.empty and p.kind not in variable)
    ]
    given = (f"{name!r}: {written.get(name, 'torch.empty(...)')}" for name in needed)
    return (
        f"for example inputs={{{', '.join(given)}}}"
        if needed
        else "inputs=<a dictionary of keywords>"
    )


def _of_timm(model: nn.Module) -> Inputs | None:
    config = getattr(model, "pretrained_cfg", None)
    if not config:
        return None
    channels, *size = config["input_size"]
    return image_inputs(model, size, getattr(model, "in_chans", None) or channels)


def _of_images(model: nn.Module) -> Inputs | None:
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)), None)
    if first is None:
        return None
    if isinstance(first, nn.Conv3d):
        return Inputs((_images(model, first.in_channels, 16, 224, 224),))
    usual = 299 if type(model).__name__ == "Inception3" else 224
    size = getattr(model, "image_size", usual)
    return image_inputs(model, size if isinstance(size, int) else usual)


def _of_transformers(model: nn.Module) -> Inputs | None:
    """Return what a model of transformers names its main input, of the sizes in ``model.config``.

    A model of images and texts side by side (CLIP) gets both; where images stand for tokens of the
    text (LLaVA) it gets a text without images. A decoder gets a text of its own (T5).
    """
    main = getattr(model, "main_input_name", None)
    if main not in ("pixel_values", "input_ids"):
        return None
    config: Any = getattr(model, "config", None)
    text = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    takes = inspect.signature(model.forward).parameters
    given = {name: text for name in (main, "decoder_input_ids") if name in takes}
    within = any("image_token" in name for name in vars(config))
    beside = "pixel_values" in takes and not within and _nested(config, "image_size") is not None
    if main == "pixel_values" or beside:
        size = _nested(config, "image_size") or 224
        height, width = (size, size) if isinstance(size, int) else size
        channels = _nested(config, "num_channels") or image_inputs(model, 1).args[0].shape[1]
        frames = [config.num_frames] if hasattr(config, "num_frames") else []
        given["pixel_values"] = _images(model, *frames, channels, height, width)
    return Inputs(kwargs=given)


def _nested(config: Any, name: str) -> Any:
    """Return an entry of a configuration, or of the one for its images inside of it."""
    found = getattr(config, name, None)
    inner = sorted(getattr(config, "sub_configs", {}), key=lambda key: "vision" not in key)
    for key in inner:
        if found is None and getattr(config, key, None) is not None:
            found = _nested(getattr(config, key), name)
    return found


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
    return dataclasses.replace(inputs, args=args, kwargs=kwargs)
