"""Trained weights on disk, whatever they lie in: a run folder, a checkpoint in one, or an export.

Neither data nor Lightning is needed: a run describes its network in ``network.json``, an export in
its ``config.json``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polyvision.activations import activation_info, activation_names
from polyvision.errors import PolyvisionError, looked_for, unknown
from polyvision.models.trained.network import Network, network_from_plain
from polyvision.models.weights.files import read_checkpoint, read_tensor_file

__all__ = [
    "WEIGHTS",
    "Saved",
    "check_registered",
    "load_model",
    "load_strictly",
    "open_saved",
]

WEIGHTS = ("best", "last", "ema")
# Entries of a checkpoint: all weights of the Lightning module, and the averaged ones if any.
_RAW, _EMA = "state_dict", "ema"
_PREFIX = "model."  # of the network in the Lightning module


@dataclasses.dataclass(frozen=True)
class Saved:
    """A trained network: what it is, its weights, and where they come from.

    Attributes:
        network: builds the network.
        tensors: its ``state_dict``.
        source: the file of the weights.
        folder: the run folder, or the export.
        weights: ``best``, ``last`` or ``ema``; for a checkpoint of another name, its name.
        step: optimizer steps that the weights were trained for.
        metrics: validation metrics at that step, where they are recorded.
        settings: what the run trained: model, activation, data, recipe, seed.
        has_ema: whether the checkpoint holds averaged weights.
    """

    network: Network
    tensors: Mapping[str, Tensor]
    source: Path
    folder: Path
    weights: str
    step: int
    metrics: Mapping[str, float]
    settings: Mapping[str, Any]
    has_ema: bool = False

    @property
    def tokenizer(self) -> str | None:
        """Of a language model, for ``tokenizer_from_json``."""
        file = self.folder / "tokenizer.json"
        return file.read_text(encoding="utf-8") if file.is_file() else None

    def build(self) -> nn.Module:
        """Build the network, load the weights strictly, and switch to eval mode.

        Raises:
            PolyvisionError: the weights do not fit the network.
        """
        model = self.network.build()
        load_strictly(model, self.tensors, str(self.source))
        return model.eval()


def load_model(path: str | Path, *, weights: str | None = None) -> nn.Module:
    """Return a trained network in eval mode: an image classifier or a ``Transformer``.

    The data that it was trained on is not needed. A classifier carries its preprocessing and class
    names in ``model.pretrained_cfg``, so ``timm.data.resolve_data_config({}, model=model)`` and
    ``timm.data.create_transform`` prepare its images. A language model's tokenizer lies beside its
    weights: ``polyvision.data.text.tokenizers.tokenizer_from_json``.

    Args:
        path: a run folder, a checkpoint in one, or the folder that ``polyvision export`` wrote.
        weights: ``best`` (the default of a run folder that has them), ``last``, or ``ema``: the
            averaged ones of the last checkpoint, or of the checkpoint that ``path`` names.

    Raises:
        PolyvisionError: there is nothing of that kind, a file is damaged, or weights do not fit.
    """
    return open_saved(path, weights=weights).build()


def open_saved(path: str | Path, *, weights: str | None = None) -> Saved:
    """Find and read trained weights; the arguments are those of ``load_model``."""
    if weights is not None and weights not in WEIGHTS:
        raise unknown("weights", weights, WEIGHTS)
    place = Path(path).expanduser()
    if place.name == "model.safetensors" and (place.parent / "config.json").is_file():
        place = place.parent
    if (place / "config.json").is_file():
        return _read_export(place, weights)
    if (place / "config.yaml").is_file():
        return _read_checkpoint(place, _find_checkpoint(place, weights), weights)
    if place.is_file():
        folder = place.absolute().parent.parent
        if place.suffix == ".ckpt" and (folder / "config.yaml").is_file():
            return _read_checkpoint(folder, place, weights)
        raise PolyvisionError(
            f"{path} does not lie in the checkpoints/ of a run folder, so nothing says which "
            f"network it belongs to"
        )
    if place.exists():
        raise PolyvisionError(
            f"{path} is neither a run folder (which holds config.yaml, for example "
            f"runs/vision/digits/resnet50/polynorm/seed0) nor an export (config.json)"
        )
    raise PolyvisionError(
        f"{path} does not exist{looked_for(path)}: give a run folder, a checkpoint or an export"
    )


def _find_checkpoint(folder: Path, weights: str | None) -> Path:
    """Return the checkpoint of a run that holds the weights asked for."""
    best, last = (folder / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    if not last.is_file() and last.with_name("previous.ckpt").is_file():  # as a resumed run does
        last = last.with_name("previous.ckpt")
    order = {"best": [best], "last": [last], "ema": [last], None: [best, last]}[weights]
    for file in order:
        if file.is_file():
            return file
    present = [file.name for file in (best, last) if file.is_file()]
    also = f"; it has {present[0]}" if present else ""
    raise PolyvisionError(f"{folder} has no checkpoint yet: it would be {order[0]}{also}")


def _read_checkpoint(folder: Path, file: Path, weights: str | None) -> Saved:
    if weights in ("best", "last") and file.stem.replace("previous", "last") != weights:
        raise PolyvisionError(
            f"{file} is one checkpoint; for the {weights} weights name the run folder {folder}"
        )
    file, state = read_checkpoint(file)
    averaged = isinstance(state.get(_EMA), Mapping)
    if weights == "ema" and not averaged:
        raise PolyvisionError(f"{file} holds no averaged weights: the run kept no EMA")
    tensors = state[_EMA if weights == "ema" else _RAW]
    description = folder / "network.json"
    if not description.is_file():
        raise PolyvisionError(
            f"{folder} has no network.json, which says what its network is: it was written by an "
            f"earlier version"
        )
    step = int(state["global_step"])
    return Saved(
        network=_registered(network_from_plain(_read_json(description), str(description)), folder),
        tensors={k.removeprefix(_PREFIX): v for k, v in tensors.items() if k.startswith(_PREFIX)},
        source=file,
        folder=folder,
        weights=weights or file.stem,
        step=step,
        metrics=_metrics(folder / "metrics.jsonl", step),
        settings=_settings(folder / "state.json"),
        has_ema=averaged,
    )


def _read_export(folder: Path, weights: str | None) -> Saved:
    description, source = folder / "config.json", folder / "model.safetensors"
    ours = _read_json(description).get("polyvision")
    if not isinstance(ours, dict) or not {"network", "weights", "step"} <= set(ours):
        raise PolyvisionError(
            f"{description} was not written by polyvision export: it does not describe activations"
        )
    if weights not in (None, ours["weights"]):
        raise PolyvisionError(f"{folder} holds the {ours['weights']} weights, not {weights}")
    if not source.is_file():
        raise PolyvisionError(
            f"{folder} has no model.safetensors: export with --format safetensors"
        )
    return Saved(
        network=_registered(network_from_plain(ours["network"], str(description)), folder),
        # An export of an earlier version has no digests.
        tensors=read_tensor_file(source, sha256=ours.get("sha256", {}).get(source.name)),
        source=source,
        folder=folder,
        weights=ours["weights"],
        step=ours["step"],
        metrics=ours.get("metrics", {}),
        settings=ours.get("settings", {}),
    )


def _registered(network: Network, folder: Path) -> Network:
    check_registered(network.activation, folder)
    return network


def check_registered(name: str, folder: Path) -> None:
    """Check that the activation of a run or export is known, and say what makes it known.

    Args:
        name: the activation.
        folder: the run folder, whose ``environment.json`` records which module of the user
            registered it, or the export, whose ``config.json`` does.

    Raises:
        PolyvisionError: it is not registered.
    """
    if name in activation_names():
        return
    try:
        origin = _recorded_origin(folder)
    except PolyvisionError:  # a damaged file
        origin = None
    if origin is None:
        try:
            activation_info(name)
        except PolyvisionError as error:
            raise PolyvisionError(f"{folder}: {error}") from error
    text = f"{folder}: its activation {name!r} is not registered in this process"
    if all(map(str.isidentifier, str(origin).split("."))):
        raise PolyvisionError(
            f"{text}: the module {origin} did that where it was trained. Add plugins=[{origin}] to "
            f"the command; in Python import {origin} first"
        )
    raise PolyvisionError(
        f"{text}: {origin} did that where it was trained. Add plugins=[{origin}] to the command, "
        f"or the place where that file lies now; in Python call "
        f"polyvision.activations.load_plugins([{origin!r}]) first. If it trains when it is "
        f"imported, move the activation to a file of its own"
    )


def _recorded_origin(folder: Path) -> str | None:
    """Return what ``activation_origin`` gave where the network was trained or exported."""
    origin: str | None = None
    if (folder / "config.json").is_file():
        ours = _read_json(folder / "config.json").get("polyvision", {})
        origin = ours.get("activation", {}).get("registered_by")
    elif (folder / "environment.json").is_file():
        origin = _read_json(folder / "environment.json").get("activation_registered_by")
    return origin


def load_strictly(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load ``tensors``, which must be exactly those of ``model``.

    Raises:
        PolyvisionError: entries are missing, left over, or of another shape.
    """
    own = model.state_dict()
    wrong = [k for k in own if k not in tensors or tensors[k].shape != own[k].shape]
    wrong += [k for k in tensors if k not in own]
    if wrong:
        shown = ", ".join(wrong[:4]) + (", ..." if len(wrong) > 4 else "")
        raise PolyvisionError(
            f"{source} does not fit the model that is described beside it: {len(wrong)} entries "
            f"are missing, new or of another shape ({shown})"
        )
    model.load_state_dict(dict(tensors))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolyvisionError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise PolyvisionError(f"{path} is damaged: it holds no keys")
    return content


def _metrics(path: Path, step: int) -> dict[str, float]:
    """Return what validation measured at ``step``; nothing where that is not recorded."""
    found: dict[str, float] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # the last line of a killed run
                continue
            if isinstance(row, dict) and row.get("step") == step:
                found |= {k: v for k, v in row.items() if k.startswith("val")}
    return found


def _settings(path: Path) -> dict[str, Any]:
    return dict(_read_json(path).get("settings", {})) if path.is_file() else {}
