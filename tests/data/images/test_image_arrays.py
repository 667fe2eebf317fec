"""Images in memory: with and without Pillow the pixels are the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from polyvision.data.images.arrays import ArrayImages
from polyvision.data.images.augment import Augment
from polyvision.data.images.sets import Request

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)
GRAY = np.random.default_rng(0).integers(0, 256, (3, 12, 12), dtype=np.uint8)
RGB = np.random.default_rng(1).integers(0, 256, (3, 12, 12, 3), dtype=np.uint8)


def images(pixels: np.ndarray, training: bool, size: int = 12, **settings: Any) -> ArrayImages:
    augment = Augment(**{"crop_scale": (1, 1), "hflip": 0, "crop_pct": 1.0} | settings)
    request = Request(size, augment, MEAN, STD, None)
    return ArrayImages(pixels, np.arange(len(pixels)), request, training=training)


@pytest.mark.parametrize("pixels", [GRAY, RGB], ids=["gray", "rgb"])
@pytest.mark.parametrize("training", [True, False])
def test_levels_are_those_of_the_transform(pixels: np.ndarray, training: bool) -> None:
    data = images(pixels, training)
    for index in range(3):
        image, label = data[index]
        through_pillow = data.transform(Image.fromarray(pixels[index]).convert("RGB"))
        assert torch.equal(image, through_pillow)
        assert image.is_contiguous()
        assert label == index
    data.transform = None  # it is not used here
    assert data[0][0].dtype == torch.float32


@pytest.mark.parametrize("pixels", [GRAY, RGB], ids=["gray", "rgb"])
def test_flips(pixels: np.ndarray) -> None:
    data, plain = images(pixels, True, hflip=0.5), images(pixels, True)
    torch.manual_seed(0)
    flipped = 0
    for _ in range(400):
        image, _ = data[1]
        same = torch.equal(image, plain[1][0])
        flipped += not same
        assert same or torch.equal(image, plain[1][0].flip(-1))
    assert 160 < flipped < 240
    assert torch.equal(images(pixels, False, hflip=0.5)[1][0], plain[1][0])


SETTINGS = [
    ({"size": 16}, {}),
    ({}, {"crop_scale": (0.2, 0.3)}),
    ({}, {"color_jitter": 0.4}),
    ({}, {"auto_augment": "rand-m9"}),
    ({}, {"erase": 1.0}),
    ({}, {"rotate": 20}),
    ({}, {"translate": 0.4}),
]


@pytest.mark.parametrize(("keywords", "settings"), SETTINGS)
def test_every_other_setting_goes_through_the_transform(
    keywords: dict[str, int], settings: dict[str, Any]
) -> None:
    data = images(RGB, True, **keywords, **settings)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    plain = images(RGB, True)[0][0]
    found = [data[0][0] for _ in range(4)]
    assert not all(torch.equal(image, plain) for image in found)
    assert found[0].shape[-1] == keywords.get("size", 12)


def test_a_central_crop_of_validation_goes_through_the_transform() -> None:
    found = images(RGB, False, crop_pct=0.5)[0][0]
    assert not torch.equal(found, images(RGB, False)[0][0])
