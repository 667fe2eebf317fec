"""Networks for small images, under timm names; importing this module registers them.

The stem that timm gives its ResNets takes 32 pixels to 8 before the first block, and no argument of
theirs changes that.
"""

from __future__ import annotations

from typing import Any

from timm.models import register_model
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

__all__ = ["SmallImageResNet", "resnet18_small"]


class SmallImageResNet(ResNet):
    """timm's ResNet with a 3x3 convolution of stride 1 for a stem, and no pooling after it.

    (B, C, 32, 32) comes to the head as (B, width, 4, 4), as is usual for CIFAR (DeVries and Taylor
    2017, https://arxiv.org/abs/1708.04552, section 4.1). Arguments are those of timm's ResNet.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        stem = self.conv1
        if not isinstance(stem, nn.Conv2d):
            raise ValueError("networks for small images have a stem of their own: no stem_type")
        channels, width, weight = stem.in_channels, stem.out_channels, stem.weight
        small = nn.Conv2d(channels, width, 3, padding=1, bias=False, device=weight.device)
        nn.init.kaiming_normal_(small.weight, mode="fan_out", nonlinearity="relu")
        self.conv1 = small.to(weight.dtype)  # type: ignore[assignment]  # mypy: always a Sequential
        self.maxpool = nn.Identity()  # type: ignore[assignment]
        self.feature_info: list[dict[str, Any]]
        for info in self.feature_info:
            info["reduction"] = max(info["reduction"] // 4, 1)


@register_model
def resnet18_small(pretrained: bool = False, **keywords: Any) -> SmallImageResNet:
    """ResNet-18 (He et al. 2015, https://arxiv.org/abs/1512.03385) for images of about 32 pixels.

    Raises:
        ValueError: ``pretrained``, since there are no weights.
    """
    if pretrained:
        raise ValueError("there are no pretrained weights of resnet18_small")
    own = {"pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}
    given = {key: value for key, value in keywords.items() if key not in own}
    return SmallImageResNet(BasicBlock, (2, 2, 2, 2), **given)
