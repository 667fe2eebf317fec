"""What a network is run on where nobody says it, and what is said where that does not do."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision import models

from polyvision import swap_activations
from polyvision.errors import PolyvisionError
from polyvision.models.trace.inputs import Inputs, example_inputs


def shapes(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the keywords."""
    assert inputs.guessed
    assert not inputs.args
    return {name: tuple(tensor.shape) for name, tensor in inputs.kwargs.items()}


def config(**entries: Any) -> SimpleNamespace:
    """Return a configuration as transformers makes it."""
    inner = [name for name, value in entries.items() if isinstance(value, SimpleNamespace)]
    return SimpleNamespace(**entries, sub_configs=dict.fromkeys(inner))


class Images(nn.Module):
    main_input_name = "pixel_values"

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return torch.relu(self.conv(pixel_values))


class TwoTowers(Images):
    main_input_name = "input_ids"

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        return super().forward(pixel_values)


class EncoderDecoder(Images):
    main_input_name = "input_ids"

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return input_ids


VISION = config(image_size=96, num_channels=4)
TEXT = config(image_size=None)


@pytest.mark.parametrize(
    ("kind", "entries", "expected"),
    [
        (Images, {}, {"pixel_values": (2, 1, 224, 224)}),  # ResNet, with the channels of its layer
        (Images, {"num_channels": 3}, {"pixel_values": (2, 3, 224, 224)}),
        (Images, {"image_size": 32}, {"pixel_values": (2, 1, 32, 32)}),
        (Images, {"image_size": [32, 128]}, {"pixel_values": (2, 1, 32, 128)}),
        (Images, {"text_config": TEXT, "vision_config": VISION}, {"pixel_values": (2, 4, 96, 96)}),
        (Images, {"image_size": 32, "num_frames": 8}, {"pixel_values": (2, 8, 1, 32, 32)}),
        (
            TwoTowers,
            {"vision_config": VISION},
            {"input_ids": (2, 16), "pixel_values": (2, 4, 96, 96)},
        ),
        (TwoTowers, {"vision_config": VISION, "image_token_id": 3}, {"input_ids": (2, 16)}),
        (TwoTowers, {}, {"input_ids": (2, 16)}),
        (EncoderDecoder, {}, {"input_ids": (2, 16), "decoder_input_ids": (2, 16)}),
    ],
)
def test_a_model_of_transformers_gets_what_its_configuration_says(
    kind: type[Images], entries: dict[str, Any], expected: dict[str, tuple[int, ...]]
) -> None:
    assert shapes(example_inputs(kind(config(**entries)))) == expected


def test_a_network_for_rectangles_and_one_for_videos() -> None:
    model = timm.create_model("test_resnet")
    model.pretrained_cfg["input_size"] = (3, 32, 64)
    assert example_inputs(model).args[0].shape == (2, 3, 32, 64)
    with torch.device("meta"):
        video = models.video.r3d_18()
    assert example_inputs(video).args[0].shape == (2, 3, 16, 224, 224)


def test_advice_fits_whether_the_inputs_were_given() -> None:
    class Two(Images):
        def forward(self, pixel_values: Tensor, other: Tensor) -> Tensor:
            return pixel_values

    model = Two(config(image_size=32))
    shape = re.escape("cannot be traced on inputs of shape (2, 1, 32, 32): ")
    example = "inputs={'pixel_values': torch.empty(2, 1, 32, 32), 'other': torch.empty(...)} ("
    text = re.escape(f"They are a guess: pass for example {example}--image-size for swap-report)")
    with pytest.raises(PolyvisionError, match=shape + r".*'other'\. " + text):
        swap_activations(model, "polynorm")
    with pytest.raises(PolyvisionError, match=shape + r".*'other'\. Check that the network runs"):
        swap_activations(model, "polynorm", inputs=torch.empty(2, 1, 32, 32))


class Speech(nn.Module):
    """Takes what no configuration tells the size of, as Whisper and Wav2Vec2."""

    main_input_name = "input_features"

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(80, 8, 3)

    def forward(
        self, input_features: Tensor | None = None, decoder_input_ids: Tensor | None = None
    ) -> Tensor:
        assert input_features is not None
        return torch.relu(self.conv(input_features))


def test_inputs_that_cannot_be_guessed_are_shown_by_name() -> None:
    with pytest.raises(PolyvisionError) as caught:
        swap_activations(Speech(), "polynorm")
    example = (
        "inputs={'input_features': torch.empty(2, 80, 3000), "
        "'decoder_input_ids': torch.zeros(2, 16, dtype=torch.int64)}"
    )
    assert f"Speech does not tell what it takes; pass for example {example}, or" in str(
        caught.value
    )
    keywords: dict[str, Any] = eval(f"dict({example})", {"torch": torch})
    (site,) = swap_activations(Speech(), "polynorm", **keywords).sites
    assert (site.name, site.dim) == ("relu", 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whisper", "wav2vec2", "hubert"])
def test_the_example_of_the_message_works_for_speech(kind: str) -> None:
    pytest.importorskip("transformers")
    from polyvision.models.swap.command import build_empty

    with pytest.raises(PolyvisionError) as caught:
        swap_activations(build_empty(f"transformers:{kind}"), "polynorm")
    example = re.search(r"inputs=(\{.*\})", str(caught.value))
    assert example is not None
    inputs = eval(example[1], {"torch": torch})
    report = swap_activations(build_empty(f"transformers:{kind}"), "polynorm", inputs=inputs)
    assert report.sites
    assert report.leftovers == ()


class FixedSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != 8:
            raise RuntimeError("only images of 8 pixels")
        return self.act(self.conv(x))


def test_a_dimension_that_rests_on_one_size_is_noted() -> None:
    inputs = torch.empty(2, 3, 8, 8)
    report = swap_activations(FixedSize(), "polynorm", inputs=inputs)
    assert [site.dim for site in report.sites] == [1]
    assert report.notes == (
        "feature dimensions rest on one size and on the neighbouring layers: the network refuses "
        "inputs of shape (2, 3, 16, 16): only images of 8 pixels",
    )
    assert report.notes[0] in str(report)
    assert swap_activations(FixedSize(), "relu2", inputs=inputs).notes == ()


def test_a_network_that_does_not_train_is_noted() -> None:
    class Evaluates(FixedSize):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("pass targets")
            return super().forward(x)

    report = swap_activations(Evaluates(), "relu2", inputs=torch.empty(2, 3, 8, 8))
    assert report.notes == (
        "not searched in training mode: the network refuses inputs of shape (2, 3, 8, 8): "
        "pass targets",
    )


IMAGES = ("resnet", "regnet", "segformer", "poolformer", "clip", "bit", "cvt", "glpn", "sam")
EXPERTS = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*IMAGES, *EXPERTS, "t5", "bart", "videomae", "detr"])
def test_transformers(kind: str) -> None:
    pytest.importorskip("transformers")
    from polyvision.models.swap.command import build_empty

    report = swap_activations(build_empty(f"transformers:{kind}"), "polynorm")
    assert report.sites
    assert report.leftovers == ()
