"""ResNet-18 for small images: timm's network but for the stem."""

import pytest
import timm
import torch

from polyvision.errors import PolyvisionError
from polyvision.models.vision.create import create_vision_model
from polyvision.models.vision.small_resnet import SmallImageResNet


def test_only_the_stem_differs_from_timm():
    small = timm.create_model("resnet18_small", num_classes=10, in_chans=1)
    plain = timm.create_model("resnet18", num_classes=10, in_chans=1)
    shapes = {key: value.shape for key, value in small.state_dict().items()}
    assert shapes.pop("conv1.weight") == (64, 1, 3, 3)
    expected = {key: value.shape for key, value in plain.state_dict().items()}
    del expected["conv1.weight"]
    assert shapes == expected
    assert small.forward_features(torch.zeros(1, 1, 32, 32)).shape == (1, 512, 4, 4)
    assert [info["reduction"] for info in small.feature_info] == [1, 1, 2, 4, 8]


def test_the_stem_starts_like_the_other_convolutions():
    torch.manual_seed(0)
    stem = timm.create_model("resnet18_small").conv1.weight
    assert stem.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)


def test_every_site_takes_the_activation():
    built = create_vision_model("resnet18_small", "polynorm", num_classes=10, image_size=32)
    assert len(built.report.sites) == 17
    built.model(torch.randn(2, 3, 32, 32)).sum().backward()


def test_what_it_does_not_have_is_refused():
    keywords = {"num_classes": 10, "image_size": 32}
    with pytest.raises(PolyvisionError, match="no pretrained weights of resnet18_small"):
        create_vision_model("resnet18_small", "relu", pretrained=True, **keywords)
    with pytest.raises(PolyvisionError, match="no stem_type"):
        create_vision_model(
            "resnet18_small", "relu", model_kwargs={"stem_type": "deep"}, **keywords
        )
    with torch.device("meta"):
        assert timm.create_model("resnet18_small").conv1.weight.is_meta
    assert isinstance(timm.create_model("resnet18_small"), SmallImageResNet)
