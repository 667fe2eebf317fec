"""A run folder with an untrained model, as training leaves one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from polyvision.data.text.tokenizers import BPETokenizer, ByteTokenizer, Tokenizer
from polyvision.models.language.transformer import Transformer, TransformerShape
from polyvision.models.trained.network import LanguageNetwork, network_to_plain

TEXT = "the whale, the white whale; a café in Nantucket and the sea. " * 4


def write_run(folder: Path, tokenizer: Tokenizer, *, context: int = 12) -> Path:
    shape = TransformerShape(
        vocab_size=tokenizer.vocab_size,
        context=context,
        width=16,
        layers=1,
        heads=2,
        ffn_hidden=24,
        init_std=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = Transformer(shape).state_dict()
    (folder / "checkpoints").mkdir(parents=True)
    state = {"state_dict": {f"model.{k}": v for k, v in weights.items()}, "global_step": 7}
    torch.save(state, folder / "checkpoints" / "last.ckpt")
    (folder / "config.yaml").write_text("task: language\n", encoding="utf-8")
    (folder / "network.json").write_text(
        json.dumps(network_to_plain(LanguageNetwork(shape))), encoding="utf-8"
    )
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def byte_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes, which has no end token."""
    return write_run(tmp_path_factory.mktemp("bytes") / "run", ByteTokenizer())


@pytest.fixture(scope="session")
def bpe_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of subwords with an end token."""
    tokenizer = BPETokenizer.train([TEXT], 280, end_token=True)
    return write_run(tmp_path_factory.mktemp("bpe") / "run", tokenizer)
