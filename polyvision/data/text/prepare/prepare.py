"""From text files to token shards: in several processes, in little memory, the same every time.

One process reads documents and writes tokens, the others encode. Pieces of text go out and come
back in order, so the number of processes changes nothing in the result. Every few seconds the
place is noted in ``progress.json``; a run that was killed goes on from there and writes the same
bytes as one that was not. Where files were changed meanwhile, it goes on from the first of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from polyvision.data.text.bad_lines import BadLines
from polyvision.data.text.corpus import INDEX, INDEX_VERSION, PROGRESS, TOKENIZER, Corpus
from polyvision.data.text.prepare.earlier import (
    check_finished,
    find_earlier,
    noted_inputs,
    place_before,
)
from polyvision.data.text.prepare.encoding import Item, encode_in_order
from polyvision.data.text.prepare.fingerprints import (
    INPUTS,
    Fingerprint,
    combined,
    first_change,
    parse_fingerprints,
    refuse_changed_files,
    take_fingerprints,
    to_json,
)
from polyvision.data.text.prepare.part_writer import PartWriter
from polyvision.data.text.sources import Piece, Source, read_pieces
from polyvision.data.text.split import Split, plan_split
from polyvision.data.text.tokenizer_spec import TokenizerSpec, parse_tokenizer
from polyvision.data.text.tokenizers import Tokenizer, tokenizer_from_json
from polyvision.errors import PolyvisionError
from polyvision.files import only_writer, write_whole

__all__ = ["Settings", "prepare"]

# The characters of the training split that a BPE is learned from: the first ones of each file.
_LEARN = 32 << 20
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
        end_token: the special token after each document; None for the tokenizer's usual one.
    """

    tokenizer: str
    val_fraction: float = 0.05
    seed: int = 0
    shard_tokens: int = 1 << 26
    text_key: str = "text"
    separator: str | None = None
    end_token: str | None = None


def prepare(
    sources: list[Source],
    out: Path,
    settings: Settings,
    *,
    workers: int = 1,
    overwrite: bool = False,
    skip_bad_lines: int = 0,
    check_inputs: bool = False,
    on_progress: Callable[[int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Corpus:
    """Write ``sources`` as a corpus into the folder ``out``, or go on with it.

    Args:
        sources: what to read, in this order.
        out: a new or empty folder, or one of the same sources and settings.
        settings: what the result depends on.
        workers: processes that encode; 1 for none beside this one.
        overwrite: delete a corpus that is there.
        skip_bad_lines: this many lines of JSON lines that cannot be used may be left out.
        check_inputs: compare also files of more than 64 MiB whole with what they held before.
        on_progress: called with the bytes read so far, of all files.
        say: called with what a person should know while it goes on.

    Raises:
        PolyvisionError: a value is out of range, the folder holds something else or was made from
            other files, a file cannot be read, or there is no text.
    """
    _check(settings, workers, skip_bad_lines)
    spec = parse_tokenizer(settings.tokenizer)
    if settings.end_token is not None:
        spec = spec.ending_with(settings.end_token)
    recipe = dataclasses.asdict(settings) | {
        "tokenizer": settings.tokenizer if spec.kind != "file" else _sha256(spec.definition),
    }
    work = _Work(
        sources,
        out,
        settings,
        recipe,
        BadLines(skip_bad_lines),
        workers,
        on_progress,
        say or (lambda text: None),
    )
    try:
        known = [] if overwrite else parse_fingerprints(out / INPUTS)
        found = None if overwrite else find_earlier(out, recipe)
        if found is None or not found.complete:
            split = plan_split(
                sources, work.read, settings.val_fraction, settings.seed, settings.separator
            )
        inputs = take_fingerprints(sources, known, whole=check_inputs)
        if found is not None and found.complete:
            check_finished(out, found, inputs, skip_bad_lines)
            return Corpus(out, "--out")
        out.mkdir(parents=True, exist_ok=True)
        with only_writer(out, "choose another --out"):
            if overwrite:
                _clear(out, recipe)
            found = find_earlier(out, recipe)  # again, now that nobody else writes
            if found is not None and found.complete:
                check_finished(out, found, inputs, skip_bad_lines)
            else:
                _go_on(work, spec, split, inputs, {} if found is None else found.content)
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
    bad_lines: BadLines
    workers: int
    on_progress: Callable[[int], None] | None
    say: Callable[[str], None]

    def read(self, source: Source) -> Iterator[Piece]:
        """Read the documents of a file."""
        return read_pieces(
            source,
            text_key=self.settings.text_key,
            separator=self.settings.separator,
            bad_lines=self.bad_lines,
        )


def _go_on(
    work: _Work, spec: TokenizerSpec, split: Split, inputs: list[Fingerprint], noted: dict[str, Any]
) -> None:
    """Do what is left to do; the index comes last."""
    out = work.out
    recipe = work.recipe | {"inputs": combined(inputs), "files": len(inputs)}
    if not noted:  # claims the folder, for one that is killed before the first note
        noted = {"settings": recipe}
        write_whole(out / PROGRESS, json.dumps(noted))
    changed = noted["settings"].get("inputs") != recipe["inputs"]
    place = {k: v for k, v in noted.items() if k != "settings"}
    if changed and place:
        old = noted_inputs(out, str(noted["settings"].get("inputs")))
        place = place_before(place, first_change(old, inputs))
    cut = [split.file, split.cut] if split.file else split.cut
    made_with = {"cut": cut, "tokenizer": ""}
    tokenizer = _stored_tokenizer(out)
    if tokenizer is None or (changed and spec.kind == "bpe"):
        if spec.kind == "bpe":
            work.say(f"learning a vocabulary of {spec.vocab_size:,} tokens from the training split")
        end = work.settings.end_token or True
        made = spec.make(_learn_from(work, split), end_token=end)
        if tokenizer is not None and tokenizer.fingerprint != made.fingerprint:
            (out / TOKENIZER).unlink()
        tokenizer = made
    made_with["tokenizer"] = tokenizer.fingerprint
    if any(place.get(key) != value for key, value in made_with.items()):
        place = {}  # encoded in another way
    if changed:
        start = place.get("file", 0)
        what = f"file {start + 1:,} of {len(inputs):,}" if start < len(inputs) else "the end"
        work.say(f"input files were changed since the last attempt: going on from {what}")
    write_whole(out / PROGRESS, json.dumps({"settings": recipe} | place))
    for name, text in ((INPUTS, to_json(inputs)), (TOKENIZER, tokenizer.to_json())):
        if not (out / name).exists() or (out / name).read_text(encoding="utf-8") != text:
            write_whole(out / name, text)
    parts = _encode_all(work, split, tokenizer, {"settings": recipe} | made_with, place)
    refuse_changed_files(work.sources)
    index: dict[str, Any] = {
        "version": INDEX_VERSION,
        "tokenizer": {
            "sha256": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "end": tokenizer.end,
        },
        "settings": recipe,
        "parts": parts,
    }
    if split.cut is not None:
        index["split"] = {"character": split.cut, "border": split.border}
        if split.documents > 1:
            index["split"]["file"] = str(work.sources[split.file].path)
    if work.bad_lines:
        reasons = work.bad_lines.reasons
        paths = [str(source.path) for source in work.sources]
        index["bad_lines"] = [
            {"line": f"{path}:{number}", "reason": reasons[path][number].removeprefix(": ").strip()}
            for path in paths
            for number in sorted(reasons.get(path, {}))
        ]
    write_whole(out / INDEX, json.dumps(index, indent=1) + "\n")
    (out / PROGRESS).unlink()


def _stored_tokenizer(out: Path) -> Tokenizer | None:
    if not (out / TOKENIZER).exists():
        return None
    return tokenizer_from_json((out / TOKENIZER).read_text(encoding="utf-8"))


def _check(settings: Settings, workers: int, skip_bad_lines: int) -> None:
    if not 0 <= settings.val_fraction < 1:
        raise PolyvisionError(
            f"--val-fraction must be at least 0 and less than 1, got {settings.val_fraction}"
        )
    if settings.shard_tokens < 1:
        raise PolyvisionError(f"--shard-tokens must be positive, got {settings.shard_tokens}")
    if workers < 1:
        raise PolyvisionError(f"--workers must be at least 1, got {workers}")
    if skip_bad_lines < 0:
        raise PolyvisionError(f"--skip-bad-lines must be 0 or more, got {skip_bad_lines}")
    if settings.separator == "":
        raise PolyvisionError("--separator is empty; leave it out for one document a file")


def _encode_all(
    work: _Work,
    split: Split,
    tokenizer: Tokenizer,
    made_with: dict[str, Any],
    place: dict[str, Any],
) -> dict[str, Any]:
    """Encode everything after the noted place; return the counts of the parts.

    Args:
        work: what is to be done.
        split: the part of each document.
        tokenizer: encodes.
        made_with: goes into each note.
        place: the noted place; empty to begin.
    """
    sources, settings = work.sources, work.settings
    file, item = place.get("file", 0), place.get("item", 0)
    names = ["train", "val"] if settings.val_fraction else ["train"]
    read = [source.path for source in sources[:file]]
    work.bad_lines.restore(place.get("bad_lines", {}), read)
    pieces = _pieces(work, split, file, item)
    before = [0]
    for source in sources:
        before.append(before[-1] + source.size)
    with ExitStack() as stack:
        writers = {
            name: PartWriter(
                work.out,
                name,
                vocab_size=tokenizer.vocab_size,
                tokenizer=tokenizer.fingerprint,
                shard_tokens=settings.shard_tokens,
                state=place.get("parts", {}).get(name),
            )
            for name in names
        }
        for writer in writers.values():
            stack.callback(writer.close)

        def begin_file() -> dict[str, Any]:
            marks = {name: writer.mark() for name, writer in writers.items()}
            return {"parts": marks}

        begin = place["begin"] if item else begin_file()

        def note() -> None:
            state = {name: writer.state() for name, writer in writers.items()}
            found = {
                "file": file,
                "item": item,
                "parts": state,
                "begin": begin,
                "bad_lines": work.bad_lines.reasons,
            }
            write_whole(work.out / PROGRESS, json.dumps(made_with | found))

        note()
        last = time.monotonic()
        encoded = stack.enter_context(encode_in_order(tokenizer, pieces, work.workers))
        for (number, part, piece), tokens in encoded:
            if number != file:
                file, item, begin = number, 0, begin_file()
            writers[part].add(*tokens)
            if piece.ends:
                if tokenizer.end is not None:
                    writers[part].add(np.array([tokenizer.end]), 0)
                writers[part].end_document()
            item += 1
            if work.on_progress is not None:
                work.on_progress(before[number] + piece.position)
            if time.monotonic() - last > _NOTE_SECONDS:
                note()
                last = time.monotonic()
        return {name: writer.finish() for name, writer in writers.items()}


def _pieces(work: _Work, split: Split, file: int, item: int) -> Iterator[Item]:
    """Yield the pieces to encode from piece ``item`` of file ``file`` on."""
    for number, source in enumerate(work.sources[file:], start=file):
        for part, piece in islice(split.parts(number, work.read(source)), item, None):
            yield number, part, piece
        item = 0


def _learn_from(work: _Work, split: Split) -> Iterator[str]:
    """Yield the text that a BPE is learned from: an equal share of each file's training split."""
    share = max(1, _LEARN // max(1, len(work.sources)))
    for number, source in enumerate(work.sources):
        taken = 0
        for part, piece in split.parts(number, work.read(source)):
            if part == "train":
                yield piece.text[: share - taken]
                taken += len(piece.text)
            if taken >= share:
                break


def _clear(out: Path, recipe: dict[str, Any]) -> None:
    """Delete what an earlier preparation wrote, and nothing else.

    The marks of a corpus go last, so that one which is killed here can be cleared again.
    """
    if (out / INDEX).exists() or (out / PROGRESS).exists():
        (out / TOKENIZER).unlink(missing_ok=True)
        write_whole(out / PROGRESS, json.dumps({"settings": recipe}))  # the notes hold no more
        for pattern in (INDEX, INPUTS, "train-*", "val-*", "*.partial", PROGRESS):
            for path in out.glob(pattern):
                path.unlink()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
