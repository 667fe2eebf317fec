"""Which part of a corpus a document goes to, and what can be said of it before any work."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from polyvision.data.text.sources import Piece, Source
from polyvision.errors import PolyvisionError

__all__ = ["BORDERS", "Split", "in_validation", "nearest_border", "plan_split"]

# Where a text may be divided, the best place first.
BORDERS = {"\n\n": "paragraph", "\n": "line", " ": "word"}
# A document's side of the split depends on this many of its first characters.
_HEAD = 1 << 16
# A border may move the place where the only document is divided by this many characters.
_REACH = 1 << 20

Read = Callable[[Source], Iterator[Piece]]


def in_validation(text: str, fraction: float, seed: int) -> bool:
    """Say whether the document that begins with ``text`` validates.

    A hash of the seed and the first 65,536 characters decides: the order of documents, the names
    of files and the other documents do not matter, and copies of a document stay together.
    """
    digest = hashlib.blake2b(text[:_HEAD].encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def nearest_border(text: str, target: int, reach: int) -> int:
    """Return the place after the border nearest to ``target``: of a paragraph, line, or word.

    A better kind of border wins over a nearer one. No border moves the place by more than
    ``reach``; where there is none, it is ``target``.
    """
    for border in BORDERS:
        before = text.rfind(border, max(0, target - reach), target) + len(border)
        after = text.find(border, max(0, target - len(border) + 1), target + reach) + len(border)
        found = [cut for cut in (before, after) if cut >= len(border)]
        if found:
            return min(found, key=lambda cut: abs(cut - target))
    return target


@dataclasses.dataclass(frozen=True)
class Split:
    """How documents are divided into a training and a validation split.

    Attributes:
        fraction: share that validates, 0 for none.
        seed: chooses the documents.
        cut: the first character that validates, of the only document; None where there are more.
        border: what the text before the cut ends with: a paragraph, line, word or character.
    """

    fraction: float
    seed: int
    cut: int | None = None
    border: str = ""

    def validates(self, piece: Piece, documents: int) -> bool:
        """Say whether the document that begins with ``piece``, after so many others, validates."""
        if self.cut is not None:  # the document's two parts
            return documents > 0
        return bool(self.fraction) and in_validation(piece.text, self.fraction, self.seed)

    def divide(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Make two documents of one that is divided; leave others as they are."""
        if self.cut is None:
            yield from pieces
            return
        left = self.cut
        for piece in pieces:
            if 0 < left < len(piece.text):
                yield dataclasses.replace(piece, text=piece.text[:left], ends=True)
                yield dataclasses.replace(piece, text=piece.text[left:], begins=True)
            else:
                yield dataclasses.replace(
                    piece,
                    begins=piece.begins or left == 0,
                    ends=piece.ends or left == len(piece.text),
                )
            left -= len(piece.text)


def plan_split(
    sources: Sequence[Source], read: Read, fraction: float, seed: int, separator: str | None
) -> Split:
    """Find out whether each part gets a document, reading as little as possible of each file.

    A single document is divided by position, as ``data=text`` divides a text.

    Args:
        sources: the files; the beginning of each is read.
        read: gives the pieces of a file.
        fraction: share that validates.
        seed: chooses the documents.
        separator: what separates the documents of plain text.

    Raises:
        PolyvisionError: a file cannot be used, there is no text, or a part would have none.
    """
    split = Split(fraction, seed)
    counts = {"train": 0, "val": 0} if fraction else {"train": 0}
    for source in sources:
        for piece in read(source):
            if piece.begins:
                counts["val" if split.validates(piece, 0) else "train"] += 1
            if all(counts.values()) or (source.one_document and separator is None):
                break
    total = sum(counts.values())
    if not total:
        raise PolyvisionError(f"no text in {len(sources):,} files: nothing but white space")
    if total == 1 and fraction:
        return _by_position(sources, read, split)
    for name, documents in counts.items():
        if not documents:
            raise PolyvisionError(
                f"none of the {total:,} documents is in the split {name!r}: a plain text file is "
                "one document unless --separator splits it (such as --separator '\\n\\n'); "
                "or choose another --val-fraction, 0 for no validation split, or another --seed"
            )
    return split


def _by_position(sources: Sequence[Source], read: Read, split: Split) -> Split:
    """Find where the only document is divided, in two passes over its text."""

    def pieces() -> Iterator[Piece]:
        return (piece for source in sources for piece in read(source))

    length = sum(len(piece.text) for piece in pieces())
    target = round(length * (1 - split.fraction))
    reach = min(target, length - target) // 2
    reach = min(reach, _REACH)
    first, last = max(0, target - reach - 2), target + reach + 2
    window, start = "", 0
    for piece in pieces():
        window += piece.text[max(0, first - start) : max(0, last - start)]
        start += len(piece.text)
    cut = first + nearest_border(window, target - first, reach)
    if not 0 < cut < length:
        raise PolyvisionError(
            f"the only document has {length:,} characters, too few to hold out {split.fraction:g} "
            "of it: use more text, another --val-fraction, or 0 for no validation split"
        )
    before = window[: cut - first]
    kinds = (kind for border, kind in BORDERS.items() if before.endswith(border))
    return dataclasses.replace(split, cut=cut, border=next(kinds, "character"))
