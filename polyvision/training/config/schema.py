"""The typed shape of a configuration: one dataclass for each group of keys.

A key that is added gets a default here, which means what runs did before: ``compose.completed``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Annotated, Any, Literal

from polyvision.activations import activation_info
from polyvision.training.config.typed import Bounds

__all__ = [
    "ActivationConfig",
    "AnalysisConfig",
    "AugmentConfig",
    "Config",
    "DataConfig",
    "ExperimentConfig",
    "ImageDataConfig",
    "LanguageModelConfig",
    "LanguageRecipeConfig",
    "MixConfig",
    "MoEConfig",
    "RecipeConfig",
    "TargetConfig",
    "TextDataConfig",
    "TrainerConfig",
    "VisionModelConfig",
    "VisionRecipeConfig",
]

Count = Annotated[int, Bounds(ge=1)]
NonNegative = Annotated[float, Bounds(ge=0)]
Positive = Annotated[float, Bounds(gt=0)]
Share = Annotated[float, Bounds(ge=0, le=1)]


@dataclasses.dataclass(frozen=True)
class VisionModelConfig:
    """A timm model: its name, whether pretrained weights are loaded, and constructor arguments.

    ``on_leftover``: what to do about activations that cannot be replaced.
    """

    task: Literal["vision"]
    name: str
    pretrained: bool
    on_leftover: Literal["error", "warn", "ignore"]
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts; the keys are those of ``polyvision.models.language.shape.MoEShape``."""

    experts: Count
    top_k: Count
    load_balance: NonNegative
    router_z: NonNegative
    normalise: bool
    expert_coefficients: bool


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """A decoder-only transformer; ``ffn_hidden`` is the hidden size of an ungated FFN or expert."""

    task: Literal["language"]
    name: str
    context: Count
    width: Count
    layers: Count
    heads: Count
    kv_heads: Count | None
    ffn_hidden: Count
    rope_theta: Positive
    norm_eps: Positive
    qk_norm: bool
    tie_embeddings: bool
    init_std: Positive | None
    init_cutoff: Positive | None
    init_depth_scaled: bool
    checkpointing: bool
    moe: MoEConfig | None


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What every data set has: its kind and how many processes load it."""

    name: str
    workers: Annotated[int, Bounds(ge=0)] | Literal["auto"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageDataConfig(DataConfig):
    """Labelled images; ``val_fraction`` is null where the data has its own validation images."""

    task: Literal["vision"]
    val_fraction: Annotated[float, Bounds(gt=0, lt=1)] | None
    root: str | None
    options: dict[str, Any]
    image_size: Count
    mean: list[float]
    std: list[Positive]
    crop_pct: Annotated[float, Bounds(gt=0, le=1)]
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos", "random"]
    test_size: Count | None = None


@dataclasses.dataclass(frozen=True)
class TextDataConfig(DataConfig):
    """A text with a tokenizer, or prepared shards, which have theirs and are split.

    ``context``: tokens of a window, null for the model's; ``mix``: weights of several corpora;
    ``val``: folders of further validation sets.
    """

    task: Literal["language"]
    val_fraction: Annotated[float, Bounds(gt=0, lt=1)] | None
    path: str | None
    tokenizer: str | None
    context: Count | None = None
    mix: dict[str, Positive] = dataclasses.field(default_factory=dict)
    val: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of training images; 0 or null switches a part off."""

    crop_scale: list[Share]
    hflip: Share
    color_jitter: NonNegative
    auto_augment: str | None
    erase: Share
    rotate: NonNegative
    translate: Share


@dataclasses.dataclass(frozen=True)
class RecipeConfig:
    """How to train: optimizer, schedule, batch, clipping, averaging of weights.

    ``lr`` is meant for ``lr_base_batch`` samples, null for the batch whatever it is, and grows with
    the batch by ``lr_scaling``. ``warmup_lr`` null is a thousandth of the rate. ``layer_decay``
    multiplies the rate once for each layer between a parameter and the head. ``ema_decay`` null
    keeps no average.
    """

    name: str
    epochs: Count
    batch_size: Count
    accumulate: Count
    optimizer: str
    optimizer_options: dict[str, Any]
    lr: Positive
    weight_decay: NonNegative
    schedule: Literal["cosine", "step", "multistep", "poly", "wsd", "constant"]
    schedule_options: dict[str, Any]
    warmup_epochs: NonNegative
    min_lr: NonNegative
    clip_grad: Positive | None
    lr_base_batch: Count | None = None
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    warmup_lr: NonNegative | None = None
    layer_decay: Annotated[float, Bounds(gt=0, le=1)] = 1.0
    decay_norm_and_bias: bool = False
    ema_decay: Annotated[float, Bounds(gt=0, lt=1)] | None = None
    ema_warmup: bool = False


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Mixed images: the alphas of mixup and cutmix, 0 for off, and how often and in what groups.

    ``prob`` is the share of batches, pairs or images (``mode``) that are mixed; with both alphas,
    ``switch_prob`` is the share of cutmix.
    """

    mixup: NonNegative = 0.0
    cutmix: NonNegative = 0.0
    prob: Share = 1.0
    switch_prob: Share = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionRecipeConfig(RecipeConfig):
    """What only image classification has.

    ``repeats`` is how often each chosen image comes in an epoch, which stays as long.
    """

    task: Literal["vision"]
    label_smoothing: Annotated[float, Bounds(ge=0, lt=1)]
    augment: AugmentConfig
    loss: Literal["ce", "bce"] = "ce"
    bce_threshold: Annotated[float, Bounds(ge=0, lt=1)] | None = None
    mix: MixConfig = dataclasses.field(default_factory=MixConfig)
    drop: Annotated[float, Bounds(ge=0, lt=1)] = 0.0
    drop_path: Annotated[float, Bounds(ge=0, lt=1)] = 0.0
    repeats: Count = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageRecipeConfig(RecipeConfig):
    """What only language modelling has; ``z_loss`` weighs the squared log-partition.

    Tokens replace what is counted otherwise, null leaves it: ``batch_tokens`` the samples of an
    optimizer step, ``total_tokens`` the epochs, ``warmup_tokens`` the epochs of warm-up.
    ``schedule_tokens`` is where the schedule ends, null for the end of the run.
    """

    task: Literal["language"]
    z_loss: NonNegative
    batch_tokens: Count | None = None
    total_tokens: Count | None = None
    warmup_tokens: Annotated[int, Bounds(ge=0)] | None = None
    schedule_tokens: Count | None = None


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """Where and how long to train, and how often to look."""

    accelerator: Literal["auto", "cpu", "gpu"]
    devices: Count | Literal["auto"]
    max_epochs: Count
    max_steps: Count | None
    val_every_n_steps: Count | None
    checkpoint_every_n_steps: Count | None
    log_every_n_steps: Count
    histograms: bool
    deterministic: bool
    compile: bool


@dataclasses.dataclass(frozen=True)
class AnalysisConfig:
    """Analyses during training: how often (0 for never), which, and on how many samples."""

    every_n_steps: Annotated[int, Bounds(ge=0)]
    kinds: list[Literal["rank", "similarity", "cost", "health"]]
    samples: Count


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """What a metric came to at the end of a published training, and who says so.

    ``metric`` is the tag under which a run logs the same quantity; ``val/c4/loss`` is there only
    with a validation set named ``c4``. ``value`` has a number for each activation that one was
    published for; a single number holds for all.
    """

    metric: str
    value: float | dict[str, float]
    source: str

    def text(self, act: str, logged: Collection[str]) -> str:
        """Say what to expect of an activation, and where the run logs no such quantity.

        Args:
            act: the activation's label.
            logged: the tags of the run's metrics.
        """
        values = self.value if isinstance(self.value, dict) else {act: self.value}
        if act in values:
            found = f"{self.metric} {values[act]:.4f} ({self.source})"
        else:
            others = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
            found = f"none published for {act}; {self.metric}: {others} ({self.source})"
        return found if self.metric in logged else f"{found}; not measured in this run"


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """A whole recipe by name: its file chooses the other groups, and states what comes of it."""

    task: Literal["vision", "language"]
    name: str
    target: TargetConfig | None


@dataclasses.dataclass(frozen=True)
class ActivationConfig:
    """An activation by name, and the keywords its constructor is given."""

    name: str
    options: dict[str, Any]

    @property
    def label(self) -> str:
        """The name with every option that differs from its default, fit for a folder name."""
        defaults = dataclasses.asdict(activation_info(self.name).options())
        changed = [f"{k}{v}" for k, v in self.options.items() if v != defaults[k]]
        return "-".join([self.name, *changed])


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run. ``plain`` is the same as plain types, for files."""

    task: Literal["vision", "language"]
    model: VisionModelConfig | LanguageModelConfig
    act: ActivationConfig
    data: ImageDataConfig | TextDataConfig
    recipe: VisionRecipeConfig | LanguageRecipeConfig
    trainer: TrainerConfig
    analysis: AnalysisConfig
    seed: Annotated[int, Bounds(ge=0, lt=2**32)]
    precision: Literal["32", "bf16", "fp16"]
    run_root: str
    resume: str | None
    dry_run: bool
    experiment: ExperimentConfig | None = None
    finetune: str | None = None
    validate: str | None = None
    validate_output: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return nested dictionaries of plain values."""
        return dataclasses.asdict(self)
