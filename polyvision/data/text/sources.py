"""Files of text as a stream of documents: plain, JSON lines, parquet, compressed, of any size.

A document is a whole plain text file (or a part of it between two separators), the text of one JSON
line, or one row of a parquet column. Nothing is ever held whole but one piece of about a million
characters, one JSON line, or one batch of rows. What has no text is left out: null, nothing, or
white space alone.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import dataclasses
import glob
import gzip
import importlib
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from polyvision.data.text.bad_lines import BadLines
from polyvision.data.text.tokenizers import LONGEST_PIECE, next_cut
from polyvision.data.text.utf8 import BYTE_ORDER_MARK, refuse_binary
from polyvision.errors import PolyvisionError, did_you_mean

__all__ = ["Piece", "Source", "find_sources", "read_pieces"]

_LINES = (".jsonl", ".ndjson", ".json")
_TEXT = (".txt", ".text", ".md")
_PACKED = (".bz2", ".gz", ".xz", ".zst")
# In folders .json is left alone: such files are seldom JSON lines.
_IN_FOLDERS = (*_TEXT, ".jsonl", ".ndjson", ".parquet")

_CHUNK = 1 << 20
# Characters of a piece: cut at the first border between words from the one on, at the latest at the
# other; a longer run without such a border loses at most one token boundary there.
_PIECE, _LONGEST = 1 << 18, LONGEST_PIECE


@dataclasses.dataclass(frozen=True)
class Source:
    """A file to read.

    Attributes:
        path: where it is.
        name: its name inside the input that it belongs to.
        size: its bytes.
        mtime_ns: when it was last changed.
    """

    path: Path
    name: str
    size: int
    mtime_ns: int

    @property
    def one_document(self) -> bool:
        """Whether it is a single document, unless a separator divides it."""
        return self.kind != ".parquet" and self.kind not in _LINES

    @property
    def kind(self) -> str:
        """The suffix without compression."""
        suffixes = [s.lower() for s in self.path.suffixes]
        while suffixes and suffixes[-1] in _PACKED:
            suffixes.pop()
        return suffixes[-1] if suffixes else ""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A document or a part of one, in order.

    Attributes:
        text: at most about a million characters.
        begins: a document begins here.
        ends: it ends here.
        position: bytes of the file read so far, before decompression.
    """

    text: str
    begins: bool
    ends: bool
    position: int


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """Resolve files, folders and glob patterns, each in sorted order, no file twice.

    Folders give every ``.txt``, ``.text``, ``.md``, ``.jsonl``, ``.ndjson`` and ``.parquet`` below
    them, compressed or not, except hidden ones. A file that is named may have any suffix.

    Raises:
        PolyvisionError: an input names nothing.
    """
    found: dict[Path, Source] = {}
    for text in inputs:
        path = Path(text).expanduser()
        if path.is_dir():
            files = [(f, f.relative_to(path).as_posix()) for f in sorted(path.rglob("*"))]
            files = [(f, name) for f, name in files if f.is_file() and _wanted(name)]
            if not files:
                wanted = ", ".join(_IN_FOLDERS)
                raise PolyvisionError(f"input {text!r}: no {wanted} in this folder")
        elif path.is_file():
            files = [(path, path.name)]
        elif glob.has_magic(text):
            matches = sorted(glob.glob(str(path), recursive=True))
            files = [(Path(m), Path(m).name) for m in matches if Path(m).is_file()]
            if not files:
                raise PolyvisionError(f"input {text!r}: no file matches this pattern")
        else:
            near = [str(p) for p in path.parent.glob("*")]
            hint = did_you_mean(str(path), near)
            raise PolyvisionError(f"input {text!r}: no such file or folder.{hint}")
        for file, name in files:
            stat = file.stat()
            found.setdefault(file.resolve(), Source(file, name, stat.st_size, stat.st_mtime_ns))
    return list(found.values())


def _wanted(name: str) -> bool:
    if any(part.startswith(".") for part in name.split("/")):
        return False
    return Source(Path(name), name, 0, 0).kind in _IN_FOLDERS


def read_pieces(
    source: Source, *, text_key: str, separator: str | None, bad_lines: BadLines | None = None
) -> Iterator[Piece]:
    """Read the documents of a file; those without text are left out.

    Args:
        source: the file.
        text_key: key of the text in JSON lines, column of it in parquet.
        separator: what separates the documents of plain text; None for one document a file.
        bad_lines: takes the lines of JSON lines that cannot be used; None to raise at the first.

    Raises:
        PolyvisionError: the file cannot be read, decompressed or parsed; the text names the byte,
            line or column.
    """
    if source.kind == ".parquet":
        return _parquet(source, text_key)
    if source.kind in _LINES:
        return _json_lines(source, text_key, bad_lines)
    return _plain(source, separator)


def _plain(source: Source, separator: str | None) -> Iterator[Piece]:
    text, begins, position = "", True, 0
    for chunk, position in _chunks(source):
        text += chunk
        if separator:
            *documents, text = text.split(separator)
            for document in documents:
                yield from _cut(document, begins, position)
                begins = True
        # A separator that has begun stays in the rest.
        while len(text) > _LONGEST + len(separator or ""):
            end = _end(text)
            yield Piece(text[:end], begins, False, position)
            text, begins = text[end:], False
    yield from _cut(text, begins, position)


def _cut(document: str, begins: bool, position: int) -> Iterator[Piece]:
    """Yield the rest of a document."""
    if begins and (not document or document.isspace()):
        return
    start = 0
    while len(document) - start > _LONGEST:
        end = _end(document, start)
        yield Piece(document[start:end], begins, False, position)
        start, begins = end, False
    yield Piece(document[start:], begins, True, position)


def _end(text: str, start: int = 0) -> int:
    """Return where the piece that begins at ``start`` ends, at the latest after ``_LONGEST``."""
    longest = start + _LONGEST
    return min(next_cut(text, start + _PIECE, longest + 2) or longest, longest)


class _BadLine(Exception):
    """What is wrong with a line, to be read after its number."""


def _json_lines(source: Source, key: str, bad_lines: BadLines | None) -> Iterator[Piece]:
    for number, (line, offset, position) in enumerate(_lines(source), start=1):
        try:
            text = _json_text(source, line, offset, key)
        except _BadLine as error:
            if bad_lines is None:
                raise PolyvisionError(f"{source.path}:{number}{error}") from None
            bad_lines.add(source.path, number, str(error))
            continue
        yield from _cut(text, True, position)


def _lines(source: Source) -> Iterator[tuple[bytes, int, int]]:
    """Yield the lines of a file, where each begins, and how far the file itself was read."""
    rest: list[bytes] = []  # of a line that goes on in the next chunk
    offset = position = 0
    for content, position in _bytes(source):
        *lines, tail = content.split(b"\n")
        if lines:
            lines[0] = b"".join((*rest, lines[0]))
            rest = []
        rest.append(tail)
        for line in lines:
            yield line, offset, position
            offset += len(line) + 1
    yield b"".join(rest), offset, position


def _json_text(source: Source, line: bytes, offset: int, key: str) -> str:
    """Return the text of the line that begins at ``offset``; nothing for null.

    Raises:
        _BadLine: the line cannot be used.
    """
    if not offset:
        line = line.removeprefix(BYTE_ORDER_MARK)
    try:
        decoded = line.decode()
    except UnicodeDecodeError as error:
        raise _BadLine(_not_utf8(source, line[error.start], offset + error.start)) from None
    if not decoded or decoded.isspace():
        return ""
    try:
        value = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        raise _BadLine(f": not JSON ({error}); each line must be an object") from None
    if not isinstance(value, dict):
        raise _BadLine(f": a JSON {type(value).__name__}; each line must be an object")
    if key not in value:
        keys = ", ".join(value) or "none"
        hint = did_you_mean(key, value)
        raise _BadLine(f": no key {key!r}.{hint} Keys: {keys}; see --text-key")
    text = value[key]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise _BadLine(f": {key!r} is {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of an escaped pair, such as "\ud800"
        raise _BadLine(f": {key!r} is not Unicode text ({error.reason})") from None
    return text


# The names of pyarrow's types of text; older versions lack the last.
_PARQUET_TEXT = ("string", "large_string", "string_view")


def _parquet(source: Source, column: str) -> Iterator[Piece]:
    pyarrow, parquet = _optional("pyarrow"), _optional("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(source.path)
        names = file.schema_arrow.names
        if column not in names:
            raise PolyvisionError(
                f"{source.path}: no column {column!r}.{did_you_mean(column, names)} "
                f"Columns: {', '.join(names)}; see --text-key"
            )
        kind = file.schema_arrow.field(column).type
        values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if str(values) not in _PARQUET_TEXT:
            raise PolyvisionError(f"{source.path}: column {column!r} is {kind}, not text")
        rows, done = max(1, file.metadata.num_rows), 0
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            done += len(batch)
            for text in batch.column(0).to_pylist():
                yield from _cut(text or "", True, source.size * done // rows)
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        if isinstance(error, PolyvisionError):
            raise
        raise PolyvisionError(f"{source.path} is not a readable parquet file: {error}") from None


def _chunks(source: Source) -> Iterator[tuple[str, int]]:
    """Yield the file's text bit by bit, decompressed, without a byte order mark; and the place."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    first = True
    for content, position in _bytes(source):
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            at = offset - pending + error.start
            wrong = _not_utf8(source, error.object[error.start], at)
            raise PolyvisionError(f"{source.path}{wrong}") from None
        offset += len(content)
        if first and text:
            text, first = text.removeprefix("\ufeff"), False
        yield text, position


def _not_utf8(source: Source, byte: int, offset: int) -> str:
    inside = " of the decompressed text" if source.path.suffix.lower() in _PACKED else ""
    return (
        f" is not UTF-8: byte {byte:#04x} at offset {offset}{inside}; "
        "convert it first, for example with iconv -t UTF-8"
    )


def _bytes(source: Source) -> Iterator[tuple[bytes, int]]:
    """Yield the decompressed content, an empty one last, and how far the file itself was read."""
    first = True
    try:
        with source.path.open("rb") as raw:
            for content in _decompressed(raw, source.path.suffix.lower()):
                if first:
                    refuse_binary(content, str(source.path))
                    first = False
                yield content, raw.tell()
        yield b"", source.size
    except _read_errors(source) as error:
        reason = getattr(error, "strerror", None) or error
        raise PolyvisionError(f"{source.path} cannot be read: {reason}") from None


def _decompressed(raw: IO[bytes], suffix: str) -> Iterator[bytes]:
    if suffix == ".zst":
        yield from _zstandard(raw)
        return
    kinds: dict[str, Any] = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}
    with kinds.get(suffix, contextlib.nullcontext)(raw) as file:
        while content := file.read(_CHUNK):
            yield content


def _zstandard(raw: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of all frames; the package's own reader takes a cut off file for whole."""
    decompressor = _optional("zstandard").ZstdDecompressor()
    frame = None
    while packed := raw.read(_CHUNK >> 4):
        while packed:
            frame = frame or decompressor.decompressobj()
            if content := frame.decompress(packed):
                yield content
            packed = frame.unused_data
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ended before the end of its last frame")


def _read_errors(source: Source) -> tuple[type[Exception], ...]:
    errors: tuple[type[Exception], ...] = (OSError, EOFError, lzma.LZMAError, zlib.error)
    if source.path.suffix.lower() == ".zst":
        errors += (_optional("zstandard").ZstdError,)
    return errors


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise PolyvisionError(
            f"this file needs the package {package}: pip install {package}, "
            "or pip install 'polyvision[data]'"
        ) from None
