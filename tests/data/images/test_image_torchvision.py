"""The small public sets, read from stand-ins of the same layout and a few images each."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import re
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from polyvision.data.images.augment import Augment
from polyvision.data.images.registry import ImageData, load_image_data
from polyvision.data.images.torchvision import _IMAGENETTE, _wnids

PLAIN = Augment(crop_scale=(1, 1), hflip=0, crop_pct=1.0)


def zipped(content):
    return gzip.compress(content, mtime=0)  # a time would change the names of the tests


def load(name: str, root: Path | None, side: int = 28, **options: Any) -> ImageData:
    settings = {"image_size": side, "augment": PLAIN, "mean": (0, 0, 0), "std": (1, 1, 1)}
    settings |= {"val_fraction": None, "root": None if root is None else str(root)}
    return load_image_data(name, **settings | options)


def idx(values: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    return header + values.tobytes()


def gray(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 28, 28), dtype=np.uint8)


def write_fashion(folder: Path, *, packed: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count, seed in (("train", 7, 0), ("t10k", 4, 1)):
        labels = np.arange(count, dtype=np.uint8)[::-1].copy()
        for name, values in (("images-idx3", gray(count, seed)), ("labels-idx1", labels)):
            content = idx(values)
            name = f"{part}-{name}-ubyte"
            if packed:
                (folder / f"{name}.gz").write_bytes(zipped(content))
            else:
                (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("below", [".", "FashionMNIST/raw"])
def test_fashion_mnist_is_read_where_it_lies(tmp_path: Path, packed: bool, below: str) -> None:
    folder = write_fashion(tmp_path / below, packed=packed)
    before = sorted(folder.iterdir())
    data = load("fashion_mnist", tmp_path)
    assert sorted(folder.iterdir()) == before  # nothing is unpacked or copied
    assert data.classes == datasets.FashionMNIST.classes
    for part, count, seed in ((data.train, 7, 0), (data.val, 4, 1)):
        images, labels = zip(*(part[i] for i in range(count)), strict=True)
        assert len(part) == count
        assert list(labels) == list(range(count))[::-1]
        levels = (torch.stack(images) * 255).round().numpy()
        np.testing.assert_array_equal(levels, gray(count, seed)[:, None].repeat(3, axis=1))


def test_fashion_mnist_agrees_with_torchvision(tmp_path: Path) -> None:
    write_fashion(tmp_path / "FashionMNIST" / "raw", packed=False)
    theirs = datasets.FashionMNIST(str(tmp_path), train=True)
    ours = load("fashion_mnist", tmp_path).train
    np.testing.assert_array_equal(ours.images, theirs.data.numpy())
    np.testing.assert_array_equal(ours.labels, theirs.targets.numpy())


TRAIN, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        (TRAIN, b"\x1f\x8b\x08", f"cannot read .*{TRAIN}"),
        (TRAIN, b"no gzip", f"cannot read .*{TRAIN}"),
        (TRAIN, zipped(idx(gray(7, 0)))[:-999], f"cannot read .*{TRAIN}"),
        (TRAIN, zipped(b""), "is not an IDX file of bytes"),
        (TRAIN, zipped(b"\0\0\x0d\x03" + bytes(12)), "is not an IDX file of bytes"),
        (TRAIN, zipped(idx(gray(7, 0))[:-5]), "promises 5,488 values .* holds 5,483"),
        (TRAIN, zipped(idx(gray(6, 0))), "do not belong together: .* and 7 labels"),
        (LABELS, zipped(idx(np.full(7, 10, np.uint8))), "labels of shape .* up to 10"),
        (LABELS, zipped(idx(gray(7, 0))), r"labels of shape \(7, 28, 28\)"),
        (TRAIN, None, r"holds no Fashion-MNIST: the four files .*options.download=true"),
    ],
)
def test_a_damaged_fashion_file_is_one_clear_line(
    tmp_path: Path, file: str, content: bytes | None, text: str
) -> None:
    write_fashion(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=text) as caught:
        load("fashion_mnist", tmp_path)
    assert "\n" not in str(caught.value)


def write_cifar(folder: Path, cls: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Write batches of two images each, and make their checksums those that torchvision wants."""
    folder.mkdir(parents=True)
    sums: dict[str, str] = {}
    key = "labels" if cls is datasets.CIFAR10 else "fine_labels"
    for number, (name, _) in enumerate([*cls.train_list, *cls.test_list]):
        pixels = np.random.default_rng(number).integers(0, 256, (2, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, key: [number, 0]}))
    names = [f"class {i}" for i in range(10 if cls is datasets.CIFAR10 else 100)]
    (folder / cls.meta["filename"]).write_bytes(pickle.dumps({cls.meta["key"]: names}))
    for file in folder.iterdir():
        sums[file.name] = hashlib.md5(file.read_bytes()).hexdigest()
    for part in ("train_list", "test_list"):
        monkeypatch.setattr(cls, part, [[n, sums[n]] for n, _ in getattr(cls, part)])
    monkeypatch.setattr(cls, "meta", cls.meta | {"md5": sums[cls.meta["filename"]]})


@pytest.mark.parametrize(("name", "batches"), [("cifar10", 5), ("cifar100", 1)])
def test_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, batches: int) -> None:
    cls = getattr(datasets, name.upper())
    write_cifar(tmp_path / cls.base_folder, cls, monkeypatch)
    data = load(name, tmp_path, 32)
    assert (len(data.train), len(data.val)) == (2 * batches, 2)
    assert data.classes[:2] == ["class 0", "class 1"]
    assert len(data.classes) == int(name.removeprefix("cifar"))
    pixels = np.random.default_rng(batches).integers(0, 256, (2, 3072), dtype=np.uint8)
    image, label = data.val[0]
    assert label == batches
    np.testing.assert_array_equal((image * 255).round().numpy(), pixels[0].reshape(3, 32, 32))


def test_a_changed_cifar_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "cifar-10-batches-py", datasets.CIFAR10, monkeypatch)
    with (tmp_path / "cifar-10-batches-py" / "data_batch_3").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="no whole CIFAR10: the folder cifar-10-batches-py"):
        load("cifar10", tmp_path)


def write_imagenette(folder: Path) -> None:
    for part, count in (("train", 3), ("val", 2)):
        for label, name in enumerate(_wnids()):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (9, 8), (label * 20, 0, 0))
                image.save(folder / part / name / f"{number}.JPEG", quality=100)


@pytest.mark.parametrize("size", _IMAGENETTE)
def test_imagenette(tmp_path: Path, size: str) -> None:
    write_imagenette(tmp_path / _IMAGENETTE[size])
    data = load("imagenette", tmp_path, 8, size=size)
    assert (len(data.train), len(data.val)) == (30, 20)
    assert data.classes == _wnids() == sorted(datasets.Imagenette._WNID_TO_CLASS)
    image, label = data.val[7]
    assert label == 3
    assert abs(float(image[0, 0, 0]) * 255 - 60) < 3


def test_missing_images_of_imagenette_are_noted(tmp_path: Path) -> None:
    write_imagenette(tmp_path / "imagenette2-320")
    (note,) = load("imagenette", tmp_path).notes
    assert re.fullmatch(r"Imagenette has 9,469 \+ 3,925 images; .*-320 has \d+ \+ \d+", note)


def test_an_incomplete_imagenette_is_refused(tmp_path: Path) -> None:
    write_imagenette(tmp_path / "imagenette2-320")
    gone = tmp_path / "imagenette2-320" / "val" / _wnids()[4]
    gone.rename(gone.with_name("n00000001"))
    with pytest.raises(ValueError, match="imagenette2-320 is not whole: train/ has the classes"):
        load("imagenette", tmp_path)


@pytest.mark.parametrize(
    ("name", "cls", "layout"),
    [
        ("fashion_mnist", "FashionMNIST", "FashionMNIST/raw"),
        ("cifar10", "CIFAR10", "cifar-10-batches-py"),
        ("imagenette", "Imagenette", "imagenette2-320"),
    ],
)
def test_download_only_when_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cls: str, layout: str
) -> None:
    """The stand-in fetcher writes the set where torchvision would."""
    calls = []

    def fetch(self: Any) -> None:
        if calls:  # torchvision asks again and finds the files
            return
        calls.append(self.root)
        place = Path(self.root) / layout
        if name == "fashion_mnist":
            write_fashion(place, packed=False)
        elif name == "cifar10":
            write_cifar(place, datasets.CIFAR10, monkeypatch)
        else:
            write_imagenette(place)

    monkeypatch.setattr(
        getattr(datasets, cls), "_download" if name == "imagenette" else "download", fetch
    )
    with pytest.raises(ValueError, match=f"data={name} .*data.options.download=true"):
        load(name, tmp_path)
    assert not calls
    data = load(name, tmp_path, download=True)
    assert calls == [str(tmp_path)]
    assert len(data.val) > 0


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10", "imagenette"])
def test_a_failed_download_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def offline(*arguments: Any, **keywords: Any) -> None:
        raise URLError("no route to host")

    for module in (datasets.mnist, datasets.cifar, datasets.imagenette):
        monkeypatch.setattr(module, "download_and_extract_archive", offline)
    with pytest.raises(ValueError, match=f"torchvision cannot download {name}: .*no route") as got:
        load(name, tmp_path, download=True)
    assert "\n" not in str(got.value)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("cifar10", {"root": None}, "image data 'cifar10' needs data.root"),
        ("cifar10", {"val_fraction": 0.1}, "val_fraction must be null, got 0.1"),
        ("cifar10", {"download": "yes"}, "'download' of image data 'cifar10' must be true or fa"),
        ("imagenette", {"size": 320}, "'size' of image data 'imagenette' must be text, got 320"),
        ("imagenette", {"size": "320"}, "unknown imagenette size '320'. Did you mean '320px'?"),
        ("imagenette", {"max_unreadable": True}, "must be an integer, got True"),
    ],
)
def test_wrong_options(tmp_path: Path, name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        load(name, **{"root": tmp_path} | options)
