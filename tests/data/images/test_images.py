"""Image data by name: digits, made-up images, transforms, and the settings that are refused."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import create_transform
from torchvision import transforms

from polyvision.data.images.augment import Augment, eval_transform, train_transform
from polyvision.data.images.registry import LOADERS, ImageData, load_image_data

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)
PLAIN = Augment(crop_scale=(1, 1), hflip=0, crop_pct=1.0)


def load(name: str, **options: Any) -> ImageData:
    settings = {"image_size": 32, "augment": PLAIN, "mean": MEAN, "std": STD}
    return load_image_data(name, **settings | options)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def test_digits_are_those_of_scikit_learn() -> None:
    """At their own 8 pixels every value comes through, in all three channels."""
    digits = load_digits()
    images = [image.tobytes() for image in digits.images]
    wanted = sorted(zip(images, digits.target.tolist(), strict=True))
    data = load("digits", image_size=8, mean=(0, 0, 0), std=(1, 1, 1))
    found = []
    for i in range(len(data.val)):
        image, label = data.val[i]
        assert torch.equal(image[0], image[1])
        assert torch.equal(image[0], image[2])
        found.append(((image[0].double() * 16).round().numpy().tobytes(), label))
    for image, label in zip(data.train.images, data.train.labels, strict=True):
        found.append(((image / 255 * 16).round().tobytes(), int(label)))
    assert sorted(found) == wanted


def test_digits_split_is_stratified_and_fixed() -> None:
    data = load("digits")
    assert (len(data.train), len(data.val)) == (1437, 360)
    assert data.classes == [str(i) for i in range(10)]
    labels = np.array([data.val[i][1] for i in range(360)])
    assert np.bincount(labels).min() >= 35
    assert np.bincount(labels).max() <= 37
    seed_all(3)
    again = load("digits")
    assert all(torch.equal(data.val[i][0], again.val[i][0]) for i in range(0, 360, 30))
    # The first labels pin the split itself: results of different versions stay comparable.
    assert labels[:8].tolist() == [7, 6, 3, 7, 7, 3, 2, 8]


def test_digits_are_resized_and_normalised() -> None:
    data = load("digits")
    image, _ = data.train[0]
    assert image.shape == (3, 32, 32)
    assert image.dtype == torch.float32
    assert (data.in_chans, data.image_size) == (3, 32)
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    levels = image * std + mean
    assert levels.min() >= -1e-6
    assert levels.max() <= 1 + 1e-6
    source = Image.fromarray(data.train.images[0]).resize((32, 32), Image.Resampling.BICUBIC)
    torch.testing.assert_close(levels[1], torch.from_numpy(np.asarray(source) / 255).float())


def test_fake_images_depend_on_the_index_alone() -> None:
    data, again = (load("fake", samples=40, classes=4, source_size=64) for _ in range(2))
    assert (len(data.train), len(data.val)) == (32, 8)
    assert all(torch.equal(data.train[i][0], again.train[i][0]) for i in range(32))
    assert [data.train[i][1] for i in range(6)] == [0, 1, 2, 3, 0, 1]
    assert len({data.train[i][0].numpy().tobytes() for i in range(32)}) == 32
    assert data.train.image(5).size == (64, 64)
    assert data.val.image(0).tobytes() == data.val.image(0).tobytes()


def test_fake_images_show_their_class() -> None:
    data = load("fake", samples=80, classes=5)
    means = torch.stack([data.train[i][0] for i in range(5)])
    for i in range(16):
        image, label = data.val[i]
        assert (means - image).square().mean((1, 2, 3)).argmin() == label


def test_fake_defaults_have_the_shape_of_imagenet() -> None:
    data = load("fake", image_size=224)
    assert len(data.classes) == 1000
    assert data.train[0][0].shape == (3, 224, 224)


def test_validation_crops_the_centre() -> None:
    wide = Image.new("RGB", (80, 40))
    wide.paste((255, 255, 255), (20, 0, 60, 40))
    crop = eval_transform(PLAIN, 40, (0, 0, 0), (1, 1, 1))(wide)
    assert torch.equal(crop, torch.ones(3, 40, 40))
    inner = Image.new("RGB", (40, 40))
    inner.paste((255, 255, 255), (10, 10, 30, 30))
    half = Augment(crop_pct=0.5, interpolation="nearest")
    assert torch.equal(eval_transform(half, 20, (0, 0, 0), (1, 1, 1))(inner), torch.ones(3, 20, 20))


CHANGES = {
    "crop_scale": (0.3, 0.5),
    "hflip": 1.0,
    "color_jitter": 0.4,
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "erase": 1.0,
    "rotate": 30.0,
    "translate": 0.3,
    "interpolation": "nearest",
}


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    levels = np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(levels).resize((24, 24), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("name", CHANGES)
def test_every_setting_changes_training_and_repeats_by_seed(
    picture: Image.Image, name: str
) -> None:
    plain = train_transform(PLAIN, 32, MEAN, STD)
    settings = {"crop_scale": (1, 1), "hflip": 0.0, "crop_pct": 1.0}
    changed = train_transform(Augment(**settings | {name: CHANGES[name]}), 32, MEAN, STD)
    seed_all(1)
    first = changed(picture)
    assert first.shape == (3, 32, 32)
    assert not torch.equal(first, plain(picture))
    seed_all(1)
    assert torch.equal(changed(picture), first)


def test_trivial_is_torchvisions_and_takes_the_place_of_jitter(picture: Image.Image) -> None:
    settings = {"crop_scale": (1, 1), "hflip": 0.0, "crop_pct": 1.0}
    plain = train_transform(Augment(**settings), 24, (0, 0, 0), (1, 1, 1))
    trivial = Augment(**settings, auto_augment="trivial", color_jitter=0.4)
    transform = train_transform(trivial, 24, (0, 0, 0), (1, 1, 1))
    wide = transforms.TrivialAugmentWide(interpolation=transforms.InterpolationMode.BICUBIC)
    seen = []
    for seed in range(40):
        seed_all(seed)
        seen.append(transform(picture))
        seed_all(seed)
        plain(picture)  # draws the numbers of the crop
        assert torch.equal(seen[-1], transforms.functional.to_tensor(wide(picture)))
    assert sum(not torch.equal(image, plain(picture)) for image in seen) > 20


def test_validation_has_a_size_of_its_own() -> None:
    data = load("digits", image_size=24, test_size=40)
    assert data.train[0][0].shape == (3, 24, 24)
    assert data.val[0][0].shape == (3, 40, 40)
    assert data.image_size == 24
    same = load("digits", image_size=24)
    assert same.val[0][0].shape == (3, 24, 24)
    assert torch.equal(load("digits", image_size=40).val[0][0], data.val[0][0])


def test_plain_training_equals_plain_validation(picture: Image.Image) -> None:
    train = train_transform(PLAIN, 32, MEAN, STD)(picture)
    assert torch.equal(train, eval_transform(PLAIN, 32, MEAN, STD)(picture))


def test_shift_is_measured_on_the_resized_image() -> None:
    """An 8-pixel digit shifts by fractions of its own pixels, and black comes in."""
    white = Image.new("RGB", (8, 8), (255, 255, 255))
    augment = Augment(crop_scale=(1, 1), hflip=0, translate=0.25)
    transform = train_transform(augment, 64, (0, 0, 0), (1, 1, 1))
    black = [int((transform(white)[0].amax(0) == 0).sum()) for _ in range(40)]
    assert max(black) <= 16
    assert any(columns % 8 for columns in black)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("digit", {}, "unknown image data 'digit'. Did you mean 'digits'?"),
        ("digits", {"root": "x"}, "image data 'digits' has no option 'root'. It takes none."),
        ("fake", {"sampels": 3}, "no option 'sampels'. Valid: samples, classes, source_size."),
        ("fake", {"classes": 1}, "at least 2 classes"),
        ("fake", {"samples": 2}, "one sample on each side of the split"),
        ("digits", {"val_fraction": 1.0}, "val_fraction must be between 0 and 1, got 1.0"),
        ("digits", {"image_size": 0}, "image_size must be at least 1, got 0"),
        ("digits", {"mean": (0.5,)}, "mean must be three numbers, got [0.5]"),
        ("digits", {"std": (1, 0, 1)}, "std must be three numbers above 0, got [1, 0, 1]"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        load(name, **options)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"crop_scale": (0.5, 0.2)}, "crop_scale must be two ascending numbers"),
        ({"crop_scale": (0.5,)}, "crop_scale must be two ascending numbers"),
        ({"crop_scale": (0, 1)}, "crop_scale must be two ascending numbers above 0"),
        ({"hflip": 1.5}, "augment.hflip must be from 0 to 1, got 1.5"),
        ({"rotate": -1}, "augment.rotate must be from 0 to 180, got -1"),
        ({"crop_pct": 0}, "augment.crop_pct must be above 0 and at most 1, got 0"),
        ({"interpolation": "cubic"}, "augment.interpolation 'cubic'. Did you mean 'bicubic'?"),
        ({"auto_augment": "rnad-m7"}, "augment.auto_augment='rnad-m7' is not a policy of timm"),
        ({"auto_augment": "rand-x7"}, "augment.auto_augment='rand-x7' is not a policy of timm"),
        ({"auto_augment": "rand-q"}, "augment.auto_augment='rand-q' is not a policy of timm"),
        ({"auto_augment": "Trivial"}, "augment.auto_augment='Trivial' is not a policy of timm"),
        ({"auto_augment": ""}, "augment.auto_augment='' is not a policy of timm"),
    ],
)
def test_a_wrong_augmentation_is_one_clear_line(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        train_transform(Augment(**settings), 32, MEAN, STD)


def test_none_counts_as_not_given() -> None:
    assert len(load("digits", root=None).train) == 1437


def test_every_loader_explains_itself() -> None:
    assert {"digits", "fake", "folder", "fashion_mnist", "cifar10"} <= set(LOADERS)
    assert all(loader.__doc__ for loader in LOADERS.values())


def noise(height: int, width: int) -> Image.Image:
    levels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


@pytest.mark.parametrize("crop_pct", [0.875, 1.0])
@pytest.mark.parametrize("size", [31, 32])
@pytest.mark.parametrize(("height", "width"), [(9, 200), (1, 77), (77, 1), (401, 40), (7, 100)])
def test_the_crop_of_a_thin_image_is_that_of_the_whole_resized_one(
    height: int, width: int, size: int, crop_pct: float
) -> None:
    settings: dict[str, Any] = {"crop_pct": crop_pct, "interpolation": "bilinear"}
    whole = create_transform(size, mean=(0, 0, 0), std=(1, 1, 1), **settings)
    image = noise(height, width)
    found = eval_transform(Augment(**settings), size, (0, 0, 0), (1, 1, 1))(image)
    torch.testing.assert_close(found, whole(image), rtol=0, atol=1.01 / 255)


@pytest.mark.parametrize(("height", "width"), [(40, 30), (10, 80), (300, 60), (17, 17)])
def test_other_images_are_resized_whole_as_by_timm(height: int, width: int) -> None:
    image = noise(height, width)
    whole = create_transform(32, interpolation="bicubic", crop_pct=0.875, mean=MEAN, std=STD)
    assert torch.equal(eval_transform(Augment(), 32, MEAN, STD)(image), whole(image))


@pytest.mark.parametrize("size", [(20_000, 1), (1, 20_000)])
def test_a_thin_image_never_becomes_a_huge_one(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    resize = Image.Image.resize

    def watched(self: Image.Image, size: tuple[int, int], *rest: Any, **more: Any) -> Image.Image:
        sizes.append(size)
        return resize(self, size, *rest, **more)

    monkeypatch.setattr(Image.Image, "resize", watched)
    image = Image.new("RGB", size, (9, 90, 200))
    for transform in (
        eval_transform(Augment(), 224, (0, 0, 0), (1, 1, 1)),
        train_transform(Augment(hflip=0), 224, (0, 0, 0), (1, 1, 1)),
    ):
        found = transform(image)
        expected = (torch.tensor([9, 90, 200]) / 255)[:, None, None].expand(3, 224, 224)
        torch.testing.assert_close(found, expected)
    assert max(width * height for width, height in sizes) < 260 * 260
