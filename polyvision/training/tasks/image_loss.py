"""The training loss of images: softmax or binary cross-entropy, of labels or of mixed targets."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor

from polyvision.errors import PolyvisionError
from polyvision.training.config.schema import VisionRecipeConfig

__all__ = ["build_loss", "check_objective"]

Loss = Callable[[Tensor, Tensor], Tensor]


def build_loss(recipe: VisionRecipeConfig, *, mixed: bool) -> Loss:
    """Return the mean loss of logits (B, classes) and labels (B,), or targets if ``mixed``.

    ``ce`` is softmax cross-entropy. ``bce`` is timm's binary cross-entropy, the mean over samples
    and classes; targets above ``bce_threshold`` count as 1 and the others as 0, which undoes
    smoothing and the shares of mixed images (Wightman et al. 2021, https://arxiv.org/abs/2110.00476).
    """
    if recipe.loss == "bce":
        return BinaryCrossEntropy(recipe.label_smoothing, target_threshold=recipe.bce_threshold)
    if mixed:
        return SoftTargetCrossEntropy()  # type: ignore[no-untyped-call]
    return lambda logits, labels: F.cross_entropy(
        logits, labels, label_smoothing=recipe.label_smoothing
    )


def check_objective(recipe: VisionRecipeConfig, classes: int) -> None:
    """Refuse settings that leave nothing to learn, or that nothing would read.

    Raises:
        PolyvisionError: a threshold without binary cross-entropy, or on the wrong side of smoothed
            targets; more copies of an image than a step has images.
    """
    threshold, smoothing = recipe.bce_threshold, recipe.label_smoothing
    if threshold is not None and recipe.loss != "bce":
        raise PolyvisionError(
            f"recipe.bce_threshold={threshold:g} is for recipe.loss=bce, not {recipe.loss}"
        )
    low = smoothing / classes
    high = 1 - smoothing + low
    if threshold is not None and not low <= threshold < high:
        raise PolyvisionError(
            f"recipe.bce_threshold={threshold:g} gives all classes one target: with "
            f"recipe.label_smoothing={smoothing:g} and {classes} classes the targets are {low:g} "
            f"and {high:g}, and it must lie between"
        )
    if recipe.repeats > recipe.batch_size:
        raise PolyvisionError(
            f"recipe.repeats={recipe.repeats} is more than recipe.batch_size={recipe.batch_size}: "
            f"a step would see one image only"
        )
