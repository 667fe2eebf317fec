"""Image files of every kind decode to upright RGB with the right values, or say why not."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyvision.data.images.decode import (
    EXTENSIONS,
    UnreadableImageError,
    check_header,
    decode_image,
)

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def pixels(path: Path) -> np.ndarray:
    image = decode_image(path)
    assert image.mode == "RGB"
    return np.asarray(image)


def photo() -> Image.Image:
    """Four quadrants, red, green / blue, white, 24 wide and 16 high."""
    image = Image.new("RGB", (24, 16), WHITE)
    image.paste(RED, (0, 0, 12, 8))
    image.paste(GREEN, (12, 0, 24, 8))
    image.paste(BLUE, (0, 8, 12, 16))
    return image


@pytest.mark.parametrize("extension", sorted(EXTENSIONS))
def test_every_listed_extension_can_be_read(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"image{extension}"
    kind = {".jpe": "JPEG", ".jfif": "JPEG", ".pbm": "PPM", ".pgm": "PPM"}.get(extension)
    mode = {".pbm": "1", ".pgm": "L"}.get(extension, "RGB")
    Image.new("RGB", (6, 4), WHITE).convert(mode).save(path, format=kind)
    np.testing.assert_array_equal(pixels(path), np.full((4, 6, 3), 255))


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    for orientation, corner in [(1, RED), (3, WHITE), (6, BLUE), (8, GREEN)]:
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = tmp_path / f"{orientation}.jpg"
        photo().save(path, exif=exif, quality=100, subsampling=0)
        found = pixels(path)
        assert found.shape[:2] == ((16, 24) if orientation in (1, 3) else (24, 16))
        assert np.abs(found[2, 2].astype(int) - corner).max() < 8


def test_a_damaged_exif_block_does_not_cost_the_image(tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    photo().save(path, exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff\x12\x01", quality=100)
    assert pixels(path).shape == (16, 24, 3)


def test_cmyk(tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    photo().convert("CMYK").save(path, quality=100, subsampling=0)
    with Image.open(path) as image:
        assert image.mode == "CMYK"
    found = pixels(path).astype(int)
    for (row, column), colour in [((2, 2), RED), ((2, 20), GREEN), ((13, 2), BLUE)]:
        assert np.abs(found[row, column] - colour).max() < 8


@pytest.mark.parametrize("extension", [".png", ".tif", ".pgm"])
def test_16_bit_gray_is_scaled_not_clipped(tmp_path: Path, extension: str) -> None:
    levels = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    path = tmp_path / f"image{extension}"
    if extension == ".pgm":  # big endian by definition
        path.write_bytes(b"P5 16 16 65535\n" + levels.astype(">u2").tobytes())
    else:
        Image.fromarray(levels).save(path)
    expected = np.arange(256).reshape(16, 16, 1).repeat(3, axis=2)
    np.testing.assert_array_equal(pixels(path), expected)


def test_16_bit_gray_with_a_transparent_level(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    Image.fromarray(np.full((2, 2), 65535, np.uint16)).save(path, transparency=300)
    np.testing.assert_array_equal(pixels(path), np.full((2, 2, 3), 255))


def test_1_bit(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    Image.fromarray(np.eye(8, dtype=bool)).save(path)
    np.testing.assert_array_equal(pixels(path)[..., 1], np.eye(8) * 255)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_composited_on_white(tmp_path: Path, mode: str) -> None:
    image = Image.new(mode, (3, 1), (0,) * len(mode))
    image.putalpha(Image.fromarray(np.array([[0, 128, 255]], np.uint8)))
    path = tmp_path / "image.png"
    image.save(path)
    assert pixels(path)[0].tolist() == [[255] * 3, [127] * 3, [0] * 3]


def test_transparent_palette_entries_are_white(tmp_path: Path) -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([*RED, *GREEN, *BLUE])
    image.putdata([0, 1, 2])
    path = tmp_path / "image.png"
    image.save(path, transparency=bytes([255, 0, 255]))
    assert [tuple(p) for p in pixels(path)[0]] == [RED, WHITE, BLUE]


def test_a_transparent_colour_of_rgb_is_white(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    photo().save(path, transparency=GREEN)
    found = pixels(path)
    assert tuple(found[0, 0]) == RED
    assert tuple(found[0, 23]) == WHITE


def test_the_first_frame_of_an_animation(tmp_path: Path) -> None:
    path = tmp_path / "image.gif"
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, BLUE)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    assert tuple(pixels(path)[0, 0]) == RED


def png_of_declared_size(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def truncated(tmp_path: Path, extension: str) -> bytes:
    path = tmp_path / f"whole{extension}"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path.read_bytes()[: path.stat().st_size // 2]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot identify image file"),
        (b"I am no picture.\n", "cannot identify image file"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot identify image file"),
        (png_of_declared_size(60_000, 60_000), "exceeds limit"),
        (png_of_declared_size(10_000, 9_000), "exceeds limit"),
    ],
)
def test_what_is_no_image_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "image.jpg"
    path.write_bytes(content)
    with pytest.raises(UnreadableImageError, match=reason) as caught:
        decode_image(path)
    assert str(path) not in str(caught.value)  # the caller names it


@pytest.mark.parametrize("extension", [".jpg", ".png", ".webp", ".tif", ".bmp"])
def test_truncated_files_are_refused(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"image{extension}"
    path.write_bytes(truncated(tmp_path, extension))
    with pytest.raises(UnreadableImageError):
        decode_image(path)


def test_floats_and_missing_files_are_refused(tmp_path: Path) -> None:
    Image.new("F", (2, 2), 0.5).save(tmp_path / "image.tif")
    with pytest.raises(UnreadableImageError, match="no defined range"):
        decode_image(tmp_path / "image.tif")
    with pytest.raises(UnreadableImageError, match="No such file"):
        decode_image(tmp_path / "missing.png")


def test_text_bombs_in_metadata_are_not_unpacked(tmp_path: Path) -> None:
    path = with_chunks(tmp_path / "image.png", (b"zTXt", b"Comment\0\0" + BOMB))
    tracemalloc.start()
    try:
        np.testing.assert_array_equal(pixels(path), np.asarray(photo()))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def with_chunks(path: Path, *chunks: tuple[bytes, bytes]) -> Path:
    """Write the photo as a PNG with further chunks after its header."""
    photo().save(path)
    content = path.read_bytes()
    added = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    path.write_bytes(content[:33] + added + content[33:])
    return path


LONG = zlib.compress(bytes(2 << 20))
BOMB = zlib.compress(bytes(64 << 20))


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (b"zTXt", b"Comment\0\0" + LONG),
        (b"iTXt", b"Comment\0\1\0\0\0" + LONG),
        (b"iCCP", b"profile\0\0" + LONG),
    ],
)
def test_texts_and_profiles_larger_than_pillow_allows(
    tmp_path: Path, kind: bytes, data: bytes
) -> None:
    path = with_chunks(tmp_path / "image.png", (kind, data))
    with pytest.raises(ValueError, match="too large"), Image.open(path) as image:
        image.load()
    np.testing.assert_array_equal(pixels(path), np.asarray(photo()))
    check_header(path)
    with path.open("rb") as file:
        np.testing.assert_array_equal(np.asarray(decode_image(file)), np.asarray(photo()))


def test_orientation_in_xmp_is_kept_when_texts_are_left_out(tmp_path: Path) -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><tiff:Orientation>6</tiff:Orientation></x:xmpmeta>'
    texts = [(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp), (b"zTXt", b"Comment\0\0" + LONG)]
    found = pixels(with_chunks(tmp_path / "image.png", *texts))
    assert found.shape == (24, 16, 3)
    assert tuple(found[2, 2]) == BLUE


def test_a_damaged_png_with_a_long_text_is_still_refused(tmp_path: Path) -> None:
    path = with_chunks(tmp_path / "image.png", (b"zTXt", b"Comment\0\0" + LONG))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UnreadableImageError):
        decode_image(path)


def test_headers_are_checked_without_decoding(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    photo().save(path)
    path.write_bytes(path.read_bytes()[:-30])
    check_header(path)  # cut off further down
    path.write_text("I am no picture.")
    with pytest.raises(UnreadableImageError, match="cannot identify image file"):
        check_header(path)
