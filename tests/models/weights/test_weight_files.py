"""Files of weights: damage is seen wherever it is, and what is no file of weights is named."""

from __future__ import annotations

import argparse
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from polyvision.errors import PolyvisionError
from polyvision.models.weights.files import file_digest, read_tensor_file

STATE = {"weight": torch.arange(200.0), "bias": torch.ones(3)}


@pytest.mark.parametrize("tensor", ["weight", "bias"])
def test_one_changed_bit_of_any_tensor_is_seen(tensor: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(STATE, path)
    content = bytearray(path.read_bytes())
    place = content.index(STATE[tensor].numpy().tobytes())
    content[place + 5] ^= 1
    path.write_bytes(content)
    changed = torch.load(path, weights_only=True)[tensor]
    assert not torch.equal(changed, STATE[tensor])  # torch loads it without a word
    with pytest.raises(PolyvisionError, match=r"model\.pth cannot be read as weights: model/data/"):
        read_tensor_file(path)


def test_safetensors_are_compared_with_their_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(STATE, path)
    digest = file_digest(path)
    assert torch.equal(read_tensor_file(path, sha256=digest)["weight"], STATE["weight"])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(PolyvisionError, match=r"its content is not what was written \(SHA-256"):
        read_tensor_file(path, sha256=digest)


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    old, bare = tmp_path / "old.pth", tmp_path / "bare.pth"
    torch.save(STATE, old, _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, bare)
    finally:
        torch.serialization.set_crc32_options(True)
    for path in (old, bare):
        assert torch.equal(read_tensor_file(path)["weight"], STATE["weight"])


def scripted(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


WRONG: dict[str, tuple[Any, str]] = {
    "model": (nn.Linear(2, 2), "holds a pickled torch.nn.modules.linear.Linear"),
    "arguments": ({"args": argparse.Namespace(lr=1)}, "holds a pickled argparse.Namespace"),
    "script": (scripted, "is a TorchScript program, not a state_dict"),
    "text": (lambda path: path.write_text("hello"), "not a file of torch.save, or is damaged"),
    "zip": (zipped, "a zip file, but none of torch"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read as weights: "),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", WRONG)
def test_what_holds_no_weights_alone_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    content, text = WRONG[name]
    path = tmp_path / "file.pth"
    if callable(content) and not isinstance(content, nn.Module):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            content(path)
    else:
        torch.save(content, path)
    with pytest.raises(PolyvisionError) as error:
        read_tensor_file(path)
    assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert "weights_only`" not in str(error.value)
