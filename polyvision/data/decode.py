"""Read an image file as RGB, whatever it holds, or say why it cannot be read.

Rules, since no format leaves them all open and libraries differ:

- EXIF orientation is applied; a damaged EXIF block is ignored.
- Transparency is composited on white: line art on a transparent ground stays visible.
- 16-bit gray is scaled, 65535 to 255, not clipped. Mode ``I`` (32-bit integers, which 16-bit PGM
  and older Pillow's PNG use) is read as 16-bit. 32-bit floats have no defined white: refused.
- CMYK goes through Pillow's plain conversion, without a colour profile.
- Of animations and multi-page files the first frame counts.
- More than 89 million pixels (Pillow's limit) is refused before anything is decoded.
"""

from __future__ import annotations

import os
import warnings
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

__all__ = ["EXTENSIONS", "UnreadableImageError", "decode_image"]

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


class UnreadableImageError(Exception):
    """An image file that cannot be decoded; the text is the reason, without the path."""


def decode_image(file: str | os.PathLike[str] | BinaryIO) -> Image.Image:
    """Return the image of a path, or of a file's content, in mode RGB and upright.

    Raises:
        UnreadableImageError: not an image, damaged, truncated, too large, or not to be opened.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=_FORMATS) as image:
                image.load()
                return _to_rgb(_upright(image))
    except MemoryError:
        raise
    except Exception as error:  # decoders of damaged files raise nearly anything
        reason = str(error) or type(error).__name__
        shown = repr(os.fspath(file)) if isinstance(file, str | os.PathLike) else repr(file)
        raise UnreadableImageError(reason.replace(f" {shown}", "").rstrip(":")) from error


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
