"""From text files to token shards: in several processes, in little memory, the same every time.

One process reads documents and writes tokens, the others encode. Pieces of text go out and come
back in order, so the number of processes changes nothing in the result. Every few seconds the
place is noted in ``progress.json``; a run that was killed goes on from there and writes the same
bytes as one that was not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from polyvision.data.corpus import INDEX, INDEX_VERSION, PROGRESS, TOKENIZER, Corpus
from polyvision.data.encoding import Encoded, encode_in_order
from polyvision.data.lock import LOCK, only_writer
from polyvision.data.part_writer import PartWriter
from polyvision.data.sources import Piece, Source, read_pieces
from polyvision.data.tokenizer_spec import TokenizerSpec, parse_tokenizer
from polyvision.data.tokenizers import Tokenizer, tokenizer_from_json
from polyvision.errors import PolyvisionError

__all__ = ["Settings", "in_validation", "prepare"]

# The characters of the training part that a BPE is learned from: the first ones of each file.
_LEARN = 32 << 20
# A document's side of the split depends on this many of its first characters.
_HEAD = 1 << 16
_NOTE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the result depends on, beside the text.

    Attributes:
        tokenizer: ``bytes``, ``bpe:<vocabulary>`` or a path, see ``parse_tokenizer``.
        val_fraction: share of the documents that validates, 0 for none.
        seed: chooses which.
        shard_tokens: a shard ends with the document that reaches this many tokens.
        text_key: key or column of the text, in JSON lines and parquet.
        separator: what separates documents in plain text; None for one a file.
    """

    tokenizer: str
    val_fraction: float = 0.05
    seed: int = 0
    shard_tokens: int = 1 << 26
    text_key: str = "text"
    separator: str | None = None


def in_validation(text: str, fraction: float, seed: int) -> bool:
    """Say whether the document that begins with ``text`` validates.

    A hash of the seed and the first 65,536 characters decides: the order of documents, the names
    of files and the other documents do not matter, and copies of a document stay together.
    """
    digest = hashlib.blake2b(text[:_HEAD].encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def prepare(
    sources: list[Source],
    out: Path,
    settings: Settings,
    *,
    workers: int = 1,
    overwrite: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Corpus:
    """Write ``sources`` as a corpus into the folder ``out``, or go on with it.

    Args:
        sources: what to read, in this order.
        out: a new or empty folder, or one of the same sources and settings.
        settings: what the result depends on.
        workers: processes that encode; 1 for none beside this one.
        overwrite: delete a corpus that is there.
        on_progress: called with the bytes read so far, of all files.

    Raises:
        PolyvisionError: a value is out of range, the folder holds something else, a file cannot be
            read, or there is no text.
    """
    _check(settings, workers)
    spec = parse_tokenizer(settings.tokenizer)
    recipe = dataclasses.asdict(settings) | {
        "tokenizer": settings.tokenizer if spec.kind != "file" else _sha256(spec.definition),
        "inputs": _sha256("".join(f"{s.name}\0{s.size}\n" for s in sources)),
        "files": len(sources),
    }
    work = _Work(sources, out, settings, recipe, workers, on_progress)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not overwrite and _noted(out, recipe) is None and (out / INDEX).exists():
            return Corpus(out, "--out")
        with only_writer(out, "choose another --out"):
            if overwrite:
                _clear(out, recipe)
            noted = _noted(out, recipe)  # again, now that nobody else writes
            if noted is not None or not (out / INDEX).exists():
                _go_on(work, spec, noted)
    except OSError as error:
        what = error.filename or "a shard"  # a full disk names no file
        rest = "; the same command goes on" if (out / PROGRESS).exists() else ""
        raise PolyvisionError(f"--out {out}: cannot write {what}: {error.strerror}{rest}") from None
    return Corpus(out, "--out")


@dataclasses.dataclass(frozen=True)
class _Work:
    """What is to be done; ``recipe`` is what a folder must have been made with to go on."""

    sources: list[Source]
    out: Path
    settings: Settings
    recipe: dict[str, Any]
    workers: int
    on_progress: Callable[[int], None] | None


def _go_on(work: _Work, spec: TokenizerSpec, noted: dict[str, Any] | None) -> None:
    """Do what is left to do; the index comes last."""
    out, recipe = work.out, work.recipe
    if noted is None:  # claims the folder, for one that is killed before the first note
        _write(out / PROGRESS, json.dumps({"settings": recipe}))
    if (out / TOKENIZER).exists():
        tokenizer = tokenizer_from_json((out / TOKENIZER).read_text(encoding="utf-8"))
    else:
        tokenizer = spec.make(_learn_from(work.sources, work.settings), end_token=True)
        _write(out / TOKENIZER, tokenizer.to_json())
    parts = _encode_all(work, tokenizer, noted)
    index = {
        "version": INDEX_VERSION,
        "tokenizer": {
            "sha256": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "end": tokenizer.end,
        },
        "settings": recipe,
        "parts": parts,
    }
    _write(out / INDEX, json.dumps(index, indent=1) + "\n")
    (out / PROGRESS).unlink()


def _check(settings: Settings, workers: int) -> None:
    if not 0 <= settings.val_fraction < 1:
        raise PolyvisionError(
            f"--val-fraction must be at least 0 and less than 1, got {settings.val_fraction}"
        )
    if settings.shard_tokens < 1:
        raise PolyvisionError(f"--shard-tokens must be positive, got {settings.shard_tokens}")
    if workers < 1:
        raise PolyvisionError(f"--workers must be at least 1, got {workers}")
    if settings.separator == "":
        raise PolyvisionError("--separator is empty; leave it out for one document a file")


def _encode_all(work: _Work, tokenizer: Tokenizer, noted: dict[str, Any] | None) -> dict[str, Any]:
    """Encode everything after the noted place; return the counts of the parts."""
    sources, out, settings = work.sources, work.out, work.settings
    noted = noted or {}
    file, item = noted.get("file", 0), noted.get("item", 0)
    side: str = noted.get("side", "train")
    names = ["train", "val"] if settings.val_fraction else ["train"]
    pieces = _pieces(sources, settings, file, item)
    before = [0]
    for source in sources:
        before.append(before[-1] + source.size)
    with ExitStack() as stack:
        writers = {
            name: PartWriter(
                out,
                name,
                vocab_size=tokenizer.vocab_size,
                tokenizer=tokenizer.fingerprint,
                shard_tokens=settings.shard_tokens,
                state=noted.get("parts", {}).get(name),
            )
            for name in names
        }
        for writer in writers.values():
            stack.callback(writer.close)

        def note() -> None:
            state = {name: writer.state() for name, writer in writers.items()}
            place = {"file": file, "item": item, "side": side, "parts": state}
            _write(out / PROGRESS, json.dumps({"settings": work.recipe} | place))

        note()
        last = time.monotonic()
        encoded = stack.enter_context(encode_in_order(tokenizer, pieces, work.workers))
        for number, piece, found in encoded:
            if piece.begins and settings.val_fraction:
                validates = in_validation(piece.text, settings.val_fraction, settings.seed)
                side = "val" if validates else "train"
            _add(writers[side], piece, found, tokenizer.end)
            file, item = (number, item + 1) if number == file else (number, 1)
            if work.on_progress is not None:
                work.on_progress(before[number] + piece.position)
            if time.monotonic() - last > _NOTE_SECONDS:
                note()
                last = time.monotonic()
        parts = {name: writer.finish() for name, writer in writers.items()}
    try:
        _check_parts(parts, len(sources))
    except PolyvisionError:
        _clear(out, work.recipe)
        raise
    return parts


def _add(writer: PartWriter, piece: Piece, encoded: Encoded, end: int | None) -> None:
    writer.add(*encoded)
    if piece.ends:
        if end is not None:
            writer.add(np.array([end]), 0)
        writer.end_document()


def _pieces(
    sources: list[Source], settings: Settings, file: int, item: int
) -> Iterator[tuple[int, Piece]]:
    """Yield (number of the file, piece) from piece ``item`` of file ``file`` on."""
    for number, source in enumerate(sources[file:], start=file):
        pieces = read_pieces(source, text_key=settings.text_key, separator=settings.separator)
        for piece in islice(pieces, item, None):
            yield number, piece
        item = 0


def _learn_from(sources: list[Source], settings: Settings) -> Iterator[str]:
    """Yield the text that a BPE is learned from: an equal share of each file's training part."""
    share = max(1, _LEARN // max(1, len(sources)))
    for source in sources:
        taken, learns = 0, True
        for _, piece in _pieces([source], settings, 0, 0):
            if piece.begins:
                learns = not in_validation(piece.text, settings.val_fraction, settings.seed)
            if learns:
                yield piece.text[: share - taken]
                taken += len(piece.text)
            if taken >= share:
                break


def _check_parts(parts: dict[str, Any], files: int) -> None:
    """Refuse a corpus, or a part of it, without a document."""
    total = sum(part["documents"] for part in parts.values())
    if not total:
        raise PolyvisionError(f"no text in {files:,} files: nothing but white space")
    for name, part in parts.items():
        if not part["documents"]:
            raise PolyvisionError(
                f"none of the {total:,} documents fell to the part {name!r}: a plain text file is "
                "one document unless --separator splits it (such as --separator '\\n\\n'); "
                "or choose another --val-fraction, 0 for no validation part, or another --seed"
            )


def _noted(out: Path, recipe: dict[str, Any]) -> dict[str, Any] | None:
    """Return the noted place of a run that was killed; None for a new or a complete folder.

    Raises:
        PolyvisionError: the folder holds something else.
    """
    for name in (INDEX, PROGRESS):
        path = out / name
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            old = dict(found["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise PolyvisionError(
                f"{path} is damaged ({error!r}): choose another --out, or --overwrite"
            ) from None
        changed = [k for k in recipe if old.get(k) != recipe[k]]
        if changed:
            lines = "; ".join(f"{_LABELS.get(k, k)}: {_change(k, old, recipe)}" for k in changed)
            raise PolyvisionError(
                f"--out {out} was prepared with other settings ({lines}): choose another --out, or "
                "--overwrite to prepare it again"
            )
        return found if name == PROGRESS else None
    if any(path.name not in _BEGUN for path in out.iterdir()):
        raise PolyvisionError(f"--out {out} is not empty and not a prepared corpus: choose another")
    return None


# All that may be there before the first note.
_BEGUN = (LOCK, PROGRESS + ".partial")
_LABELS = {"inputs": "names or sizes of the input files", "files": "number of input files"}


def _change(key: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    return "changed" if key == "inputs" else f"{old.get(key)!r} then, {new[key]!r} now"


def _clear(out: Path, recipe: dict[str, Any]) -> None:
    """Delete what an earlier preparation wrote, and nothing else.

    The marks of a corpus go last, so that one which is killed here can be cleared again.
    """
    if (out / INDEX).exists() or (out / PROGRESS).exists():
        (out / TOKENIZER).unlink(missing_ok=True)
        _write(out / PROGRESS, json.dumps({"settings": recipe}))  # the notes hold no more
        for pattern in (INDEX, "train-*", "val-*", "*.partial", PROGRESS):
            for path in out.glob(pattern):
                path.unlink()


def _write(path: Path, text: str) -> None:
    """Write a file so that it is whole or absent."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
