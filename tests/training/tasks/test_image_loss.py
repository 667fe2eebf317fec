"""Training loss of images against formulas in float64: smoothing, mixing, binary cross-entropy."""

import dataclasses

import numpy as np
import pytest
import torch

from polyvision.training.config.compose import compose
from polyvision.training.config.schema import MixConfig
from polyvision.training.tasks.image_loss import build_loss
from polyvision.training.tasks.mixup import build_mixup
from polyvision.training.tasks.vision import VisionModule

CLASSES = 5


def recipe(**changes):
    (config,) = compose("vision", [])
    return dataclasses.replace(config.recipe, **changes)


def smoothed(labels, smoothing):
    hot = torch.eye(CLASSES, dtype=torch.float64)[labels]
    return hot * (1 - smoothing) + smoothing / CLASSES


def soft_cross_entropy(logits, targets):
    return -(targets * logits.double().log_softmax(1)).sum(1).mean()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(7, 3, 8, 8, generator=generator)
    return images, torch.tensor([0, 1, 2, 3, 4, 0, 2])


@pytest.fixture
def logits():
    return torch.randn(7, CLASSES, generator=torch.Generator().manual_seed(1))


def test_cross_entropy_with_smoothing(batch, logits):
    expected = soft_cross_entropy(logits, smoothed(batch[1], 0.1))
    for mixed, targets in ((False, batch[1]), (True, smoothed(batch[1], 0.1).float())):
        loss = build_loss(recipe(label_smoothing=0.1), mixed=mixed)(logits, targets)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("threshold", [None, 0.2])
def test_binary_cross_entropy(threshold, batch, logits):
    targets = smoothed(batch[1], 0.3)
    chosen = recipe(loss="bce", label_smoothing=0.3, bce_threshold=threshold)
    if threshold is not None:
        targets = (targets > threshold).double()
    p = logits.double().sigmoid()
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).mean()
    assert build_loss(chosen, mixed=False)(logits, batch[1]).item() == pytest.approx(
        expected.item(), rel=1e-6
    )


class Kept(torch.nn.Module):
    """A network that keeps its images, and returns the same logits for all."""

    def forward(self, images):
        self.images = images
        return images.new_zeros(len(images), CLASSES)


def mixed_by(module, images, labels):
    """The images that the network sees in training, and the targets of the loss."""
    seen = []
    module.training_loss.forward = lambda logits, targets: seen.append(targets) or logits.sum()
    _, sums = module.losses((images, labels))
    assert sums["images"] == len(module.model.images)
    return module.model.images, seen[0]


def vision_module(**changes):
    steps = {"seed": 0, "total_steps": 1, "epoch_steps": 1}
    return VisionModule(Kept(), recipe(**changes), classes=CLASSES, **steps)


def test_mixup_mixes_images_and_targets_by_one_share(batch):
    images, labels = batch
    before = images.clone()
    module = vision_module(label_smoothing=0.1, mix=MixConfig(mixup=1.0))
    np.random.seed(3)
    mixed, targets = mixed_by(module, images, labels)
    assert torch.equal(images, before)
    # An image is mixed with the one at the same place from the end; the odd one out comes twice.
    padded = torch.cat([images, images[6:]])
    share = ((mixed[1] - images[6]) / (images[1] - images[6])).mean()
    assert 0.01 < share < 0.99
    torch.testing.assert_close(mixed, share * padded + (1 - share) * padded.flip(0))
    hot = smoothed(torch.cat([labels, labels[6:]]), 0.1).float()
    torch.testing.assert_close(targets, share * hot + (1 - share) * hot.flip(0))


def test_cutmix_pastes_a_rectangle_of_the_share_of_its_target(batch):
    images, labels = batch
    mixup = build_mixup(recipe(mix=MixConfig(cutmix=1.0)), CLASSES)
    np.random.seed(0)
    shares = []
    for _ in range(20):
        mixed, targets = mixup(images[:6].clone(), labels[:6])
        share = (mixed[1] == images[1]).all(0).double().mean().item()
        assert targets[1, 1].item() == pytest.approx(share, abs=1e-6)
        assert targets[1, 4].item() == pytest.approx(1 - share, abs=1e-6)
        shares.append(share)
    assert len(set(shares)) > 10


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_every_mode_takes_every_size(mode, size, batch):
    module = vision_module(mix=MixConfig(mixup=0.2, cutmix=1.0, mode=mode))
    np.random.seed(0)
    mixed, targets = mixed_by(module, batch[0][:size], batch[1][:size])
    np.random.seed(0)
    again, _ = mixed_by(module, batch[0][:size], batch[1][:size])
    assert mixed.shape == (size + size % 2, 3, 8, 8)
    assert torch.equal(mixed, again)
    torch.testing.assert_close(targets.sum(1), torch.ones(len(mixed)))


def test_nothing_is_mixed_unless_asked_for():
    assert build_mixup(recipe(), CLASSES) is None
