"""Read an image file as RGB, whatever it holds, or say why it cannot be read.

Rules, since no format leaves them all open and libraries differ:

- EXIF orientation is applied; a damaged EXIF block is ignored.
- Transparency is composited on white: line art on a transparent ground stays visible.
- 16-bit gray is scaled, 65535 to 255, not clipped. Mode ``I`` (32-bit integers, which 16-bit PGM
  and older Pillow's PNG use) is read as 16-bit. 32-bit floats have no defined white: refused.
- CMYK goes through Pillow's plain conversion, without a colour profile.
- Of animations and multi-page files the first frame counts.
- More than 89 million pixels (Pillow's limit) is refused before anything is decoded.
- Texts and colour profiles in a PNG that are larger than Pillow allows are left out; the image, and
  the orientation that an XMP text may hold, are read.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from PIL import Image, ImageOps

__all__ = ["EXTENSIONS", "UnreadableImageError", "check_header", "content_of", "decode_image"]

EXTENSIONS = frozenset(
    [
        ".png",
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".mpo",
        ".webp",
        ".bmp",
        ".tif",
        ".tiff",
        ".gif",
        ".pgm",
        ".ppm",
        ".pbm",
    ]
)

# By content, not by name: a .jpg must not start an interpreter, as PostScript would. MPO opens as
# JPEG.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")


T = TypeVar("T")
_File = str | os.PathLike[str] | BinaryIO


class UnreadableImageError(Exception):
    """An image file that cannot be decoded; the text is the reason, without the path."""


def decode_image(file: _File) -> Image.Image:
    """Return the image of a path, or of a file's content, in mode RGB and upright.

    Raises:
        UnreadableImageError: not an image, damaged, truncated, too large, or not to be opened.
    """
    return _tried(file, _decode)


def check_header(file: _File) -> None:
    """Read format and size of an image, which is quick, and decode nothing.

    Raises:
        UnreadableImageError: not an image, or too large.
    """
    _tried(file, _open_only)


def content_of(file: _File) -> io.BytesIO:
    """Return the content of a path or file."""
    if isinstance(file, str | os.PathLike):
        return io.BytesIO(Path(file).read_bytes())
    file.seek(0)
    return io.BytesIO(file.read())


def _tried(file: _File, read: Callable[[_File], T]) -> T:
    try:
        try:
            return read(file)
        except ValueError:
            plain = _without_texts(content_of(file).getvalue())
            if plain is None:
                raise
            return read(io.BytesIO(plain))
    except MemoryError:
        raise
    except Exception as error:  # decoders of damaged files raise nearly anything
        reason = str(error) or type(error).__name__
        shown = repr(os.fspath(file)) if isinstance(file, str | os.PathLike) else repr(file)
        raise UnreadableImageError(reason.replace(f" {shown}", "").rstrip(":")) from error


@contextmanager
def _opened(file: _File) -> Iterator[Image.Image]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # remarks on metadata
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(file, formats=_FORMATS) as image:
            yield image


def _open_only(file: _File) -> None:
    with _opened(file):
        pass


def _decode(file: _File) -> Image.Image:
    with _opened(file) as image:
        image.load()
        return _to_rgb(_upright(image))


_PNG = b"\x89PNG\r\n\x1a\n"
_XMP = b"XML:com.adobe.xmp\0\0"  # not compressed


def _without_texts(content: bytes) -> bytes | None:
    """Return a PNG without its texts, save XMP, and without its colour profile; None for others.

    Pillow refuses a whole image because of a text of more than 1 MiB after decompression, and its
    limits are global.
    """
    if not content.startswith(_PNG):
        return None
    kept = [_PNG]
    for kind, chunk in _chunks(content):
        if kind in (b"tEXt", b"zTXt", b"iCCP") or (kind == b"iTXt" and _XMP not in chunk[:32]):
            continue
        kept.append(chunk)
    return b"".join(kept)


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield kind and bytes of each chunk of a PNG: length, kind, data, checksum."""
    start = len(_PNG)
    while start + 8 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, start)
        yield kind, content[start : start + length + 12]
        start += length + 12


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a damaged EXIF block
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.int64).clip(0, 65535)
        image = Image.fromarray(((levels + 128) // 257).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("32-bit float pixels have no defined range; convert to 8 or 16 bits")
    elif image.has_transparency_data:
        canvas = Image.new("RGBA", image.size, "white")
        canvas.alpha_composite(image.convert("RGBA"))
        image = canvas
    return image.convert("RGB")
