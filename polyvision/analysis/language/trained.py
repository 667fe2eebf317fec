"""A trained language model with its tokenizer, on a device, in a precision."""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from polyvision.analysis.device import add_device_argument, pick_device
from polyvision.data.text.tokenizers import Tokenizer, tokenizer_from_json
from polyvision.errors import PolyvisionError
from polyvision.models.language.transformer import Transformer
from polyvision.models.trained.saved import WEIGHTS, Saved, open_saved

__all__ = ["TrainedModel", "add_model_arguments", "open_language_model"]

_DTYPES = {"32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A language model that is ready for use.

    Attributes:
        model: in eval mode.
        tokenizer: the one it was trained with.
        device: where it is.
        dtype: of matrix products; below fp32 by autocast.
        source: the file of its weights.
        folder: of the run or export.
        step: optimizer steps it was trained for.
    """

    model: Transformer
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype
    source: Path
    folder: Path
    step: int

    @property
    def first(self) -> int:
        """The token that stands before a text: the end of a document, or else of a line."""
        if self.tokenizer.end is not None:
            return self.tokenizer.end
        return int(self.tokenizer.encode("\n")[-1])

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context to compute in."""
        low = self.dtype != torch.float32
        context: AbstractContextManager[None] = torch.autocast(
            self.device.type, self.dtype if low else torch.bfloat16, enabled=low
        )
        return context


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that ``open_language_model`` takes."""
    parser.add_argument(
        "run_or_checkpoint",
        type=Path,
        metavar="RUN",
        help="a run folder, a checkpoint in one, or the folder of an export",
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="best: of the best validation; last: of the last checkpoint; ema: its averaged "
        "weights (default: best, or last where there is no best)",
    )
    add_device_argument(parser)
    parser.add_argument(
        "--precision",
        choices=tuple(_DTYPES),
        default="32",
        help="of matrix products (default: %(default)s)",
    )


def open_language_model(arguments: argparse.Namespace) -> TrainedModel:
    """Build the model that the arguments of ``add_model_arguments`` name.

    Raises:
        PolyvisionError: no such weights or device, or they are no language model's.
    """
    device = pick_device(arguments.device)
    saved = open_saved(arguments.run_or_checkpoint, weights=arguments.weights)
    tokenizer = _tokenizer(saved)
    model = saved.build()
    assert isinstance(model, Transformer)
    return TrainedModel(
        model=model.to(device),
        tokenizer=tokenizer,
        device=device,
        dtype=_DTYPES[arguments.precision],
        source=saved.source,
        folder=saved.folder,
        step=saved.step,
    )


def _tokenizer(saved: Saved) -> Tokenizer:
    if saved.network.task != "language":
        raise PolyvisionError(
            f"{saved.source} is a {saved.network.task} model ({saved.network.name}), this needs a "
            f"language model, for example runs/language/book/lm_tiny/polynorm/seed0"
        )
    if saved.tokenizer is None:
        raise PolyvisionError(
            f"{saved.folder} has no tokenizer.json, without which text means nothing to the model"
        )
    return tokenizer_from_json(saved.tokenizer)
