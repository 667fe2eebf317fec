"""``polyvision export``: a trained network for other programs, as safetensors, ONNX, torch.export.

The folder of an export:

    config.json        timm's format, with a part "polyvision": network, coefficients, metrics
    model.safetensors  the weights                                  (--format safetensors)
    model.onnx         standard operations, any batch size          (--format onnx)
    model.pt2          a program of torch.export, any batch size    (--format torch-export)
    tokenizer.json     of a language model

Programs take the reference path: they hold plain operations and need no polyvision. Each is read
back and compared with the network on random inputs of other sizes before the folder appears.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyvision.errors import PolyvisionError, unknown
from polyvision.kernels import use_backend
from polyvision.models.trained.network import VisionNetwork
from polyvision.models.trained.saved import WEIGHTS, Saved, open_saved
from polyvision.models.trained.timm_config import export_config
from polyvision.models.weights.files import file_digest

__all__ = ["FORMATS", "Exported", "add_arguments", "export_saved", "run"]

# Largest error of a program, as a fraction of the largest output.
TOLERANCE = 1e-3

Run = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: where it lies.
        files: names of the files and, for a program, its largest error.
        reading: how other programs read the weights, one line each.
    """

    folder: Path
    files: dict[str, str]
    reading: list[str]


def export_saved(saved: Saved, folder: Path, formats: Sequence[str]) -> Exported:
    """Write ``saved`` to a new folder, whole or not at all.

    Args:
        saved: the trained network.
        folder: must not exist yet.
        formats: keys of ``FORMATS``.

    Raises:
        PolyvisionError: the folder exists or cannot be written, a package is missing, or a program
            computes something else than the network.
    """
    for name in formats:
        if name not in FORMATS:
            raise unknown("format", name, FORMATS)
    if folder.exists() or folder.is_symlink():
        raise PolyvisionError(f"{folder} exists already: remove it or give another --output")
    model = saved.build()
    config, reading = export_config(saved, model)
    files = {"config.json": "network, preprocessing, metrics"}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise PolyvisionError(f"cannot write {folder}: {error.strerror}") from error
    try:
        if saved.tokenizer is not None:
            (partial / "tokenizer.json").write_text(saved.tokenizer, encoding="utf-8")
            files["tokenizer.json"] = "for polyvision.data.text.tokenizers.tokenizer_from_json"
        for name in dict.fromkeys(formats):
            file, text = FORMATS[name](saved, model, partial)
            files[file] = text
        config["polyvision"]["sha256"] = {p.name: file_digest(p) for p in sorted(partial.iterdir())}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _usual_permissions(partial)
        partial.rename(folder)
    except OSError as error:
        raise PolyvisionError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(folder, files, reading if "safetensors" in formats else [])


def _usual_permissions(folder: Path) -> None:
    """Let others read what the user's mask allows; temporary and safetensors files are private."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~mask)
    folder.chmod(0o777 & ~mask)


def _safetensors(saved: Saved, model: nn.Module, folder: Path) -> tuple[str, str]:
    from safetensors.torch import save_file

    # The file has no place for channels_last strides, nor for tensors that share memory.
    tensors = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return "model.safetensors", f"{len(tensors)} tensors, the {saved.weights} weights"


def _torch_export(saved: Saved, model: nn.Module, folder: Path) -> tuple[str, str]:
    path = folder / "model.pt2"
    with _plain_operations():
        program = torch.export.export(
            model, (_example(saved, 2),), dynamic_shapes=(_dynamic(saved),), strict=False
        )
        torch.export.save(program, path)
        loaded = torch.export.load(path).module()
    return path.name, _compare(saved, model, loaded, path.name)


def _onnx(saved: Saved, model: nn.Module, folder: Path) -> tuple[str, str]:
    path = folder / "model.onnx"
    try:
        import onnx
        import onnxscript  # noqa: F401 - torch.onnx.export needs it and would say so less clearly
    except ImportError as error:
        raise PolyvisionError(
            f"--format onnx needs the package {error.name}: pip install 'polyvision[onnx]'"
        ) from error
    with _plain_operations():
        program = torch.onnx.export(
            model,
            (_example(saved, 2),),
            dynamo=True,
            dynamic_shapes=(_dynamic(saved),),
            input_names=["images" if saved.network.task == "vision" else "tokens"],
            output_names=["logits"],
            verbose=False,
        )
    assert program is not None
    program.save(path, include_initializers=True)
    onnx.checker.check_model(path)
    return path.name, _compare(saved, model, _onnx_runner(path), path.name)


def _onnx_runner(path: Path) -> Run:
    """Run a file through the reference implementation of ONNX: slow, but it needs no runtime."""
    from onnx.reference import ReferenceEvaluator

    session: Any = ReferenceEvaluator(str(path))
    (name,) = session.input_names
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


FORMATS: dict[str, Callable[[Saved, nn.Module, Path], tuple[str, str]]] = {
    "safetensors": _safetensors,
    "onnx": _onnx,
    "torch-export": _torch_export,
}


def _example(saved: Saved, batch: int, generator: torch.Generator | None = None) -> Tensor:
    network = saved.network
    if isinstance(network, VisionNetwork):
        shape = (batch, network.in_chans, network.image_size, network.image_size)
        return torch.randn(shape, generator=generator)
    length = max(2, network.shape.context // batch)
    return torch.randint(network.shape.vocab_size, (batch, length), generator=generator)


def _dynamic(saved: Saved) -> dict[int, Any]:
    batch = torch.export.Dim("batch", min=1)
    if isinstance(saved.network, VisionNetwork):
        return {0: batch}
    return {0: batch, 1: torch.export.Dim("length", min=2, max=saved.network.shape.context)}


def _compare(saved: Saved, model: nn.Module, run: Run, name: str) -> str:
    """Compare a program with the network at two batch sizes it was not made with.

    Raises:
        PolyvisionError: an output is further off than ``TOLERANCE``.
    """
    worst = share = 0.0
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 3):
        x = _example(saved, batch, generator)
        with torch.no_grad():
            expected, found = model(x), run(x)
        error = float((found - expected).abs().max())
        scale = float(expected.abs().max())
        # Not finite compares as false: such a program is refused as well.
        if found.shape != expected.shape or not error <= TOLERANCE * scale:
            raise PolyvisionError(
                f"{name} computes something else than the network: error {error:.3g} where the "
                f"largest output is {scale:.3g} (batch of {batch}). Nothing was written."
            )
        worst, share = max(worst, error), max(share, error / scale if scale else 0.0)
    return f"max error {worst:.2g} ({share:.1g} of the largest output), checked at batch 1 and 3"


@contextmanager
def _plain_operations() -> Iterator[None]:
    """Take the reference path, and keep torch's notes about exporting from users."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with use_backend("reference"), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    except OSError:
        raise
    except Exception as error:  # torch's exporters raise anything
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        raise PolyvisionError(
            f"torch cannot make a program of this network: {reason}. Its weights can be exported: "
            f"--format safetensors"
        ) from error
    finally:
        logger.setLevel(level)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "run_or_checkpoint",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a run folder, or a checkpoint in one",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="a folder that does not exist yet (default: export/ in the run folder)",
    )
    parser.add_argument(
        "--format",
        nargs="+",
        choices=tuple(FORMATS),
        default=["safetensors"],
        help="one or more (default: safetensors); programs are checked against the network",
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="best: of the best validation; last: of the last checkpoint; ema: its averaged "
        "weights (default: best, or last where there is no best)",
    )


def run(arguments: argparse.Namespace) -> str:
    """Export, and return what was written and how it is read.

    Raises:
        PolyvisionError: no such run or weights, a package is missing, or the output exists.
    """
    saved = open_saved(arguments.run_or_checkpoint, weights=arguments.weights)
    done = export_saved(saved, arguments.output or saved.folder / "export", arguments.format)
    shown = "  ".join(f"{name} {value:.4f}" for name, value in saved.metrics.items())
    width = max(map(len, done.files))
    return "\n".join(
        [
            f"{saved.source}: {saved.weights} weights of step {saved.step:,}  {shown}".rstrip(),
            f"written to {done.folder}",
            *(f"  {name:<{width}}  {text}" for name, text in done.files.items()),
            *(f"read with  {line.replace('<folder>', str(done.folder))}" for line in done.reading),
        ]
    )
