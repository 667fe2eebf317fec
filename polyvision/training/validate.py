"""``validate=``: measure trained weights on the validation set; nothing is trained.

The network comes from the weights, and so does what its images need: size, mean, std, crop,
interpolation, unless the command line gives another value. The data is the run's own, or that of
``data=``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from polyvision.errors import PolyvisionError
from polyvision.models.language.shape import TransformerSizes
from polyvision.models.trained.network import VisionNetwork
from polyvision.models.trained.saved import Saved, load_strictly, open_saved
from polyvision.models.vision.settings import ImagePreparation, TimmNetwork
from polyvision.output import plural
from polyvision.training.config.compose import SCRIPTS
from polyvision.training.config.schema import (
    ActivationConfig,
    AnyConfig,
    Config,
    DataConfig,
    ImageDataConfig,
    LanguageModelConfig,
    ModelConfig,
    VisionModelConfig,
)
from polyvision.training.loading.loader import val_loader
from polyvision.training.loading.workers import worker_count
from polyvision.training.logging.quiet import quiet
from polyvision.training.logging.summary import format_table
from polyvision.training.loop.devices import resolve_hardware
from polyvision.training.restore import read_config
from polyvision.training.tasks.task import Task
from polyvision.typed import values_of

__all__ = ["validate"]

# Keys of the data that hold values by names of any kind.
_OPEN = ("options", "mix", "val")


def validate(
    config: AnyConfig, build: Callable[[AnyConfig], Task], given: set[str]
) -> list[dict[str, Any]]:
    """Measure the weights that ``config.validate`` names, print a table, and record the result.

    Args:
        config: of the command line.
        build: makes data and network, as for training.
        given: the keys that the command line sets, such as ``data`` or ``data.crop_pct``.

    Returns:
        One record for the raw weights, and one for the averaged ones where the checkpoint has them.

    Raises:
        PolyvisionError: there are no such weights, the data does not fit them, or the result cannot
            be written.
    """
    assert config.validate is not None
    saved = open_saved(config.validate)
    if saved.network.task != config.task:
        raise PolyvisionError(
            f"validate={config.validate} is a {saved.network.task} model: "
            f"run python {SCRIPTS[saved.network.task]}.py"
        )
    config = _as_trained(config, saved, given)
    hardware = resolve_hardware(config)
    quiet()
    task = build(config)
    _same_data(saved, task)
    module = task.module(
        task.model,
        config.recipe,
        seed=config.seed,
        total_steps=1,
        epoch_steps=1,
        named_val=tuple(task.named_val),
    )
    records = []
    for weights in _each_weights(saved):
        load_strictly(task.model, weights.tensors, str(weights.source))
        trainer = Trainer(
            **hardware.trainer_arguments(),
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=sys.stderr.isatty(),
            use_distributed_sampler=False,
        )
        loaders = [
            val_loader(
                samples,
                config.recipe.batch_size,
                workers=worker_count(config.data.workers, 1),
                collate=task.collate,
            )
            for samples in (task.val, *task.named_val.values())
        ]
        found = trainer.validate(module, loaders, verbose=False)
        metrics = {name: value for each in found for name, value in each.items()}
        records.append(_record(config, weights, task, metrics))
    _report(config, saved, task, records)
    _write(config, saved, records)
    return records


def _as_trained(config: AnyConfig, saved: Saved, given: set[str]) -> AnyConfig:
    """Return the configuration with the network of the weights and the data to measure it on."""
    network = saved.network
    model: ModelConfig
    if isinstance(network, VisionNetwork):
        model = VisionModelConfig(**values_of(TimmNetwork, network))
    else:
        model = LanguageModelConfig(name=network.name, **values_of(TransformerSizes, network.shape))
    return dataclasses.replace(
        config,
        model=model,
        act=ActivationConfig(network.activation, dict(network.activation_options)),
        data=_data(config, saved, given),
        recipe=dataclasses.replace(config.recipe, ema_decay=None),
        trainer=dataclasses.replace(config.trainer, devices=1),
    )


def _data(config: Config, saved: Saved, given: set[str]) -> DataConfig:
    """Return the data of ``data=``, or the run's own, with the values given on the command line."""
    asked: Any = config.data
    network = saved.network
    values: dict[str, Any] = {}
    if "data" not in given:
        recorded = saved.folder / "config.yaml"
        if not recorded.is_file():
            raise PolyvisionError(f"validate={config.validate} is no run: say on what, with data=")
        data = read_config(recorded).data
        values = values_of(type(data), data)
    if isinstance(network, VisionNetwork):
        values |= values_of(ImagePreparation, network)
        if "data.image_size" in given:  # the size that images are validated at, then
            values["test_size"] = None
    elif "data" in given and asked.tokenizer is not None and saved.tokenizer is not None:
        whole = json.loads(saved.tokenizer).get("type") == "bytes"
        values["tokenizer"] = "bytes" if whole else str(saved.folder / "tokenizer.json")
    for key in list(values):
        if f"data.{key}" in given:
            del values[key]
    for key in _OPEN:
        if hasattr(asked, key):
            whole = "data" in given or f"data.{key}" in given
            chosen = {
                k: v for k, v in getattr(asked, key).items() if whole or f"data.{key}.{k}" in given
            }
            values[key] = values.get(key, {}) | chosen
    found: DataConfig = dataclasses.replace(asked, **values)
    return found


def _same_data(saved: Saved, task: Task) -> None:
    """Refuse labels or tokens that mean something else than in training."""
    network = saved.network
    if isinstance(network, VisionNetwork):
        classes = json.loads(task.files["network.json"])["classes"]
        if classes != network.classes:
            raise PolyvisionError(_other_classes(network.classes, classes))
    elif saved.tokenizer not in (None, task.files["tokenizer.json"]):
        raise PolyvisionError(
            f"the data is not encoded by the tokenizer that {saved.source} was trained with: "
            f"leave data.tokenizer out"
        )


def _other_classes(trained: list[str], found: list[str]) -> str:
    text = f"the weights were trained on {len(trained)} classes, the data has {len(found)}"
    if len(trained) == len(found):
        text = "the data has other classes than the weights were trained on"
    for name, names in (
        ("only the weights know", [c for c in trained if c not in found]),
        ("only the data has", [c for c in found if c not in trained]),
    ):
        if names:
            text += f"; {name} {', '.join(names[:5])}" + (", ..." if names[5:] else "")
    if sorted(trained) == sorted(found):
        text += ": the same names in another order, so labels would not fit"
    return text + ". Give data= with the same classes"


def _each_weights(saved: Saved) -> list[Saved]:
    """Return the raw weights, then the averaged ones if the checkpoint has them."""
    if not saved.has_ema:
        return [saved]
    return [saved, open_saved(saved.source, weights="ema")]


def _record(config: Config, saved: Saved, task: Task, found: Mapping[str, float]) -> dict[str, Any]:
    data = {k: v for k, v in dataclasses.asdict(config.data).items() if k != "workers"}
    main, *_ = _by_set(task, task.shown)  # the others have the same metrics
    rest = [name.removeprefix("val/") for name in main]
    names = main + [f"val/{place}/{name}" for place in task.named_val for name in rest]
    return {
        "weights": str(saved.source),
        "kind": saved.weights,
        "step": saved.step,
        "data": data,
        "samples": len(task.val),
        "precision": config.precision,
        "metrics": {name: float(found[name]) for name in names},
    }


def _by_set(task: Task, metrics: Iterable[str]) -> list[list[str]]:
    """Return the names of the main set's metrics, and of those of each named set."""
    places = [f"val/{name}/" for name in task.named_val]
    main = [name for name in metrics if not name.startswith(tuple(places))]
    return [main, *([name for name in metrics if name.startswith(place)] for place in places)]


def _report(config: Config, saved: Saved, task: Task, records: Sequence[Mapping[str, Any]]) -> None:
    data = config.data
    rows = [
        ("weights", f"{saved.source}, step {saved.step:,}"),
        ("network", f"{saved.network.name}, {config.act.label}"),
        ("data", next(text for label, text in task.plan if label in ("data", "text"))),
        ("validated on", f"{plural(len(task.val), 'sample')}, precision {config.precision}"),
    ]
    if isinstance(data, ImageDataConfig):
        size = data.test_size or data.image_size
        crop = f"{size} px, crop {data.crop_pct:g}, {data.interpolation}"
        rows.append(("images", crop))
    rows += [
        (f"val {name}", plural(len(samples), "sample")) for name, samples in task.named_val.items()
    ]
    rows += [
        (record["kind"], "  ".join(f"{name} {record['metrics'][name]:.4f}" for name in names))
        for record in records
        for names in _by_set(task, record["metrics"])
    ]
    print(format_table("Validation", rows), flush=True)


def _write(config: Config, saved: Saved, records: Sequence[Mapping[str, Any]]) -> None:
    """Add one line for each record to the file of results."""
    default = saved.folder / "validation.jsonl"
    path = Path(config.validate_output).expanduser() if config.validate_output else default
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    except OSError as error:
        raise PolyvisionError(
            f"cannot write {path}: {error.strerror}; validate_output=<file> takes another place"
        ) from error
    print(f"added to {path}", flush=True)
