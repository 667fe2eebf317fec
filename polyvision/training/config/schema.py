"""The keys of a configuration: types, bounds, defaults, meaning; one dataclass for each group.

A default stands here and nowhere else: ``compose`` offers it to the files of ``configs/`` as the
base of their group, and adds it to the config.yaml of a run that lacks the key. So a key that is
added needs a default that means what runs did before.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Collection
from typing import Annotated, Any, Literal, TypeVar

from polyvision.models.language.shape import TransformerSizes
from polyvision.models.vision.settings import ImagePreparation, TimmNetwork
from polyvision.training.config.recipe_options import check_schedule_options
from polyvision.typed import Bounds, Count, NonNegative, Positive, Share

__all__ = [
    "ActivationConfig",
    "AnalysisConfig",
    "AnyConfig",
    "AugmentConfig",
    "Config",
    "DataConfig",
    "ExperimentConfig",
    "ImageDataConfig",
    "LanguageConfig",
    "LanguageModelConfig",
    "LanguageRecipeConfig",
    "MixConfig",
    "ModelConfig",
    "RecipeConfig",
    "TargetConfig",
    "TextDataConfig",
    "TrainerConfig",
    "VisionConfig",
    "VisionModelConfig",
    "VisionRecipeConfig",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What every model has."""

    name: str
    """Name of the model, for the run folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionModelConfig(TimmNetwork, ModelConfig):
    """A timm model, and whether it starts with pretrained weights."""

    task: Literal["vision"] = "vision"
    """Set by the file of the model."""
    pretrained: bool = False
    """Load timm's pretrained weights before the activations are replaced."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(TransformerSizes, ModelConfig):
    """A decoder-only transformer."""

    task: Literal["language"] = "language"
    """Set by the file of the model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What every data set has."""

    name: str
    """The data set; the other keys of `data` depend on it."""
    workers: Annotated[int, Bounds(ge=0)] | Literal["auto"] = "auto"
    """Processes that load data; 0: the training process itself; `auto`: chosen from the CPU
    cores.
    """

    @property
    def location(self) -> tuple[str, str | None]:
        """The key that says where the data lies, and its value."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageDataConfig(ImagePreparation, DataConfig):
    """Labelled images."""

    task: Literal["vision"] = "vision"
    """Set by the file of the data set."""
    root: str | None = None
    """Folder of the data."""
    val_fraction: Annotated[float, Bounds(gt=0, lt=1)] | None = None
    """Share of the images that is held out for validation; null where the set has validation
    images.
    """
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further options of the data set."""

    @property
    def location(self) -> tuple[str, str | None]:
        """The key that says where the data lies, and its value."""
        return "data.root", self.root


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDataConfig(DataConfig):
    """A text with a tokenizer, or prepared shards, which have theirs and are split."""

    task: Literal["language"] = "language"
    """Set by the file of the data set."""
    workers: Annotated[int, Bounds(ge=0)] | Literal["auto"] = 0
    """Processes that load data; 0: the training process itself; `auto`: chosen from the CPU
    cores.
    """
    path: str | None = None
    """The text file, or the folder of prepared shards."""
    tokenizer: str | None = "bpe:1024"
    """`bytes`, `bpe:<vocabulary>`, or a `tokenizer.json`; null: that of prepared shards."""
    val_fraction: Annotated[float, Bounds(gt=0, lt=1)] | None = 0.1
    """Share of the text, at its end, that is held out for validation; null: prepared shards have
    their own.
    """
    context: Count | None = None
    """Tokens of a training window; null: the model's context."""
    mix: dict[str, Positive] = dataclasses.field(default_factory=dict)
    """Weights of several corpora, by folder."""
    val: dict[str, str] = dataclasses.field(default_factory=dict)
    """Further validation sets: name and folder."""

    @property
    def location(self) -> tuple[str, str | None]:
        """The key that says where the data lies, and its value."""
        return "data.path", self.path


@dataclasses.dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of training images; 0 or null switches a part off."""

    crop_scale: list[Share] = dataclasses.field(default_factory=lambda: [0.08, 1.0])
    """Smallest and largest share of the area that a random crop takes."""
    hflip: Share = 0.5
    """Probability of a horizontal flip."""
    color_jitter: NonNegative = 0.0
    """Strength of random brightness, contrast and saturation."""
    auto_augment: str | None = None
    """timm's policy, such as `rand-m7-mstd0.5`, or `ta_wide`; null: none."""
    erase: Share = 0.0
    """Probability of erasing a random rectangle."""
    rotate: NonNegative = 0.0
    """Largest random rotation, in degrees."""
    translate: Share = 0.0
    """Largest random shift, as a share of the size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """How to train: optimizer, schedule, batch, clipping, averaging of weights."""

    name: str
    """Name of the recipe, for plans and reports."""
    epochs: Count
    """Passes over the training data."""
    batch_size: Count
    """Samples of an optimizer step, over all devices and passes."""
    accumulate: Count = 1
    """Passes whose gradients add up to one optimizer step (gradient accumulation)."""
    optimizer: str
    """An optimizer of timm."""
    optimizer_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the optimizer."""
    lr: Positive
    """Highest learning rate."""
    weight_decay: NonNegative
    """Weight decay; coefficients of activations are never decayed."""
    schedule: Literal["cosine", "step", "multistep", "poly", "wsd", "constant"] = "cosine"
    """Shape of the learning rate over the steps."""
    schedule_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the schedule."""
    warmup_epochs: NonNegative
    """Epochs of linear warm-up; may be a fraction."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end."""
    clip_grad: Positive | None = None
    """Largest global norm of the gradients; null: no clipping."""
    lr_base_batch: Count | None = None
    """Batch size that `lr` is meant for; null: this batch, whatever it is."""
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    """How the rate grows with the batch beyond `lr_base_batch`."""
    warmup_lr: NonNegative | None = None
    """Learning rate at the first step of warm-up; null: a thousandth of the rate."""
    layer_decay: Annotated[float, Bounds(gt=0, le=1)] = 1.0
    """Factor of the rate, once for each layer between a parameter and the head."""
    decay_norm_and_bias: bool = False
    """Decay norms and biases too."""
    ema_decay: Annotated[float, Bounds(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights; null: none."""
    ema_warmup: bool = False
    """Let the average follow faster in the first steps."""

    def __post_init__(self) -> None:
        check_schedule_options(self.schedule, self.schedule_options)


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Mixup and cutmix: their alphas, and how often and in what groups images are mixed."""

    mixup: NonNegative = 0.0
    """Alpha of mixup; 0: off."""
    cutmix: NonNegative = 0.0
    """Alpha of cutmix; 0: off."""
    prob: Share = 1.0
    """Share of batches, pairs or images that are mixed."""
    switch_prob: Share = 0.5
    """Share of cutmix where both are on."""
    mode: Literal["batch", "pair", "elem"] = "batch"
    """Mix whole batches, pairs or single images alike."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionRecipeConfig(RecipeConfig):
    """What only image classification has."""

    task: Literal["vision"] = "vision"
    """Set by the file of the recipe."""
    label_smoothing: Annotated[float, Bounds(ge=0, lt=1)] = 0.0
    """Share of the target spread over the other classes."""
    augment: AugmentConfig = dataclasses.field(default_factory=AugmentConfig)
    loss: Literal["ce", "bce"] = "ce"
    """Cross-entropy, or binary cross-entropy for each class."""
    bce_threshold: Annotated[float, Bounds(ge=0, lt=1)] | None = None
    """Mixed targets above it become 1, the others 0; null: targets stay soft."""
    mix: MixConfig = dataclasses.field(default_factory=MixConfig)
    drop: Annotated[float, Bounds(ge=0, lt=1)] = 0.0
    """Dropout before the head."""
    drop_path: Annotated[float, Bounds(ge=0, lt=1)] = 0.0
    """Highest rate of stochastic depth."""
    repeats: Count = 1
    """How often each chosen image comes in an epoch (repeated augmentation); the epoch stays as
    long.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageRecipeConfig(RecipeConfig):
    """What only language modelling has.

    The ``*_tokens`` keys override ``batch_size``, ``epochs`` and ``warmup_epochs``; null: unused.
    """

    task: Literal["language"] = "language"
    """Set by the file of the recipe."""
    epochs: Count = 1
    """Passes over the training data."""
    optimizer: str = "adamw"
    """An optimizer of timm."""
    weight_decay: NonNegative = 0.1
    """Weight decay; coefficients of activations are never decayed."""
    warmup_epochs: NonNegative = 0.0
    """Epochs of linear warm-up; may be a fraction."""
    clip_grad: Positive | None = 1.0
    """Largest global norm of the gradients; null: no clipping."""
    z_loss: NonNegative = 0.0
    """Weight of the squared log-partition."""
    batch_tokens: Count | None = None
    """Tokens of an optimizer step, in place of `batch_size`; null: unused."""
    total_tokens: Count | None = None
    """Tokens of the whole training, in place of `epochs`; null: unused."""
    warmup_tokens: Annotated[int, Bounds(ge=0)] | None = None
    """Tokens of warm-up, in place of `warmup_epochs`; null: unused."""
    schedule_tokens: Count | None = None
    """Tokens after which the schedule ends; null: the end of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Where and how long to train, and how often to look."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """`auto`: the GPU where there is one."""
    devices: Count | Literal["auto"] = "auto"
    """Number of devices."""
    max_epochs: Count
    """Stop after this many epochs."""
    max_steps: Count | None = None
    """Stop after this many optimizer steps; the schedule ends with whichever limit comes first.
    """
    val_every_n_steps: Count | None = None
    """Optimizer steps between validations; null: one after each epoch."""
    checkpoint_every_n_steps: Count | None = None
    """Optimizer steps between checkpoints, besides the one at each validation; null: none."""
    log_every_n_steps: Count = 10
    """Optimizer steps between rows of the log."""
    histograms: bool = True
    """Record what enters and leaves each activation, at each validation."""
    deterministic: bool = False
    """Refuse operations that are not deterministic."""
    compile: bool = False
    """Compile the model with `torch.compile`."""


@dataclasses.dataclass(frozen=True)
class AnalysisConfig:
    """Analyses during training: how often (0 for never), which, and on how many samples."""

    every_n_steps: Annotated[int, Bounds(ge=0)] = 0
    """Optimizer steps between analyses; 0: none."""
    kinds: list[Literal["rank", "similarity", "cost", "health"]] = dataclasses.field(
        default_factory=lambda: ["rank", "similarity", "health"]
    )
    """Which analyses."""
    samples: Count = 16
    """Validation samples that they look at."""


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
        from polyvision.activations import activation_info  # torch, which --help does without

        defaults = dataclasses.asdict(activation_info(self.name).options())
        changed = [f"{k}{_in_a_name(v)}" for k, v in self.options.items() if v != defaults[k]]
        return "-".join([self.name, *changed])


def _in_a_name(value: Any) -> str:
    """Write a value so that it fits into the name of a folder, short and unlike any other."""
    if isinstance(value, dict):
        return ",".join(f"{key}{_in_a_name(v)}" for key, v in value.items())
    text = str(value)
    if not isinstance(value, str) or re.fullmatch(r"[\w.+-]{1,40}", text, re.ASCII):
        return text
    words = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")[:32]
    return f"_{words}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run, of either task."""

    task: Literal["vision", "language"]
    """Set by the script."""
    model: ModelConfig
    act: ActivationConfig
    """The activation, by name; its options are `act.<option>`."""
    data: DataConfig
    recipe: RecipeConfig
    trainer: TrainerConfig
    analysis: AnalysisConfig
    seed: Annotated[int, Bounds(ge=0, lt=2**32)]
    """Seed of data order, initial weights and dropout."""
    precision: Literal["32", "bf16", "fp16"] = "32"
    """fp32, or automatic mixed precision; fp16 scales the loss."""
    run_root: str = "runs"
    """Folder of all runs; a run goes to `<run_root>/<task>/<data>/<model>/<act>/seed<seed>`."""
    resume: str | None = None
    """Go on with a stopped run: `auto`, a run folder, or a checkpoint; null: a new run."""
    plugins: list[str] = dataclasses.field(default_factory=list)
    """Modules and files (`[my_module, path/to/mine.py]`) that register activations of your own."""
    finetune: str | None = None
    """Start from these weights: a run folder, checkpoint, export or file of weights."""
    validate: str | None = None
    """Measure these weights and train nothing: a run folder, checkpoint or export."""
    validate_output: str | None = None
    """File that the results of `validate` are added to; null: `validation.jsonl` beside the
    weights.
    """
    dry_run: bool = False
    """Print the plan and stop."""
    experiment: ExperimentConfig | None = None
    """A published or ready recipe by name."""

    def plain(self) -> dict[str, Any]:
        """Return nested dictionaries of plain values, for files."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig(Config):
    """A run that trains an image classifier."""

    task: Literal["vision"] = "vision"
    """Set by the script."""
    model: VisionModelConfig
    data: ImageDataConfig
    recipe: VisionRecipeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig(Config):
    """A run that trains a language model."""

    task: Literal["language"] = "language"
    """Set by the script."""
    model: LanguageModelConfig
    data: TextDataConfig
    recipe: LanguageRecipeConfig


AnyConfig = TypeVar("AnyConfig", bound=Config)
