"""Whether bytes are text: UTF-8, and neither an archive nor anything else that is not text."""

from __future__ import annotations

from polyvision.errors import PolyvisionError

__all__ = ["BYTE_ORDER_MARK", "decode_text", "refuse_binary"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Where a file's content begins with this, it is of this kind.
_ARCHIVES = {
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "an empty zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a rar archive",
}
_COMPRESSED = {
    b"\x1f\x8b\x08": (".gz", "gzip"),
    b"\xfd7zXZ\x00": (".xz", "xz"),
    b"\x28\xb5\x2f\xfd": (".zst", "zstandard"),
}
_OTHERS = {b"PAR1": "a parquet file", b"%PDF-": "a PDF document"}
# A tar archive has no magic number at its start, but here.
_TAR, _TAR_AT = b"ustar", 257
# More than this share of NUL bytes is no UTF-8 text.
_NUL_SHARE = 0.01


def refuse_binary(head: bytes, place: str) -> None:
    """Refuse a file by the first bytes of its content, whatever its name.

    Args:
        head: the first bytes, decompressed where the file's name says so; at least 512 of them
            where there are as many.
        place: what the file is called in the error.

    Raises:
        PolyvisionError: it is an archive, compressed, of another known format, or full of NUL.
    """
    kind = next((name for magic, name in _ARCHIVES.items() if head.startswith(magic)), None)
    if head[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        kind = "a tar archive"
    if kind:
        raise PolyvisionError(f"{place} is {kind}, not text: unpack it and name its files")
    packed = [value for magic, value in _COMPRESSED.items() if head.startswith(magic)]
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17rE8P\x90"):
        packed = [(".bz2", "bzip2")]
    for suffix, name in packed:
        raise PolyvisionError(
            f"{place} is compressed ({name}): unpack it, or let polyvision prepare-text read it "
            f"under a name that ends in {suffix}"
        )
    other = next((name for magic, name in _OTHERS.items() if head.startswith(magic)), None)
    if other:
        raise PolyvisionError(f"{place} is {other}, not text")
    nul = head.count(0)
    if nul > _NUL_SHARE * len(head):
        raise PolyvisionError(
            f"{place} is not text: {100 * nul / len(head):.0f} % of its first {len(head):,} bytes "
            "are NUL; if it is UTF-16, convert it with iconv -f UTF-16 -t UTF-8"
        )


def decode_text(content: bytes, place: str) -> str:
    """Return the text of a whole file, without a byte order mark.

    Raises:
        PolyvisionError: the content is not UTF-8 text.
    """
    refuse_binary(content[: 1 << 20], place)
    mark = len(BYTE_ORDER_MARK) if content.startswith(BYTE_ORDER_MARK) else 0
    try:
        return content[mark:].decode()
    except UnicodeDecodeError as error:
        at = mark + error.start
        raise PolyvisionError(
            f"{place} is not UTF-8: byte {content[at]:#04x} at offset {at}; "
            "convert it first, for example with iconv -t UTF-8"
        ) from None
