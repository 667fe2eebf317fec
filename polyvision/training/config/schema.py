"""The typed shape of a configuration: one dataclass for each group of keys.

A key that is added gets a default here, which means what runs did before: ``compose.completed``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
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
    """Set by the file of the model."""
    name: str
    """A model of timm; `timm.list_models()` lists them."""
    pretrained: bool
    """Load timm's pretrained weights before the activations are replaced."""
    on_leftover: Literal["error", "warn", "ignore"]
    """What to do about activations that cannot be replaced."""
    options: dict[str, Any]
    """Further arguments of timm's constructor."""


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts; the keys are those of ``polyvision.models.language.shape.MoEShape``."""

    experts: Count
    """Experts in each layer."""
    top_k: Count
    """Experts that each token visits."""
    load_balance: NonNegative
    """Weight of the load-balancing loss."""
    router_z: NonNegative
    """Weight of the router's z-loss."""
    normalise: bool
    """Divide the weights of the chosen experts by their sum."""
    expert_coefficients: bool
    """Give each expert its own coefficients of the activation."""


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """A decoder-only transformer; ``ffn_hidden`` is the hidden size of an ungated FFN or expert."""

    task: Literal["language"]
    """Set by the file of the model."""
    name: str
    """Name of the model, for the run folder."""
    context: Count
    """Longest sequence, in tokens."""
    width: Count
    """Size of the hidden states."""
    layers: Count
    """Number of transformer blocks."""
    heads: Count
    """Attention heads."""
    kv_heads: Count | None
    """Heads of keys and values (grouped-query attention); null: as many as `heads`."""
    ffn_hidden: Count
    """Hidden size of a feed-forward network or expert without a gate; a gated one is made
    narrower, to equal parameters.
    """
    rope_theta: Positive
    """Base of the rotary position embedding."""
    norm_eps: Positive
    """Epsilon of the RMS norms."""
    qk_norm: bool
    """Normalise queries and keys."""
    tie_embeddings: bool
    """Use the embedding as output matrix."""
    init_std: Positive | None
    """Standard deviation of the initial weights; null: 1 / sqrt(2.5 width)."""
    init_cutoff: Positive | None
    """Cut the initial weights off at this many standard deviations; null: nowhere."""
    init_depth_scaled: bool
    """Divide the standard deviation of what writes to the residual stream by sqrt(2 layers)."""
    checkpointing: bool
    """Keep only the inputs of each block for the backward pass, and compute the rest again."""
    moe: MoEConfig | None
    """Mixture of experts in place of the feed-forward networks; null: none."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What every data set has: its kind and how many processes load it."""

    name: str
    """The data set; the other keys of `data` depend on it."""
    workers: Annotated[int, Bounds(ge=0)] | Literal["auto"]
    """Processes that load data; 0: the training process itself; `auto`: chosen from the CPU
    cores.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageDataConfig(DataConfig):
    """Labelled images; ``val_fraction`` is null where the data has its own validation images."""

    task: Literal["vision"]
    """Set by the file of the data set."""
    val_fraction: Annotated[float, Bounds(gt=0, lt=1)] | None
    """Share of the images that is held out for validation; null where the set has validation
    images.
    """
    root: str | None
    """Folder of the data."""
    options: dict[str, Any]
    """Further options of the data set."""
    image_size: Count
    """Height and width of training images, in pixels."""
    mean: list[float]
    """Mean of each channel, subtracted from pixels in 0 to 1."""
    std: list[Positive]
    """Standard deviation of each channel."""
    crop_pct: Annotated[float, Bounds(gt=0, le=1)]
    """Share of the resized validation image that the centre crop keeps."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos", "random"]
    """How images are resized."""
    test_size: Count | None = None
    """Height and width in validation; null: `image_size`."""


@dataclasses.dataclass(frozen=True)
class TextDataConfig(DataConfig):
    """A text with a tokenizer, or prepared shards, which have theirs and are split.

    ``context``: tokens of a window, null for the model's; ``mix``: weights of several corpora;
    ``val``: folders of further validation sets.
    """

    task: Literal["language"]
    """Set by the file of the data set."""
    val_fraction: Annotated[float, Bounds(gt=0, lt=1)] | None
    """Share of the text, at its end, that is held out for validation; null: prepared shards have
    their own.
    """
    path: str | None
    """The text file, or the folder of prepared shards."""
    tokenizer: str | None
    """`bytes`, `bpe:<vocabulary>`, or a `tokenizer.json`."""
    context: Count | None = None
    """Tokens of a training window; null: the model's context."""
    mix: dict[str, Positive] = dataclasses.field(default_factory=dict)
    """Weights of several corpora, by folder."""
    val: dict[str, str] = dataclasses.field(default_factory=dict)
    """Further validation sets: name and folder."""


@dataclasses.dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of training images; 0 or null switches a part off."""

    crop_scale: list[Share]
    """Smallest and largest share of the area that a random crop takes."""
    hflip: Share
    """Probability of a horizontal flip."""
    color_jitter: NonNegative
    """Strength of random brightness, contrast and saturation."""
    auto_augment: str | None
    """timm's policy, such as `rand-m7-mstd0.5`, or `ta_wide`; null: none."""
    erase: Share
    """Probability of erasing a random rectangle."""
    rotate: NonNegative
    """Largest random rotation, in degrees."""
    translate: Share
    """Largest random shift, as a share of the size."""


@dataclasses.dataclass(frozen=True)
class RecipeConfig:
    """How to train: optimizer, schedule, batch, clipping, averaging of weights.

    ``lr`` is meant for ``lr_base_batch`` samples, null for the batch whatever it is, and grows with
    the batch by ``lr_scaling``. ``warmup_lr`` null is a thousandth of the rate. ``layer_decay``
    multiplies the rate once for each layer between a parameter and the head. ``ema_decay`` null
    keeps no average.
    """

    name: str
    """Name of the recipe, for plans and reports."""
    epochs: Count
    """Passes over the training data."""
    batch_size: Count
    """Samples of an optimizer step, over all devices and passes."""
    accumulate: Count
    """Passes whose gradients add up to one optimizer step (gradient accumulation)."""
    optimizer: str
    """An optimizer of timm."""
    optimizer_options: dict[str, Any]
    """Further arguments of the optimizer."""
    lr: Positive
    """Highest learning rate."""
    weight_decay: NonNegative
    """Weight decay; coefficients of activations are never decayed."""
    schedule: Literal["cosine", "step", "multistep", "poly", "wsd", "constant"]
    """Shape of the learning rate over the steps."""
    schedule_options: dict[str, Any]
    """Further arguments of the schedule."""
    warmup_epochs: NonNegative
    """Epochs of linear warm-up; may be a fraction."""
    min_lr: NonNegative
    """Learning rate at the end."""
    clip_grad: Positive | None
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


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Mixed images: the alphas of mixup and cutmix, 0 for off, and how often and in what groups.

    ``prob`` is the share of batches, pairs or images (``mode``) that are mixed; with both alphas,
    ``switch_prob`` is the share of cutmix.
    """

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
    """What only image classification has.

    ``repeats`` is how often each chosen image comes in an epoch, which stays as long.
    """

    task: Literal["vision"]
    """Set by the file of the recipe."""
    label_smoothing: Annotated[float, Bounds(ge=0, lt=1)]
    """Share of the target spread over the other classes."""
    augment: AugmentConfig
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
    """What only language modelling has; ``z_loss`` weighs the squared log-partition.

    Tokens replace what is counted otherwise, null leaves it: ``batch_tokens`` the samples of an
    optimizer step, ``total_tokens`` the epochs, ``warmup_tokens`` the epochs of warm-up.
    ``schedule_tokens`` is where the schedule ends, null for the end of the run.
    """

    task: Literal["language"]
    """Set by the file of the recipe."""
    z_loss: NonNegative
    """Weight of the squared log-partition."""
    batch_tokens: Count | None = None
    """Tokens of an optimizer step, in place of `batch_size`; null: unused."""
    total_tokens: Count | None = None
    """Tokens of the whole training, in place of `epochs`; null: unused."""
    warmup_tokens: Annotated[int, Bounds(ge=0)] | None = None
    """Tokens of warm-up, in place of `warmup_epochs`; null: unused."""
    schedule_tokens: Count | None = None
    """Tokens after which the schedule ends; null: the end of the run."""


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """Where and how long to train, and how often to look."""

    accelerator: Literal["auto", "cpu", "gpu"]
    """`auto`: the GPU where there is one."""
    devices: Count | Literal["auto"]
    """Number of devices."""
    max_epochs: Count
    """Stop after this many epochs."""
    max_steps: Count | None
    """Stop after this many optimizer steps; the schedule ends with whichever limit comes first.
    """
    val_every_n_steps: Count | None
    """Optimizer steps between validations; null: one after each epoch."""
    checkpoint_every_n_steps: Count | None
    """Optimizer steps between checkpoints, besides the one at each validation; null: none."""
    log_every_n_steps: Count
    """Optimizer steps between rows of the log."""
    histograms: bool
    """Record what enters and leaves each activation, at each validation."""
    deterministic: bool
    """Refuse operations that are not deterministic."""
    compile: bool
    """Compile the model with `torch.compile`."""


@dataclasses.dataclass(frozen=True)
class AnalysisConfig:
    """Analyses during training: how often (0 for never), which, and on how many samples."""

    every_n_steps: Annotated[int, Bounds(ge=0)]
    """Optimizer steps between analyses; 0: none."""
    kinds: list[Literal["rank", "similarity", "cost", "health"]]
    """Which analyses."""
    samples: Count
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


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run. ``plain`` is the same as plain types, for files."""

    task: Literal["vision", "language"]
    """Set by the script."""
    model: VisionModelConfig | LanguageModelConfig
    act: ActivationConfig
    """The activation, by name; its options are `act.<option>`."""
    data: ImageDataConfig | TextDataConfig
    recipe: VisionRecipeConfig | LanguageRecipeConfig
    trainer: TrainerConfig
    analysis: AnalysisConfig
    seed: Annotated[int, Bounds(ge=0, lt=2**32)]
    """Seed of data order, initial weights and dropout."""
    precision: Literal["32", "bf16", "fp16"]
    """fp32, or automatic mixed precision; fp16 scales the loss."""
    run_root: str
    """Folder of all runs; a run goes to `<run_root>/<task>/<data>/<model>/<act>/seed<seed>`."""
    resume: str | None
    """Go on with a stopped run: `auto`, a run folder, or a checkpoint; null: a new run."""
    dry_run: bool
    """Print the plan and stop."""
    plugins: list[str] = dataclasses.field(default_factory=list)
    """Modules and files (`[my_module, path/to/mine.py]`) that register activations of your own."""
    experiment: ExperimentConfig | None = None
    """A published or ready recipe by name."""
    finetune: str | None = None
    """Start from these weights: a run folder, checkpoint, export or file of weights."""
    validate: str | None = None
    """Measure these weights and train nothing: a run folder, checkpoint or export."""
    validate_output: str | None = None
    """File that the results of `validate` are added to; null: `validation.jsonl` beside the
    weights.
    """

    def plain(self) -> dict[str, Any]:
        """Return nested dictionaries of plain values."""
        return dataclasses.asdict(self)
