"""Which part of a corpus a document goes to, and what can be said of it before any work."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from polyvision.data.text.sources import Piece, Source
from polyvision.errors import PolyvisionError
from polyvision.output import plural

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
    """How documents are divided into a training and a validation split: by hash, or at one place.

    Attributes:
        fraction: share that validates, 0 for none.
        seed: chooses the documents.
        cut: the first character that validates, in its file; None where hashes decide.
        file: the number of that file.
        border: what the text before the cut ends with: a document, paragraph, line, word or
            character.
        documents: how many there are, where they are divided at one place.
    """

    fraction: float
    seed: int
    cut: int | None = None
    file: int = 0
    border: str = ""
    documents: int = 0

    def parts(self, file: int, pieces: Iterable[Piece]) -> Iterator[tuple[str, Piece]]:
        """Yield the pieces of file number ``file``, each with its part, ``train`` or ``val``.

        The document that the cut divides becomes two.
        """
        if self.cut is None:
            part = "train"
            for piece in pieces:
                if piece.begins and self.fraction:
                    validates = in_validation(piece.text, self.fraction, self.seed)
                    part = "val" if validates else "train"
                yield part, piece
            return
        if file != self.file:
            yield from (("train" if file < self.file else "val", piece) for piece in pieces)
            return
        left = self.cut
        for piece in pieces:
            size = len(piece.text)
            if 0 < left < size:
                yield "train", dataclasses.replace(piece, text=piece.text[:left], ends=True)
                yield "val", dataclasses.replace(piece, text=piece.text[left:], begins=True)
            elif left > 0:
                yield "train", dataclasses.replace(piece, ends=piece.ends or left == size)
            elif size or piece.begins or left < 0:  # else the end of a document that has ended
                yield "val", dataclasses.replace(piece, begins=piece.begins or left == 0)
            left -= size


def plan_split(
    sources: Sequence[Source], read: Read, fraction: float, seed: int, separator: str | None
) -> Split:
    """Find out whether each part gets a document, reading as little as possible of each file.

    Where hashes leave a part without a document, as they must with a single one, the text is
    divided by position, as ``data=text`` divides it: its last part validates.

    Args:
        sources: the files; the beginning of each is read.
        read: gives the pieces of a file.
        fraction: share that validates.
        seed: chooses the documents.
        separator: what separates the documents of plain text.

    Raises:
        PolyvisionError: a file cannot be used, there is no text, or too little to divide.
    """
    split = Split(fraction, seed)
    counts = {"train": 0, "val": 0} if fraction else {"train": 0}
    for number, source in enumerate(sources):
        for part, piece in split.parts(number, read(source)):
            counts[part] += piece.begins
            if all(counts.values()) or (source.one_document and separator is None):
                break
    total = sum(counts.values())
    if not total:
        raise PolyvisionError(f"no text in {len(sources):,} files: nothing but white space")
    return split if all(counts.values()) else _by_position(sources, read, split, total)


def _by_position(sources: Sequence[Source], read: Read, split: Split, documents: int) -> Split:
    """Find the place in the whole text after which everything validates, in two passes over it."""
    lengths = [sum(len(piece.text) for piece in read(source)) for source in sources]
    length = sum(lengths)
    file, target = 0, round(length * (1 - split.fraction))
    while file + 1 < len(lengths) and target >= lengths[file]:
        target -= lengths[file]
        file += 1
    reach = min(min(target, lengths[file] - target) // 2, _REACH)
    first, last = max(0, target - reach - 2), target + reach + 2
    window, start, begins = "", 0, {0}
    for piece in read(sources[file]):
        if piece.begins:
            begins.add(start)
        window += piece.text[max(0, first - start) : max(0, last - start)]
        start += len(piece.text)
    cut = first + nearest_border(window, target - first, reach) if target else 0
    if not 0 < sum(lengths[:file]) + cut < length:
        what = "the only document has" if documents == 1 else f"the {documents:,} documents have"
        raise PolyvisionError(
            f"{what} {plural(length, 'character')}, too few to hold out {split.fraction:g} of "
            "them: use more text, another --val-fraction, or 0 for no validation split"
        )
    before = window[: cut - first]
    kinds = (kind for border, kind in BORDERS.items() if before.endswith(border))
    border = "document" if cut in begins else next(kinds, "character")
    return dataclasses.replace(split, cut=cut, file=file, border=border, documents=documents)
