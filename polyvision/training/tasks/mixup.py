"""Mixup and cutmix: batches of images mixed in pairs, and their targets."""

from __future__ import annotations

from timm.data import Mixup

from polyvision.training.config.schema import VisionRecipeConfig

__all__ = ["build_mixup"]


def build_mixup(recipe: VisionRecipeConfig, classes: int) -> Mixup | None:
    """Return timm's mixup and cutmix of images (B, C, H, W), B even, and labels; None for neither.

    It works in place and returns targets (B, classes). What is drawn comes from NumPy's global
    generator, which is seeded for each batch.

    Sources: mixup, Zhang et al. 2017, https://arxiv.org/abs/1710.09412; cutmix, Yun et al. 2019,
    https://arxiv.org/abs/1905.04899.
    """
    mix = recipe.mix
    if not (mix.mixup or mix.cutmix):
        return None
    return Mixup(  # type: ignore[no-untyped-call]
        mixup_alpha=mix.mixup,
        cutmix_alpha=mix.cutmix,
        prob=mix.prob,
        switch_prob=mix.switch_prob,
        mode=mix.mode,
        label_smoothing=recipe.label_smoothing,
        num_classes=classes,
    )
