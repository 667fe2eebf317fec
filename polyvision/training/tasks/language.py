"""Language modelling: next-token loss, perplexity, bits per byte, and samples of text."""

from __future__ import annotations

import json
import math
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from polyvision.activations import activation_info
from polyvision.data.text.language_data import LanguageData, load_language_data
from polyvision.data.text.tokenizers import Tokenizer
from polyvision.errors import PolyvisionError
from polyvision.models.language.generation import generate
from polyvision.models.language.loss import IGNORED
from polyvision.models.language.shape import MoEShape, TransformerShape, TransformerSizes
from polyvision.models.language.transformer import Losses, Transformer
from polyvision.models.trained.network import LanguageNetwork, network_to_plain
from polyvision.models.weights.empty import empty
from polyvision.output import count, plural
from polyvision.training.config.schema import (
    ActivationConfig,
    LanguageConfig,
    LanguageModelConfig,
    LanguageRecipeConfig,
)
from polyvision.training.logging.console import tensorboard
from polyvision.training.logging.routing_monitor import RoutingMonitor, routing_sums
from polyvision.training.loop.module import TaskModule
from polyvision.training.loop.steps import Sums
from polyvision.training.tasks.finetune import start_from
from polyvision.training.tasks.task import Task
from polyvision.typed import values_of

__all__ = ["LanguageModule", "TextSample", "build_task", "transformer_shape"]

Batch = tuple[Tensor, Tensor]


class LanguageModule(TaskModule):
    """Next-token prediction; the bytes of each token turn the summed loss into bits per byte."""

    recipe: LanguageRecipeConfig
    byte_lengths: Tensor

    def __init__(
        self, model: nn.Module, *arguments: Any, byte_lengths: Tensor, **keywords: Any
    ) -> None:
        super().__init__(model, *arguments, **keywords)
        self.register_buffer("byte_lengths", byte_lengths, persistent=False)

    def losses(self, batch: Batch) -> tuple[Tensor, Sums]:
        """Return the mean cross-entropy in nats per token plus z-loss and router losses, and sums.

        The sums tell cross-entropy, z-loss and what the routers did apart.
        """
        weight = self.recipe.z_loss
        losses: Losses = self.model(*batch, z_weight=weight)
        sums: dict[str, float | Tensor] = {
            "nats": losses.nats,
            "tokens": losses.tokens,
            "bytes": self._bytes(batch[1]),
            "positions": batch[1].numel(),
        }
        if weight:
            sums["z"] = losses.z / weight
        if losses.routing is not None:
            sums |= routing_sums(losses.routing, batch[1].numel())
        return losses.total, sums

    def training_metrics(self, totals: dict[str, Tensor], step: int) -> dict[str, float]:
        """Return loss (nats per token), perplexity, bits per byte, the tokens seen, and z-loss.

        Loss, perplexity and bits per byte are those of the cross-entropy alone, as in validation.
        ``train/z_loss`` is the mean squared log-partition, before its weight.
        """
        tokens = totals["tokens"].clamp(min=1)
        loss = float(totals["nats"] / tokens)
        metrics = {
            "train/loss": loss,
            "train/ppl": math.exp(min(loss, 700.0)),
            "train/bpb": float(totals["nats"] / (math.log(2) * totals["bytes"].clamp(min=1))),
            "train/tokens": float(totals["positions"] * step),
        }
        if "z" in totals:
            metrics["train/z_loss"] = float(totals["z"] / tokens)
        return metrics

    def count(self, batch: Batch) -> dict[str, Tensor]:
        """Return the summed cross-entropy in nats, and the number of tokens and of their bytes."""
        losses: Losses = self.model(*batch)
        return {"nats": losses.nats, "tokens": losses.tokens, "bytes": self._bytes(batch[1])}

    def _bytes(self, targets: Tensor) -> Tensor:
        """Count the bytes of the targets that count."""
        kept = targets != IGNORED
        return self.byte_lengths[targets.where(kept, 0)].where(kept, 0).sum()

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Return loss (nats per token), perplexity and bits per byte."""
        loss = totals["nats"] / totals["tokens"]
        return {
            "val/loss": loss,
            "val/ppl": math.exp(min(loss, 700.0)),
            "val/bpb": totals["nats"] / (math.log(2) * totals["bytes"]),
        }


class TextSample(Callback):
    """Generate a piece of text at each validation, to TensorBoard, and print it after the last."""

    def __init__(self, tokenizer: Tokenizer, seed: int, tokens: int = 160) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.tokens = tokens
        self.text = ""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate; every rank would make the same text, so only one does."""
        writer = tensorboard(trainer)
        if writer is None:
            return
        prompt = torch.from_numpy(self.tokenizer.encode("\n\n")).long()[None].to(pl_module.device)
        ids = generate(
            cast(Transformer, pl_module.model),
            prompt,
            self.tokens,
            temperature=0.8,
            top_p=0.95,
            seed=self.seed,
        )
        self.text = self.tokenizer.decode(ids[0].tolist()).strip()
        quoted = "\n".join(f"    {line}" for line in self.text.splitlines())
        writer.add_text("sample", quoted, trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the last sample."""
        if self.text:
            lines = "\n".join(f"  | {line}" for line in self.text.splitlines())
            print(f"Sample\n{lines}", flush=True)


def build_task(config: LanguageConfig) -> Task:
    """Load the text, build the transformer, and describe both.

    Raises:
        ValueError: text, tokenizer or shape do not fit.
    """
    data = load_language_data(
        config.data.name,
        context=_window(config.data.context, config.model.context),
        seed=config.seed,
        path=config.data.path,
        tokenizer=config.data.tokenizer,
        val_fraction=config.data.val_fraction,
        mix=config.data.mix,
        val=config.data.val,
    )
    shape = transformer_shape(config.model, config.act, data.tokenizer.vocab_size)
    model = _built(config, shape)
    network, tokenizer = LanguageNetwork(shape), data.tokenizer.to_json()
    plan = _plan(config, data, model)
    if config.finetune is not None:
        weights = start_from(config.finetune, model, network, tokenizer=tokenizer)
        plan.insert(1, ("weights", weights))

    def module(*arguments: Any, **keywords: Any) -> LanguageModule:
        lengths = torch.from_numpy(data.tokenizer.byte_lengths)
        return LanguageModule(*arguments, byte_lengths=lengths, **keywords)

    return Task(
        model=model,
        module=module,
        train=data.train,
        val=data.val,
        plan=plan,
        monitor="val/loss",
        shown=["val/loss", "val/ppl", "val/bpb", *(f"val/{name}/loss" for name in data.named)],
        make_input=lambda n: torch.zeros(n, data.val.context, dtype=torch.long),
        tokens_per_sample=data.val.context,
        callbacks=[
            TextSample(data.tokenizer, config.seed),
            *([] if shape.moe is None else [RoutingMonitor()]),
        ],
        files={
            "tokenizer.json": tokenizer,
            "network.json": json.dumps(network_to_plain(network), indent=2) + "\n",
            # The loader knows the training data by itself.
            "validation_data.json": _validation_data(data),
        },
        named_val=dict(data.named),
    )


def _validation_data(data: LanguageData) -> str:
    """Return what tells the validation sets from others."""
    content: dict[str, Any] = {"fingerprint": data.val.fingerprint()}
    if data.named:
        content["named"] = {name: each.fingerprint() for name, each in data.named.items()}
    return json.dumps(content) + "\n"


def _built(config: LanguageConfig, shape: TransformerShape) -> Transformer:
    if config.dry_run and config.finetune is None:
        return empty(lambda: Transformer(shape), lambda model: model)
    return Transformer(shape)


def transformer_shape(
    model: LanguageModelConfig, act: ActivationConfig, vocab_size: int
) -> TransformerShape:
    """Turn the configuration of a model into its shape."""
    return TransformerShape(
        vocab_size=vocab_size,
        activation=act.name,
        activation_options=act.options,
        **values_of(TransformerSizes, model),
    )


def _window(wanted: int | None, model: int) -> int:
    """Return the tokens of a window."""
    if wanted is not None and wanted > model:
        raise PolyvisionError(
            f"data.context={wanted} is longer than the model's context of {model}: lower it, or "
            f"raise model.context"
        )
    return wanted or model


def _plan(config: LanguageConfig, data: LanguageData, model: Transformer) -> list[tuple[str, str]]:
    shape = model.shape
    info = activation_info(shape.activation)
    gated = " (gated)" if info.kind == "gated" else ""
    logits = getattr(info.factory, "mixing", 0)
    mixing = f", each with {logits} x {shape.width} values more for its weights" if logits else ""
    return [
        (
            "model",
            f"{config.model.name}: {plural(shape.layers, 'layer')} of width {shape.width}, "
            f"{plural(shape.heads, 'head')}, context {shape.context}",
        ),
        *([] if shape.moe is None else [("experts", _experts(model, shape.moe))]),
        (
            "activation",
            f"{config.act.label}{gated} in {plural(shape.layers, 'feed-forward network')}{mixing}",
        ),
        ("parameters", f"{model.num_parameters:,} ({count(model.num_parameters)})"),
        *data.plan.items(),
    ]


def _experts(model: Transformer, moe: MoEShape) -> str:
    active = model.num_active_parameters
    return (
        f"{moe.experts} a layer, {moe.top_k} a token ({active:,} active parameters); load balance "
        f"{moe.load_balance:g}, router z-loss {moe.router_z:g}"
    )
