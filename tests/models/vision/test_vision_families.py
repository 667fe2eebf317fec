"""Feature dimensions do not depend on the size of the images: slow, over whole networks."""

from __future__ import annotations

import pytest
import torch

from polyvision.models.vision.create import create_vision_model


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "convnext_atto",
        "densenet121",
        "efficientnet_b0",
        "levit_128s",
        "mobilenetv3_small_050",
        "mobilevit_xxs",
        "regnety_002",
        "resnet50",
        "vit_tiny_patch16_224",
        "xcit_nano_12_p8_224",
    ],
)
def test_small_images_change_no_dimension(name: str) -> None:
    """On 64 pixels the last maps are 2x2 or 1x1, and token counts can equal feature counts."""
    with torch.device("meta"):
        large, small = (
            create_vision_model(name, "polynorm", num_classes=10, image_size=size).report.sites
            for size in (224, 64)
        )
    assert small == large
