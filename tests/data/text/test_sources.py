"""Documents from every kind of file, whatever the pieces, and every file that cannot be used."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyvision.data.text import sources as module
from polyvision.data.text.bad_lines import BadLines
from polyvision.data.text.file import read_text
from polyvision.data.text.sources import Piece, find_sources, read_pieces
from polyvision.errors import PolyvisionError

TEXTS = ["The first.\nTwo lines.", "caf\u00e9 \u2014 \U0001f40b", "third"]


def lines(values: list[Any]) -> bytes:
    return b"".join(json.dumps(v).encode() + b"\n" for v in values)


def read(path: Path, key: str = "text", separator: str | None = None) -> list[str]:
    (source,) = find_sources([str(path)])
    documents: list[str] = []
    for piece in read_pieces(source, text_key=key, separator=separator):
        documents += [piece.text] if piece.begins else []
        if not piece.begins:
            documents[-1] += piece.text
    return documents


def zstd(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(content)  # type: ignore[no-any-return]


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".bz2": bz2.compress,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


@pytest.mark.parametrize("suffix", PACK)
def test_json_lines_and_text_of_every_compression(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(PACK[suffix](lines([{"text": t, "id": 1} for t in TEXTS])))
    assert read(file) == TEXTS
    file = tmp_path / f"b.txt{suffix}"
    file.write_bytes(PACK[suffix]("<end>".join(TEXTS).encode()))
    assert read(file) == ["<end>".join(TEXTS)]
    assert read(file, separator="<end>") == TEXTS


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": [*TEXTS, None, " "], "n": range(5)}), file)
    assert read(file, "body") == TEXTS
    for key, text in (
        ("bodi", "no column 'bodi'. Did you mean 'body'? Columns: body, n"),
        ("n", "column 'n' is int64, not text"),
    ):
        with pytest.raises(PolyvisionError, match=re.escape(text)):
            read(file, key)
    file.write_bytes(b"PAR1")
    with pytest.raises(PolyvisionError, match="is not a readable parquet file"):
        read(file)


def test_line_ends_stay_and_a_byte_order_mark_goes(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffone\r\ntwo\rthree\n".encode())
    assert read(file) == ["one\r\ntwo\rthree\n"]
    file = tmp_path / "a.jsonl"
    file.write_bytes('\ufeff{"text": "a\\u2028b\u2028c"}\r\n\r\n'.encode())
    assert read(file) == ["a\u2028b\u2028c"]


def test_documents_of_white_space_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n\n\n\n \n\ntwo\n\n")
    assert read(file, separator="\n\n") == ["one", "two"]
    file.write_text(" \n")
    assert read(file) == []
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines([{"text": ""}, {"text": "x"}, {"text": "\n"}]))
    assert read(file) == ["x"]


@pytest.mark.parametrize("separator", [None, "\n\n", "<|end|>"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
def test_pieces_do_not_depend_on_the_chunks_that_are_read(
    separator: str | None, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 10)
    monkeypatch.setattr(module, "_LONGEST", 20)
    file = tmp_path / "a.txt"
    long = "no border here:" + "\u4e00" * 50 + " then words and words and words"
    file.write_text((separator or "|").join([*TEXTS, long, "a\nb c"]), encoding="utf-8")
    (source,) = find_sources([str(file)])

    def pieces() -> list[Piece]:
        return [
            Piece(p.text, p.begins, p.ends, 0)
            for p in read_pieces(source, text_key="text", separator=separator)
        ]

    whole = pieces()
    assert max(len(p.text) for p in whole) == 20
    assert sum(p.begins for p in whole) == sum(p.ends for p in whole) == (5 if separator else 1)
    monkeypatch.setattr(module, "_CHUNK", chunk)
    assert pieces() == whole


def test_inputs_are_sorted_and_read_once(tmp_path: Path) -> None:
    for name in (
        "b.txt",
        "a/c.md",
        "a/d.jsonl.gz",
        "a/.hidden.txt",
        ".git/e.txt",
        "f.json",
        "g.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_sources([str(tmp_path)])
    assert [s.name for s in found] == ["a/c.md", "a/d.jsonl.gz", "b.txt"]
    again = find_sources([str(tmp_path), str(tmp_path / "b.txt"), str(tmp_path / "g.py")])
    assert [s.name for s in again] == [*[s.name for s in found], "g.py"]
    pattern = find_sources([str(tmp_path / "**" / "*.md")])
    assert [s.name for s in pattern] == ["c.md"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}/stroy.txt", "no such file or folder. Did you mean '{}/story.txt'?"),
        ("{}/*.jsonl", "no file matches this pattern"),
        ("{}/empty", "no .txt, .text, .md, .jsonl, .ndjson, .parquet in this folder"),
    ],
)
def test_inputs_that_name_nothing(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PolyvisionError, match=re.escape(message.format(tmp_path))):
        find_sources([text.format(tmp_path)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', ":2: not JSON"),
        (b'{"text": "a"}\n\n[1]', ":3: a JSON list; each line must be an object"),
        (b'{"txt": "a"}', ":1: no key 'text'. Did you mean 'txt'? Keys: txt; see --text-key"),
        (b'{"text": 5}', ":1: 'text' is int, not text"),
        (b'{"text": "\\ud800"}', ":1: 'text' is not Unicode text"),
        (b'{"text": "a\xff"}', "is not UTF-8: byte 0xff at offset 11; convert it first"),
        (b"[" * 100_000, ":1: not JSON"),
    ],
)
def test_lines_that_cannot_be_used(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    with pytest.raises(PolyvisionError, match=re.escape(message)) as error:
        read(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"good \xff bad", "byte 0xff at offset 5"),
        (b"caf\xc3\xa9 \xe9t\xe9", "byte 0xe9 at offset 6"),
        ("\u4e00".encode()[:2], "byte 0xe4 at offset 0"),
        (b"ab\xc3", "byte 0xc3 at offset 2"),
    ],
)
def test_what_is_not_utf8_is_named_with_its_offset(
    content: bytes, place: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    with pytest.raises(PolyvisionError, match=f"is not UTF-8: {place}; convert it"):
        read(file)
    file = tmp_path / "a.txt.gz"
    file.write_bytes(gzip.compress(content))
    with pytest.raises(PolyvisionError, match=f"{place} of the decompressed text"):
        read(file)


@pytest.mark.parametrize("suffix", [".bz2", ".gz", ".xz", ".zst"])
def test_compressed_files_that_are_cut_off_or_something_else(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.txt{suffix}"
    content = PACK[suffix](" ".join(map(str, range(5000))).encode())
    for wrong in (content[: len(content) // 2], b"not compressed at all, but long enough"):
        file.write_bytes(wrong)
        with pytest.raises(PolyvisionError, match="cannot be read: "):
            read(file)


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for name, package in (("a.txt.zst", "zstandard"), ("a.parquet", "pyarrow")):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(PolyvisionError, match=f"pip install {package}"):
            read(tmp_path / name)


def test_null_is_no_text_in_every_format(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines([{"text": None}, {"text": "x"}, {"text": None, "id": 1}]))
    assert read(file) == ["x"]
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pa.table({"text": [None, "x", None]}), tmp_path / "a.parquet"
    )
    assert read(tmp_path / "a.parquet") == ["x"]


@pytest.mark.parametrize("kind", ["dictionary", "string_view", "large_string"])
def test_parquet_columns_of_every_kind_of_text(kind: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    if not hasattr(pa, kind):
        pytest.skip(f"this pyarrow has no {kind}")
    made = pa.dictionary(pa.int32(), pa.string()) if kind == "dictionary" else getattr(pa, kind)()
    values = [*TEXTS, None, *TEXTS]
    pq.write_table(
        pa.table({"text": pa.array(values, pa.string()).cast(made)}), tmp_path / "a.parquet"
    )
    assert pq.ParquetFile(tmp_path / "a.parquet").schema_arrow.field("text").type == made
    assert read(tmp_path / "a.parquet") == TEXTS * 2


def packed_tar(suffix: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=f"w:{suffix}") as archive:
        for number in range(3):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = 4
            archive.addfile(info, io.BytesIO(b"text"))
    return made.getvalue()


def packed_zip() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a.txt", "text")
    return made.getvalue()


BINARY: dict[str, tuple[bytes, str]] = {
    "a.tar": (packed_tar(""), "is a tar archive, not text: unpack it"),
    "a.tar.gz": (packed_tar("gz"), "is a tar archive, not text: unpack it"),
    "a.txt.tar.xz": (packed_tar("xz"), "is a tar archive, not text: unpack it"),
    "a.zip": (packed_zip(), "is a zip archive, not text: unpack it"),
    "a.jsonl": (packed_zip(), "is a zip archive, not text: unpack it"),
    "b.txt": (gzip.compress(b"text"), "is compressed (gzip): unpack it, or let"),
    "c.txt": (bz2.compress(b"text"), "under a name that ends in .bz2"),
    "d.txt": (lzma.compress(b"text"), "is compressed (xz)"),
    "e.txt": (b"PAR1 and so on", "is a parquet file, not text"),
    "f.txt": ("caf\u00e9".encode("utf-16-le"), "are NUL; if it is UTF-16, convert it"),
    "g.jsonl": ('{"text": "a"}'.encode("utf-16-le"), "50 % of its first 26 bytes are NUL"),
}


@pytest.mark.parametrize("name", BINARY)
def test_what_is_no_text_is_refused_by_its_content(name: str, tmp_path: Path) -> None:
    content, message = BINARY[name]
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(PolyvisionError, match=re.escape(message)) as error:
        read(file)
    assert str(error.value).startswith(str(file))
    if name.endswith(("tar", "zip", "txt")):
        with pytest.raises(PolyvisionError, match=re.escape(message)):
            read_text(file)


def test_a_text_may_hold_a_few_nul_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text\0 of some length" * 9 + "x" * 2000)
    assert len(read(tmp_path / "a.txt")[0]) == 9 * 22 + 2000


BAD = (
    b'{"text": "a"}\n[1]\n{"text": "b"}\n{"text": "\xff"}\n'
    b'{"txt": 1}\n{"text": 5}\n{"text": "c"}\n{'
)


def test_bad_lines_are_left_out_up_to_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(BAD)
    (source,) = find_sources([str(file)])
    bad = BadLines(5)
    for _ in range(2):  # the same lines count once
        pieces = read_pieces(source, text_key="text", separator=None, bad_lines=bad)
        assert [piece.text for piece in pieces] == ["a", "b", "c"]
    assert list(bad.reasons[str(file)]) == [2, 4, 5, 6, 8]
    assert bad.reasons[str(file)][4].startswith(" is not UTF-8: byte 0xff at offset 42")
    assert len(bad) == 5
    pieces = read_pieces(source, text_key="text", separator=None, bad_lines=BadLines(2))
    with pytest.raises(
        PolyvisionError, match=r"a.jsonl:5: no key 'text'.*; 2 lines before it were left out"
    ):
        list(pieces)


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_lines_do_not_depend_on_the_chunks(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        "\ufeff".encode() + json.dumps({"text": TEXTS[1]}, ensure_ascii=False).encode() + b"\r\n\n"
        b'{"text": "last"}'
    )
    assert read(file) == [TEXTS[1], "last"]
