"""Image classification: data, network, loss, top-1 and top-5 accuracy."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, cast

import timm
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from polyvision.data.images.registry import Augment, ImageData, collate, load_image_data
from polyvision.data.images.skips import SkippedImages
from polyvision.errors import PolyvisionError, some
from polyvision.models.swap.report import Kept, SwapReport
from polyvision.models.trained.network import VisionNetwork, network_to_plain
from polyvision.models.vision.create import UnknownOption, VisionModel, create_vision_model
from polyvision.models.vision.settings import ImagePreparation, TimmNetwork
from polyvision.models.weights.empty import empty
from polyvision.output import plural
from polyvision.training.config.schema import (
    ImageDataConfig,
    VisionConfig,
    VisionModelConfig,
    VisionRecipeConfig,
)
from polyvision.training.loading.loader import MapDataset
from polyvision.training.loop.module import TaskModule
from polyvision.training.loop.steps import Sums
from polyvision.training.tasks.finetune import start_from
from polyvision.training.tasks.image_loss import build_loss, check_objective
from polyvision.training.tasks.mixup import build_mixup
from polyvision.training.tasks.task import Task
from polyvision.typed import values_of

__all__ = ["VisionModule", "build_task"]

Batch = tuple[Tensor, Tensor]


class VisionModule(TaskModule):
    """Classification of images, (B, C, H, W) in channels_last.

    Args:
        model: the network.
        recipe: its loss, label smoothing and mixing of images are those of training.
        classes: number of classes.
        skipped: the images that passes were left without.
        keywords: those of ``TaskModule``.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: VisionRecipeConfig,
        *,
        classes: int,
        skipped: SkippedImages | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(model, recipe, **keywords)
        self.skipped = skipped
        self.mixup = build_mixup(recipe, classes)
        self.training_loss = build_loss(recipe, mixed=self.mixup is not None)

    def _logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images.to(memory_format=torch.channels_last))
        return logits.float()

    def losses(self, batch: Batch) -> tuple[Tensor, Sums]:
        """Return the recipe's mean loss of the batch, and its sum over the images.

        Raises:
            PolyvisionError: unreadable images left it with one, and the network needs more.
        """
        images, targets = batch
        if self.mixup is not None:
            if len(images) % 2:  # it mixes pairs: the last image comes twice
                images, targets = (torch.cat([part, part[-1:]]) for part in (images, targets))
            images, targets = self.mixup(images.clone(), targets)
        try:
            logits = self._logits(images)
        except ValueError as error:  # batch norm over one value
            names = self.skipped.names() if self.skipped else []
            if len(images) > 1 or not names:
                raise
            raise PolyvisionError(
                "unreadable images were left out of a batch of training images, and the network "
                f"does not train on the one that remained ({error}). Not read so far: "
                f"{some(names)}. Repair or remove them, or raise recipe.batch_size"
            ) from error
        loss = self.training_loss(logits, targets)
        return loss, {"loss": loss.detach() * len(images), "images": len(images)}

    def training_metrics(self, totals: dict[str, Tensor], step: int) -> dict[str, float]:
        """Return the mean loss of an image."""
        return {"train/loss": float(totals["loss"] / totals["images"])}

    def count(self, batch: Batch) -> dict[str, Tensor]:
        """Return the summed cross-entropy, the hits among the best 1 and 5, and the images."""
        images, labels = batch
        logits = self._logits(images)
        ranked = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        return {
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "top1": ranked[:, 0].sum(),
            "top5": ranked.any(1).sum(),
            "images": torch.tensor(len(labels), device=logits.device),
        }

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Return loss and accuracies as shares of all images."""
        images = totals["images"]
        return {
            "val/loss": totals["loss"] / images,
            "val/acc1": totals["top1"] / images,
            "val/acc5": totals["top5"] / images,
        }


def build_task(config: VisionConfig) -> Task:
    """Load the images, build the network, and describe both.

    Raises:
        ValueError: data, model or activation do not fit.
    """
    if config.finetune is not None and config.model.pretrained:
        raise PolyvisionError("finetune= and model.pretrained=true: choose one source of weights")
    recipe = config.recipe
    data = load_image_data(
        config.data.name,
        root=config.data.root,
        image_size=config.data.image_size,
        test_size=config.data.test_size,
        val_fraction=config.data.val_fraction,
        mean=tuple(config.data.mean),
        std=tuple(config.data.std),
        augment=Augment(
            **dataclasses.asdict(recipe.augment),
            crop_pct=config.data.crop_pct,
            interpolation=config.data.interpolation,
        ),
        **config.data.options,
    )
    check_objective(recipe, len(data.classes))
    _check_test_size(config.model, config.data)
    build = functools.partial(
        create_vision_model,
        config.model.name,
        config.act.name,
        config.act.options,
        num_classes=len(data.classes),
        in_chans=data.in_chans,
        image_size=data.image_size,
        pretrained=config.model.pretrained,
        model_kwargs=_model_options(config.model, recipe),
        on_leftover=config.model.on_leftover,
    )
    values = config.model.pretrained or config.finetune is not None or not config.dry_run
    try:
        built = build() if values else empty(build, lambda built: built.model)
    except UnknownOption as error:
        raise _in_words_of_the_recipe(error, config.model.name, recipe) from error
    _check_drop_path(built.model, config.model.name, recipe.drop_path)
    network = _network(config, data)
    if config.finetune is not None:
        weights = start_from(config.finetune, built.model, network)
        built = dataclasses.replace(built, weights=weights)

    def module(*arguments: Any, **keywords: Any) -> VisionModule:
        return VisionModule(*arguments, classes=len(data.classes), skipped=data.skipped, **keywords)

    return Task(
        model=built.model,
        module=module,
        train=cast(MapDataset, data.train),
        val=cast(MapDataset, data.val),
        plan=_plan(config, data, built),
        monitor="val/acc1",
        shown=["val/loss", "val/acc1", "val/acc5"],
        make_input=lambda n: torch.zeros(n, data.in_chans, data.image_size, data.image_size),
        collate=collate,
        check=data.check,
        skipped=data.skipped,
        files={
            "classes.json": json.dumps(data.classes, indent=2) + "\n",
            "network.json": json.dumps(network_to_plain(network), indent=2) + "\n",
        },
    )


def _model_options(model: VisionModelConfig, recipe: VisionRecipeConfig) -> dict[str, Any]:
    options = dict(model.options)
    for option, key, value in (
        ("drop_rate", "drop", recipe.drop),
        ("drop_path_rate", "drop_path", recipe.drop_path),
    ):
        if value and option in options:
            raise PolyvisionError(
                f"recipe.{key}={value:g} and model.options.{option}={options[option]} are the same "
                f"setting: give one of them"
            )
        if value:
            options[option] = value
    return options


def _in_words_of_the_recipe(
    error: UnknownOption, name: str, recipe: VisionRecipeConfig
) -> PolyvisionError:
    if error.keyword == "drop_path_rate" and recipe.drop_path:
        return _no_drop_path(name, recipe.drop_path)
    if error.keyword == "drop_rate" and recipe.drop:
        return PolyvisionError(f"recipe.drop={recipe.drop:g}: {name} has no dropout; use 0")
    return PolyvisionError(f"model.options.{error.keyword}: {error}")


def _no_drop_path(name: str, rate: float) -> PolyvisionError:
    return PolyvisionError(
        f"recipe.drop_path={rate:g}: {name} has no paths that can be dropped; use 0"
    )


def _check_drop_path(model: nn.Module, name: str, rate: float) -> None:
    """Refuse a rate that a constructor took and dropped."""
    if rate and not any(isinstance(m, DropPath) and m.drop_prob for m in model.modules()):
        raise _no_drop_path(name, rate)


def _check_test_size(model: VisionModelConfig, data: ImageDataConfig) -> None:
    known = timm.get_pretrained_cfg(model.name.split(".")[0]) if timm.is_model(model.name) else None
    if data.test_size not in (None, data.image_size) and known and known.fixed_input_size:
        raise PolyvisionError(
            f"data.test_size={data.test_size}: {model.name} takes images of one size only, "
            f"data.image_size={data.image_size}; use null"
        )


def _objective(recipe: VisionRecipeConfig) -> str:
    """Say what training does to images and targets."""
    names = {"ce": "cross-entropy", "bce": "binary cross-entropy"}
    mix, augment = recipe.mix, recipe.augment
    parts = [
        (recipe.loss == "bce" and recipe.bce_threshold, "targets above {:g} are 1"),
        (recipe.label_smoothing, "label smoothing {:g}"),
        (mix.mixup, "mixup {:g}"),
        (mix.cutmix, "cutmix {:g}"),
        ((mix.mixup or mix.cutmix) and 1 - mix.prob, "{:.0%} not mixed"),
        (augment.auto_augment, "{}"),
        (augment.erase, "erasing {:g}"),
        (recipe.drop, "dropout {:g}"),
        (recipe.drop_path, "drop path {:g}"),
        (recipe.repeats > 1 and recipe.repeats, "each image {} times"),
    ]
    return ", ".join([names[recipe.loss], *(text.format(v) for v, text in parts if v)])


def _network(config: VisionConfig, data: ImageData) -> VisionNetwork:
    return VisionNetwork(
        activation=config.act.name,
        activation_options=config.act.options,
        classes=data.classes,
        in_chans=data.in_chans,
        **values_of(TimmNetwork, config.model),
        **values_of(ImagePreparation, config.data) | {"image_size": data.image_size},
    )


def _plan(config: VisionConfig, data: ImageData, built: VisionModel) -> list[tuple[str, str]]:
    report = built.report
    rows = [
        ("model", config.model.name),
        ("weights", built.weights),
        ("activation", f"{config.act.label} at {plural(len(report.sites), 'site')}{_dims(report)}"),
        ("parameters", f"{built.parameters:,}, of them {report.parameters_added:,} in activations"),
    ]
    if report.gates:
        rows.append(("gates kept", _names(report.gates)))
    kept = tuple(kept for kept in report.kept if kept.role != "gate")
    if kept:
        rows.append(("kept", _names(kept)))
    if report.leftovers:
        rows.append(("NOT replaced", _names(report.leftovers)))
    shared = [site.name for site in report.sites if site.calls > 1]
    if shared:
        rows.append(
            ("shared sites", f"{len(shared)}, each with one set of coefficients for all calls")
        )
    rows += [("note", note) for note in report.notes]
    rows.append(("loss", _objective(config.recipe)))
    rows.append(("data", data.description))
    rows.append(("images", _sizes(config, data)))
    return [*rows, *(("note", note) for note in data.notes)]


def _sizes(config: VisionConfig, data: ImageData) -> str:
    test = config.data.test_size or data.image_size
    return f"{data.image_size} pixels; in validation {test}, crop {config.data.crop_pct:g}"


def _dims(report: SwapReport) -> str:
    dims = [site.dim for site in report.sites if site.dim is not None]
    parts = [f"{dims.count(d)} over dim {d}" for d in sorted(set(dims), reverse=True)]
    return f" ({', '.join(parts)})" if parts else ""


def _names(kept: tuple[Kept, ...]) -> str:
    shown = ", ".join(f"{k.name} ({k.was})" for k in kept[:4])
    return f"{len(kept)}: {shown}" + (", ..." if len(kept) > 4 else "")
