"""Activation sites: where they are in a network, and which dimension holds the features there.

A normalising activation must know its feature dimension, and rank alone does not tell it: the MLPs
of ConvNeXt see NHWC, squeeze-and-excitation sees 1x1 maps, and several families mix NCHW with token
sequences. So a twin of the network without data (fake tensors) runs at two image sizes. The
dimension that stays is the feature dimension. Where several stay (pooled maps, networks of fixed
size), the layer that feeds the site decides, or else the layer that the site feeds.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from polyvision.errors import PolyvisionError

__all__ = ["Placeholder", "Site", "resolve_sites", "separate_placeholders"]

_Conv = nn.modules.conv._ConvNd
_BatchNorm = nn.modules.batchnorm._BatchNorm


@dataclasses.dataclass(frozen=True)
class Site:
    """One place of a network that holds an activation.

    Attributes:
        name: the module's name in the network.
        dim: the feature dimension: 1 for NCHW, -1 for channel-last; None if not asked for.
        calls: how often one forward pass runs the module; above 1, its calls share coefficients.
    """

    name: str
    dim: int | None
    calls: int = 1


class Placeholder(nn.Module):
    """Marks a site while a network is built; the activation takes its place afterwards.

    It accepts whatever timm passes to an activation and computes max(x, 0).
    """

    def __init__(self, inplace: bool = False, **_: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Return max(x, 0)."""
        return x.relu()


def separate_placeholders(model: nn.Module) -> list[str]:
    """Give every place a placeholder of its own, also where one was shared, and name them all."""
    modules = model.named_modules(remove_duplicate=False)
    names = [name for name, module in modules if isinstance(module, Placeholder)]
    for name in names:
        model.set_submodule(name, Placeholder())
    return names


def resolve_sites(
    model: nn.Module,
    names: Sequence[str],
    *,
    in_chans: int,
    sizes: Sequence[int],
    need_dim: bool,
) -> list[Site]:
    """Run ``model`` on fake images and describe the sites called ``names``.

    Args:
        model: the network; it is left as it was, on any device including meta.
        names: modules that each take one tensor and return one of the same shape.
        in_chans: channels of the images.
        sizes: heights and widths of the images. The network must accept the first; it may refuse
            the others, as a vision transformer of fixed size does.
        need_dim: find the feature dimensions, and refuse the network where one has none.

    Raises:
        PolyvisionError: the first size does not fit the network; a site is never called, is called
            at two feature dimensions, or has none that can be told.
    """
    runs: list[_Recorder] = []
    for size in sizes:
        try:
            runs.append(_run(model, names, in_chans, size))
        except Exception as error:  # whatever a foreign forward raises
            if not runs:
                reason = str(error).strip().split("\n")[0] or type(error).__name__
                raise PolyvisionError(
                    f"the model cannot take images of {size}x{size} pixels with {in_chans} "
                    f"channels: {reason}. Choose another image size or another model."
                ) from error
    return [_describe(name, [run.inputs[name] for run in runs], need_dim) for name in names]


def _describe(name: str, runs: Sequence[Sequence[_Input]], need_dim: bool) -> Site:
    """Combine what the runs saw at one site."""
    calls = len(runs[0])
    if not calls:
        raise PolyvisionError(f"activation site {name!r} is never called by the model's forward")
    if not need_dim:
        return Site(name, None, calls)
    dims = {_feature_dim(name, same_call) for same_call in zip(*runs, strict=True)}
    if len(dims) > 1:
        raise PolyvisionError(
            f"activation site {name!r} is called with features in different dimensions "
            f"({sorted(dims)}); a normalising activation cannot serve both"
        )
    return Site(name, dims.pop(), calls)


def _feature_dim(name: str, inputs: Sequence[_Input]) -> int:
    """Return the dimension that is the same in all runs; the neighbouring layers break ties."""
    shapes = [seen.shape for seen in inputs]
    last = len(shapes[0]) - 1
    stable = [d for d in range(1, last + 1) if len({shape[d] for shape in shapes}) == 1]
    layout = inputs[0].layout.dim
    if len(stable) > 1 and layout is not None:
        stable = [layout % (last + 1)]
    if len(stable) != 1:
        seen = " and ".join(str(tuple(shape)) for shape in shapes)
        raise PolyvisionError(
            f"activation site {name!r} has no feature dimension that can be told from its input "
            f"shapes {seen} and its neighbouring layers; choose a pointwise activation"
        )
    return -1 if stable[0] == last else stable[0]


@dataclasses.dataclass
class _Layout:
    """Where the features of a tensor are, as far as known; shared by all tensors laid out alike."""

    dim: int | None = None


@dataclasses.dataclass(frozen=True)
class _Input:
    """What reached a site in one call."""

    shape: torch.Size
    layout: _Layout


class _Recorder:
    """Hooks that note, in one forward pass, the shape and layout of what reaches each site.

    Convolutions, batch and group norms define the layout of what they read and write, as linear
    layers do. Any other module that returns the shape it was given (other norms, dropout,
    identities, activations) passes the layout on, and inside a module a new tensor of the shape of
    the module's input is laid out like it.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.inputs: dict[str, list[_Input]] = {name: [] for name in names}
        self._layouts: dict[int, _Layout] = {}  # by id of the tensor
        self._alive: list[Tensor] = []  # no tensor dies, so no id is used twice
        self._running: list[Tensor | None] = []  # inputs of the modules that are being run
        for module in model.modules():
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._after)
        for name in names:
            model.get_submodule(name).register_forward_pre_hook(self._at_site(name))

    def _layout(self, tensor: Tensor, like: Tensor | None = None) -> _Layout:
        """Return the layout of ``tensor``; a new tensor takes that of ``like`` if shapes agree."""
        if id(tensor) not in self._layouts:
            if like is None or like is tensor or like.shape != tensor.shape:
                self._layouts[id(tensor)] = _Layout()
            else:
                self._layouts[id(tensor)] = self._layout(like)
            self._alive.append(tensor)
        return self._layouts[id(tensor)]

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if given is not None:
            self._layout(given, like=self._running[-1] if self._running else None)
            self._define(module, given)
        self._running.append(given)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        given = self._running.pop()
        if isinstance(output, Tensor):
            self._define(module, output)
            self._layout(output, like=given)

    def _define(self, module: nn.Module, tensor: Tensor) -> None:
        dim = _defined_dim(module)
        if dim is not None and self._layout(tensor).dim is None:
            self._layout(tensor).dim = dim

    def _at_site(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.inputs[name].append(_Input(args[0].shape, self._layout(args[0])))

        return hook


def _defined_dim(module: nn.Module) -> int | None:
    if isinstance(module, _Conv | _BatchNorm | nn.GroupNorm):
        return 1
    return -1 if isinstance(module, nn.Linear) else None


def _run(model: nn.Module, names: Sequence[str], in_chans: int, size: int) -> _Recorder:
    """Run a twin of ``model`` that holds no data on a batch of two fake images."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # Some networks cache tensors in eval mode; a twin keeps fake ones out of the real network.
    with FakeCopyMode(fake):
        twin = copy.deepcopy(model).eval()
    recorder = _Recorder(twin, names)
    parameter = next(model.parameters())
    with torch.no_grad(), _quiet(), fake:
        twin(torch.empty(2, in_chans, size, size, device=parameter.device, dtype=parameter.dtype))
    return recorder


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging a traceback where a network refuses a size."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
