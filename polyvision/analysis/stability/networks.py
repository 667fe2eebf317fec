"""The networks of the training contrast: deep, most of them without normalisation layers.

Matrices and kernels are drawn with He's standard deviation, ``gain * sqrt(2 / fan_in)``, and biases
start at 0 (He et al. 2015, https://arxiv.org/abs/1502.01852). ``gain`` is the initial scale of the
grid; 1 is He's own. In residual networks nothing shrinks the branches: schemes such as Fixup would
hide what the lab looks for.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

from polyvision.activations import create_activation
from polyvision.errors import unknown
from polyvision.models.language.transformer import Transformer, TransformerShape
from polyvision.models.vision.create import create_vision_model

__all__ = ["NETWORKS", "build_network", "draw_weights", "mlp"]

# Name -> what it is; the report and the command line list these.
NETWORKS: dict[str, str] = {
    "mlp": "plain MLP, 8 hidden layers of 128",
    "residual-mlp": "residual MLP, 8 blocks x + W2 act(W1 x), width 128, no normalisation",
    "resnet-no-bn": "timm resnet18 at 1/8 width, BatchNorm removed",
    "resnet-frozen-bn": "timm resnet18 at 1/8 width, BatchNorm frozen on statistics of one batch",
    "resnet26-no-bn": "timm resnet26 (ResNet50's bottlenecks, 2 per stage) at 1/8 width, BatchNorm "
    "removed",
    "resnet50-no-bn": "timm resnet50 at 1/8 width, BatchNorm removed",
    "transformer": "polyvision's decoder, 4 pre-norm blocks with RMSNorm, width 64",
}

_WIDTH, _DEPTH = 128, 8
# 1/8 of the usual ones: fp16 convolutions on CPUs have slow backward passes.
_CHANNELS = (8, 16, 32, 64)


class _Classifier(nn.Sequential):
    """Modules one after the other, on flattened inputs."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__(OrderedDict(parts))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = super().forward(x.flatten(1))  # type: ignore[no-untyped-call]
        return logits


def mlp(features: int, width: int, depth: int, classes: int, activation: str) -> nn.Module:
    """Return ``depth`` hidden layers, each a matrix and an activation, and a linear head."""
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Linear(width if i else features, width), create_activation(activation)]
    return _Classifier(layers=nn.Sequential(*layers), head=nn.Linear(width, classes))


class _ResidualBlock(nn.Module):
    """``x + down(act(up(x)))``, the feed-forward block of a transformer without its norm."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, _WIDTH)
        self.act = create_activation(activation)
        self.down = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y: Tensor = x + self.down(self.act(self.up(x)))
        return y


def build_network(
    name: str, activation: str, *, sample: Tensor, classes: int, gain: float = 1.0
) -> nn.Module:
    """Build a network of ``NETWORKS`` with weights drawn from torch's global generator.

    Args:
        name: a key of ``NETWORKS``.
        activation: a registered activation with one input.
        sample: a batch of inputs, fp32: its shape sets the first layer, and the frozen statistics
            of ``resnet-frozen-bn`` are taken from it.
        classes: number of logits.
        gain: factor on every initial weight.

    Raises:
        PolyvisionError: no such network or activation.
    """
    if name not in NETWORKS:
        raise unknown("network", name, NETWORKS)
    if name == "transformer":
        return _transformer(activation, context=sample.shape[1], vocabulary=classes, gain=gain)
    features = sample[0].numel()
    model: nn.Module
    if name == "mlp":
        model = mlp(features, _WIDTH, _DEPTH, classes, activation)
    elif name == "residual-mlp":
        model = _Classifier(
            stem=nn.Linear(features, _WIDTH),
            blocks=nn.Sequential(*(_ResidualBlock(activation) for _ in range(_DEPTH))),
            head=nn.Linear(_WIDTH, classes),
        )
    else:
        timm_name = name.split("-")[0]
        model = create_vision_model(
            "resnet18" if timm_name == "resnet" else timm_name,
            activation,
            num_classes=classes,
            image_size=sample.shape[-1],
            in_chans=sample.shape[1],
            model_kwargs={"channels": _CHANNELS, "zero_init_last": False},
        ).model
    if name.endswith("no-bn"):
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.BatchNorm2d):
                model.set_submodule(path, nn.Identity())
    draw_weights(model, gain)
    if name == "resnet-frozen-bn":
        _freeze_batch_norm(model, sample)
    return model


def _transformer(activation: str, *, context: int, vocabulary: int, gain: float) -> nn.Module:
    shape = TransformerShape(
        vocab_size=vocabulary,
        context=context,
        width=64,
        layers=4,
        heads=4,
        ffn_hidden=192,
        activation=activation,
        init_std=gain / math.sqrt(2.5 * 64),
    )
    model = Transformer(shape)
    model.init_matrices()  # a second draw: the one that the published results were made with
    return model


def _freeze_batch_norm(model: nn.Module, sample: Tensor) -> None:
    """Take the statistics of one batch in fp32, then normalise with them for good."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0  # the statistics become exactly those of the batch
    with torch.no_grad():
        model.train()(sample)
    for norm in norms:
        # A later train() on the network must not thaw it.
        norm.train = lambda mode=True, norm=norm: norm  # type: ignore[method-assign,misc]
        norm.training = False


def draw_weights(model: nn.Module, gain: float) -> None:
    """Draw matrices and kernels with ``gain`` times He's standard deviation; zero the biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            fan_in = module.weight[0].numel()
            nn.init.normal_(module.weight, std=gain * math.sqrt(2 / fan_in))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
