"""What tells one image set from another: a run resumes on the images that it began with.

Names and labels are compared whole. Contents are compared for a few images only, which is quick for
a million of them; an image that cannot be read counts as equal to any other, since to repair it
changes no data that was used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from polyvision.data.images.decode import UnreadableImageError, content_of, decode_image
from polyvision.data.images.source import Source

__all__ = ["array_digest", "content_digests", "digest"]

# Images of a source whose contents are compared.
_SAMPLED = 64


def digest(parts: Iterable[str | bytes]) -> str:
    """Return a short hash of texts or bytes, each told from the next."""
    whole = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = part.encode() if isinstance(part, str) else part
        whole.update(len(encoded).to_bytes(8, "big"))
        whole.update(encoded)
    return whole.hexdigest()


def array_digest(array: np.ndarray[Any, Any]) -> str:
    """Return a short hash of an array: type, shape and values."""
    whole = hashlib.blake2b(f"{array.dtype.str} {array.shape}".encode(), digest_size=8)
    whole.update(np.ascontiguousarray(array).data)
    return whole.hexdigest()


def content_digests(source: Source) -> list[str | None]:
    """Return a hash of the content of up to 64 images, evenly spread; None for unreadable ones.

    A source that gives no labels without reading its images is not read here either.
    """
    if source.labels() is None:
        return []
    count = len(source)
    chosen = np.linspace(0, count - 1, min(count, _SAMPLED)).astype(int)
    return [_content_digest(source, int(index)) for index in chosen]


def _content_digest(source: Source, index: int) -> str | None:
    try:
        encoded, _ = source.read(index)
        content = content_of(encoded)
        decode_image(content)
    except (UnreadableImageError, OSError):
        return None
    return digest([content.getvalue()])
