"""Pictures of requests: formats, damage, bombs, and where their bytes come from."""

from __future__ import annotations

import base64
import io
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from llmc.images.kinds.registry import kind_of
from llmc.runtime.images.image_error import ImageError
from llmc.runtime.images.image_file import ImageFile
from llmc.runtime.images.image_limits import ImageLimits
from llmc.runtime.images.messages import without_images
from llmc.runtime.images.picture import FORMATS, Picture
from llmc.runtime.images.pixels import tiles_of
from llmc.runtime.images.sources import from_base64, from_python, from_url

from support.image_forms import MISTRAL3, encoded, form_of, picture

LIMITS = ImageLimits()


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    found = Picture(encoded(picture(30, 20), name), LIMITS)
    assert found.size == found.pixels().size == (30, 20)
    assert found.pixels().mode == "RGB"


def test_a_film_shows_its_first_frame() -> None:
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    assert Picture(file.getvalue(), LIMITS).pixels().getpixel((0, 0)) == (255, 0, 0)


def test_what_is_transparent_becomes_white() -> None:
    data = encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 0)))
    assert Picture(data, LIMITS).pixels().getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("as_file", [True, False])
def test_deep_greys_keep_their_shades(as_file: bool) -> None:
    """As the colours of a PNG with 16 bits each do."""
    values = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    image = Image.fromarray(values)
    found = Picture(encoded(image) if as_file else image, LIMITS).pixels()
    np.testing.assert_array_equal(np.asarray(found), np.repeat((values >> 8)[..., None], 3, axis=2))


def test_what_is_transparent_in_deep_greys_becomes_white() -> None:
    image = Image.fromarray(np.array([[1000, 1001]], np.uint16))
    found = Picture(encoded(image, transparency=1000), LIMITS).pixels()
    assert [found.getpixel((at, 0)) for at in range(2)] == [(255, 255, 255), (3, 3, 3)]


@pytest.mark.parametrize("data", [b"", b"no picture", encoded(picture(30, 20), "TIFF"), b"%PDF-1.7 "])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(ImageError, match="of no known format, or damaged: give JPEG"):
        Picture(data, LIMITS)


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP"])
def test_a_part_of_a_file_is_refused(name: str) -> None:
    data = encoded(picture(200, 100), name)
    with pytest.raises(ImageError, match=r"cannot be decoded|damaged"):
        Picture(data[: len(data) // 2], LIMITS).pixels()


def _png(width: int, height: int) -> bytes:
    """A file of a few bytes that says it has so many pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        told = name + content
        return len(content).to_bytes(4, "big") + told + zlib.crc32(told).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(100_000, 100_000), (1 << 30, 1), (9000, 9000), (1, 1 << 26), (1 << 16, 1)])
def test_bombs_are_refused_before_they_are_unpacked(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="pixels"):
        Picture(_png(*size), LIMITS)


@pytest.mark.parametrize("error", [MemoryError(), ValueError("image is too wide")])
def test_resizing_fails_with_a_sentence(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory ends: a request fails, and not the server."""
    form, image = form_of(tmp_path, MISTRAL3), picture(50, 40)
    tiling = kind_of(form).tiling(50, 40)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(image, "resize", fail)
    with pytest.raises(ImageError, match=r"more memory than there is: give one with fewer|decoded: image is too wide"):
        tiles_of(image, tiling, form)


def test_limits() -> None:
    with pytest.raises(ImageError, match="an image has 1001 bytes: give at most 1000"):
        Picture(bytes(1001), ImageLimits(bytes=1000))
    with pytest.raises(ImageError, match="an image has 20x20 pixels: give at most 399 in all"):
        Picture(picture(20, 20), ImageLimits(pixels=399))
    with pytest.raises(ImageError, match="an image has 1x21 pixels: give at most 20 on each side"):
        Picture(picture(1, 21), ImageLimits(side=20))
    with pytest.raises(ImageError, match="the request has 3 images: give at most 2"):
        ImageLimits(images=2).check_count(3)


def test_equal_files_have_equal_identities() -> None:
    one, other = (encoded(picture(30, 20, seed=seed)) for seed in (0, 1))
    assert Picture(one, LIMITS).identity == Picture(one, LIMITS).identity != Picture(other, LIMITS).identity
    ours = [Picture(picture(30, 20, seed=seed), LIMITS).identity for seed in (0, 0, 1)]
    assert ours[0] == ours[1] != ours[2]


def test_data_urls() -> None:
    text = base64.b64encode(b"bytes").decode()
    for url in (
        f"data:image/png;base64,{text}",
        f"data:image/svg+xml;charset=utf-8;base64,{text}",
        f"DATA:;BASE64,{text}",
    ):
        assert from_url(url, LIMITS) == b"bytes"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://169.254.169.254/latest", "is not fetched: send its bytes, as data:image/png;base64,"),
        ("HTTPS://example.com/cat.png", "is not fetched"),
        ("file:///etc/passwd", "is not fetched"),
        ("/etc/passwd", "is no data: URL"),
        ("data:image/png,raw", "is no data: URL"),
        ("data:image/png;base64,a$", "is not valid base64"),
    ],
)
def test_other_urls_are_refused(url: str, why: str) -> None:
    with pytest.raises(ImageError, match=why):
        from_url(url, LIMITS)


@pytest.mark.parametrize(
    "part",
    [
        *({"type": kind, name: "FILE"} for kind in ("image_url", "input_image") for name in ("image", "path")),
        *({"type": kind, "image_url": "FILE"} for kind in ("image_url", "input_image", "image")),
        {"type": "image_url", "image_url": {"url": "FILE"}},
        {"type": "image_url", "image_url": {"url": "FILE"}, "image": "FILE"},
        {"type": "image", "url": "FILE"},
        {"type": "image", "source": "FILE"},
        {"type": "image", "source": {"type": "url", "url": "FILE"}},
        {"type": "image", "image": {"url": "FILE"}},
        {"type": "image", "path": {"url": "FILE"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("as_path", [False, True])
def test_urls_name_no_files(part: dict[str, Any], as_path: bool, tmp_path: Path) -> None:
    """Programs pass on messages of their users."""
    file = tmp_path / "cat.png"
    file.write_bytes(encoded(picture(5, 5)))

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(item) for name, item in value.items()}
        return (file if as_path else str(file)) if value == "FILE" else value

    with pytest.raises(ImageError, match="is no data: URL: send its bytes"):
        without_images([{"role": "user", "content": [filled(part)]}])


@pytest.mark.parametrize("name", ["image", "path"])
def test_parts_of_images_name_files(name: str, tmp_path: Path) -> None:
    part = {"type": "image", name: tmp_path / "cat.png"}
    assert without_images([{"role": "user", "content": [part]}])[1] == [tmp_path / "cat.png"]


def test_base64_is_measured_before_it_is_decoded() -> None:
    with pytest.raises(ImageError, match="give at most 10"):
        from_base64("A" * 400, ImageLimits(bytes=10))


def test_what_python_may_give(tmp_path: Path) -> None:
    data, image = encoded(picture(5, 5)), picture(5, 5)
    file = tmp_path / "cat.png"
    file.write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    for given in (data, bytearray(data), url):
        assert from_python(given, LIMITS) == data
    for name in (file, str(file)):
        assert from_python(name, LIMITS) == ImageFile(file)
    assert from_python(image, LIMITS) is image
    with pytest.raises(ImageError, match="neither a path, nor bytes"):
        from_python(5, LIMITS)


def test_files_are_read_when_they_are_needed(tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    file.write_bytes(encoded(picture(90, 90)))
    found, kept = Picture(ImageFile(file), LIMITS), Picture(file.read_bytes(), LIMITS)
    assert (found.size, found.identity) == (kept.size, kept.identity)
    assert found.pixels().tobytes() == kept.pixels().tobytes()
    assert len(pickle.dumps(found)) < 1000 < file.stat().st_size
    file.write_bytes(encoded(picture(90, 90, seed=1)))
    with pytest.raises(ImageError, match=r"has changed since its request began: send it again"):
        found.pixels()
    file.unlink()
    with pytest.raises(ImageError, match=r"cannot be read: No such file"):
        found.pixels()


def test_files_that_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(11))
    for name, why in {"no.png": "No such file", "pipe": "it is a pipe", "large": "at most 10 are read"}.items():
        with pytest.raises(ImageError, match=f"cannot be read: .*{why}"):
            Picture(ImageFile(tmp_path / name), ImageLimits(bytes=10))
