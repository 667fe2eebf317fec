"""One training run under the microscope: loss, loss scale, skipped steps, first non-finite layer.

The loop is that of the trainers in plain PyTorch, so that it can look inside each step: AdamW,
clipping of the global norm after unscaling, dynamic loss scaling. Unlike them it goes on
after a non-finite loss, which the scaler skips, until the loss scale has collapsed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyvision.activations import activation_modules
from polyvision.analysis.stability.networks import build_network

__all__ = [
    "COLLAPSE",
    "PRECISIONS",
    "Batches",
    "Recipe",
    "Run",
    "Sighting",
    "Watch",
    "judge",
    "train",
]

PRECISIONS: dict[str, str] = {
    "fp16": "fp16 autocast, fp32 weights, dynamic loss scaling: precision=fp16 of the trainers",
    "fp16-weights": "weights, activations and gradients fp16, fp32 master copy in the optimizer, "
    "dynamic loss scaling",
    "bf16": "bf16 autocast, fp32 weights, no loss scaling",
    "fp32": "everything fp32",
}

# The scale starts at 2^16 and halves at each overflow. The trainers stop here too: gradients that
# overflow although they are divided by 16384 are out of reach.
COLLAPSE = 2.0**-14

_TRAINED = 0.75  # of ln(classes), the loss of a uniform guess
_BLOWN = 2.0


@dataclasses.dataclass(frozen=True)
class Batches:
    """A data set in memory.

    Attributes:
        inputs: (N, ...) images in fp32, or tokens in int64.
        targets: (N,) labels, or (N, T) tokens.
        classes: number of classes, or the size of the vocabulary.
    """

    inputs: Tensor
    targets: Tensor
    classes: int

    def draw(self, seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches without end, in an order of each epoch that depends on ``seed`` alone."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.inputs), generator=generator)
            for start in range(0, len(order) - size + 1, size):
                index = order[start : start + size].to(self.inputs.device)
                yield self.inputs[index], self.targets[index]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a run does, apart from network, activation and seed.

    Attributes:
        lr: learning rate after a linear warm-up over the first tenth of the steps.
        steps: optimizer steps, skipped ones included.
        batch: samples per step.
        precision: a key of ``PRECISIONS``.
        gain: factor on the initial weights.
        input_scale: factor on the inputs; ignored for tokens.
        clip: limit of the global gradient norm; None for none.
    """

    lr: float
    steps: int
    batch: int = 64
    precision: str = "fp16"
    gain: float = 1.0
    input_scale: float = 1.0
    clip: float | None = 1.0


@dataclasses.dataclass(frozen=True)
class Sighting:
    """The first non-finite value of a step.

    Attributes:
        step: number of the step, from 1.
        kind: ``output`` (forward pass), ``gradient`` (with respect to a layer's output; computed
            from the last layer to the first) or ``weight gradient``.
        layer: dotted name of the module, or of the parameter.
    """

    step: int
    kind: str
    layer: str


@dataclasses.dataclass
class Run:
    """What happened; lists have one entry per step that was begun.

    Attributes:
        network: name of the network.
        activation: name of the activation.
        seed: of the weights and of the order of the data.
        recipe: the recipe.
        guess: ln(classes), the loss of a uniform guess.
        losses: training loss of each batch before its step.
        scales: loss scale with which the step was computed; 1 without scaling.
        peaks: largest magnitude of any layer's output.
        skipped: numbers of the steps that the scaler skipped, from 1.
        sighting: first non-finite value of the run.
        outcome: ``trains``, ``stalls`` or ``diverges``; see ``judge``.
        reason: the outcome in words.
    """

    network: str
    activation: str
    seed: int
    recipe: Recipe
    guess: float
    losses: list[float] = dataclasses.field(default_factory=list)
    scales: list[float] = dataclasses.field(default_factory=list)
    peaks: list[float] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)
    sighting: Sighting | None = None
    outcome: str = ""
    reason: str = ""

    @property
    def lost(self) -> int | None:
        """First step whose loss is not finite, where the trainers end a run; None for none."""
        return next((i for i, loss in enumerate(self.losses, 1) if not math.isfinite(loss)), None)

    @property
    def last_loss(self) -> float:
        """Mean loss of the last tenth of the planned steps; infinite if one of them is missing."""
        tail = max(self.recipe.steps // 10, 1)
        last = self.losses[self.recipe.steps - tail :]
        complete = len(last) == tail and all(map(math.isfinite, last))
        return statistics.fmean(last) if complete else math.inf


def train(network: str, activation: str, seed: int, recipe: Recipe, data: Batches) -> Run:
    """Train one network and return its record; the result depends on the arguments alone.

    Args:
        network: a key of ``NETWORKS``.
        activation: a registered activation with one input.
        seed: of weights and data order: equal seeds give all activations the same of both.
        recipe: the recipe.
        data: the data; the run happens on its device.
    """
    device = data.inputs.device
    batches = data.draw(seed, recipe.batch)
    scale = recipe.input_scale if data.inputs.is_floating_point() else 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sample = data.inputs[: recipe.batch].cpu() * scale
        model = build_network(
            network, activation, sample=sample, classes=data.classes, gain=recipe.gain
        ).to(device)
    stepper = _Stepper(model, recipe, device.type)
    run = Run(network, activation, seed, recipe, math.log(data.classes))
    watch = Watch(model)
    for step in range(1, recipe.steps + 1):
        inputs, targets = next(batches)
        run.scales.append(stepper.scale)
        loss, skipped = stepper.step(step, inputs * scale, targets)
        peak, sighting = watch.read(step)
        run.losses.append(loss)
        run.peaks.append(peak)
        if skipped:
            run.skipped.append(step)
        run.sighting = run.sighting or sighting
        if stepper.scale <= COLLAPSE or (not math.isfinite(loss) and not stepper.scaling):
            break  # no later step can differ
    watch.close()
    run.outcome, run.reason = judge(run, stepper.scale)
    return run


class _Stepper:
    """One optimizer step in each of the precisions."""

    def __init__(self, model: nn.Module, recipe: Recipe, device: str) -> None:
        self.model = model.train()
        self.recipe = recipe
        self.half = recipe.precision == "fp16-weights"
        self.scaling = recipe.precision.startswith("fp16")
        if self.half:
            model.half()
        self.parameters = list(model.parameters())
        self.masters = (
            [nn.Parameter(p.detach().float()) for p in self.parameters]
            if self.half
            else self.parameters
        )
        self.optimizer = torch.optim.AdamW(self._groups(), lr=recipe.lr, betas=(0.9, 0.99))
        self.scaler = torch.amp.GradScaler(device, enabled=self.scaling)
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(recipe.precision)
        self.context: contextlib.AbstractContextManager[Any] = (
            torch.autocast(device, dtype) if dtype else contextlib.nullcontext()
        )

    def _groups(self) -> list[dict[str, Any]]:
        """Keep decay off the vectors and the coefficients of activations, as the trainers do."""
        activations = activation_modules(self.model).values()
        coefficients = {id(p) for module in activations for p in module.parameters()}
        decayed: list[nn.Parameter] = []
        kept: list[nn.Parameter] = []
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            plain = parameter.ndim > 1 and id(parameter) not in coefficients
            (decayed if plain else kept).append(master)
        return [
            {"params": decayed, "weight_decay": 0.05},
            {"params": kept, "weight_decay": 0.0},
        ]

    @property
    def scale(self) -> float:
        """The loss scale of the next step."""
        return float(self.scaler.get_scale())

    def step(self, number: int, inputs: Tensor, targets: Tensor) -> tuple[float, bool]:
        """Take one step; return the loss and whether the scaler skipped it."""
        warmup = max(self.recipe.steps // 10, 1)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * min(number / warmup, 1.0)
        if self.half and inputs.is_floating_point():
            inputs = inputs.half()
        with self.context:
            logits = self.model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
        for parameter in self.parameters:
            parameter.grad = None
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.half:
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.masters, self.recipe.clip or math.inf)
        before = self.scale
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.half:
            with torch.no_grad():
                for parameter, master in zip(self.parameters, self.masters, strict=True):
                    parameter.copy_(master)
        return loss.item(), self.scale < before


def judge(run: Run, scale: float) -> tuple[str, str]:
    """Judge a run by its last tenth of steps.

    - diverges: the loss scale fell to 2^-14 or below; or a loss there is missing or not finite; or
      their mean is above twice the loss of a uniform guess.
    - trains: their mean is below 3/4 of the loss of a uniform guess, and less than half of these
      steps were skipped.
    - stalls: everything between.

    Args:
        run: the record, without outcome.
        scale: loss scale after the last step.

    Returns:
        The outcome, and the reason in words.
    """
    tail = range(run.recipe.steps - max(run.recipe.steps // 10, 1) + 1, run.recipe.steps + 1)
    if scale <= COLLAPSE:
        return "diverges", f"loss scale collapsed at step {len(run.losses)}"
    if not math.isfinite(run.last_loss):
        return "diverges", f"loss not finite at step {run.lost}"
    text = f"loss {run.last_loss:.3g} at the end"
    if run.last_loss > _BLOWN * run.guess:
        return "diverges", text
    skips = sum(step in tail for step in run.skipped)
    if run.last_loss < _TRAINED * run.guess and 2 * skips < len(tail):
        return "trains", text
    return "stalls", text + (f", {skips} of the last {len(tail)} steps skipped" if skips else "")


class Watch:
    """Follow the outputs of every leaf module, their gradients, and those of the parameters.

    The largest magnitude of each tensor stays on its device until ``read``, so that watching adds
    few synchronisations to a step.

    Args:
        model: the network; hooks stay on it until ``close``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._outputs: list[tuple[str, Tensor]] = []
        self._gradients: list[tuple[str, Tensor]] = []
        leaves = [(name, m) for name, m in model.named_modules() if not any(m.children())]
        self._handles = [m.register_forward_hook(self._hook(name)) for name, m in leaves]

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            self._outputs.append((name, _peak(output)))
            if output.requires_grad:
                register: Callable[..., Any] = output.register_hook
                register(lambda g: self._gradients.append((name, _peak(g))))

        return hook

    def read(self, step: int) -> tuple[float, Sighting | None]:
        """Return the largest magnitude of the forward pass and the first non-finite value.

        Call it after the backward pass, before the gradients are cleared.

        Args:
            step: number of the step, for the sighting.

        Returns:
            The magnitude, infinite when the pass was not finite, and the sighting or None. What was
            collected is forgotten.
        """
        gradients = [(n, p.grad) for n, p in self._model.named_parameters() if p.grad is not None]
        weights = [(name, _peak(gradient)) for name, gradient in reversed(gradients)]
        found = None
        for kind, entries in (
            ("output", self._outputs),
            ("gradient", self._gradients),
            ("weight gradient", weights),
        ):
            broken = [name for name, value in _values(entries) if not math.isfinite(value)]
            if broken and found is None:
                found = Sighting(step, kind, broken[0])
        passed = [value for _, value in _values(self._outputs)]
        self._outputs.clear()
        self._gradients.clear()
        finite = all(map(math.isfinite, passed))
        return max(passed, default=0.0) if finite else math.inf, found

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def _peak(tensor: Tensor) -> Tensor:
    """Largest magnitude; NaN when the tensor holds one."""
    return tensor.detach().abs().amax().float()


def _values(entries: list[tuple[str, Tensor]]) -> list[tuple[str, float]]:
    """Bring all values to the host at once."""
    values = torch.stack([value for _, value in entries]).tolist() if entries else []
    return [(name, value) for (name, _), value in zip(entries, values, strict=True)]
