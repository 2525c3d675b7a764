"""One picture of a request: read as far as its size at first, and unpacked when its pixels are needed."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.distribution import install_extra
from llmc.runtime.images.image_error import ImageError, NoImages
from llmc.runtime.images.image_file import ImageFile
from llmc.runtime.images.image_limits import ImageLimits
from llmc.runtime.images.jpeg_scans import check_scans
from llmc.shown import shown

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""What is read; of several frames it is the first."""
_ORIENTATION = 0x0112  # of EXIF
_TURNED = range(5, 9)
"""Orientations that exchange width and height."""
_DEEP_GREY = "I;16"
"""How the names of modes begin that are grey in 16 bits, in any order of bytes."""
_PNG_MARKS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""One of them is in a PNG with an orientation."""


def require_pillow() -> None:
    """Raises NoImages if the library that reads pictures is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise NoImages(f"images need Pillow, which is not installed: {install_extra('images')}") from None


class Picture:
    """size: (width, height) as the picture is seen, after its EXIF orientation. identity: SHA-256 of what was given.

    Of a file only the name is kept. Raises ImageError for what is no picture, or is beyond the limits.
    """

    def __init__(self, given: bytes | ImageFile | Image, limits: ImageLimits) -> None:
        require_pillow()
        self._limits = limits
        if isinstance(given, (bytes, ImageFile)):
            data = given if isinstance(given, bytes) else given.read(limits)
            limits.check_bytes(len(data))
            with readable():
                image = _open(data)
                limits.check_size(*image.size)
                check_scans(data)
                turned = _is_turned(image, data)
            self.size: tuple[int, int] = (image.height, image.width) if turned else image.size
            self.identity = hashlib.sha256(data).digest()
            self._given: bytes | ImageFile | Image = given
        else:
            limits.check_size(*given.size)
            with readable():
                self._given = _as_seen(given)
            self.size = self._given.size
            self.identity = hashlib.sha256(repr(self.size).encode() + self._given.tobytes()).digest()
        if min(self.size) < 1:
            raise ImageError(f"an image has {self.size[0]}x{self.size[1]} pixels: it has nothing to see")

    def pixels(self) -> Image:
        """The picture in RGB, upright. Raises ImageError if it cannot be unpacked, and for a file that has changed."""
        if not isinstance(self._given, (bytes, ImageFile)):
            return self._given
        with readable():
            return _as_seen(_open(self._bytes(self._given)))

    def _bytes(self, given: bytes | ImageFile) -> bytes:
        if isinstance(given, bytes):
            return given
        data = given.read(self._limits)
        if hashlib.sha256(data).digest() != self.identity:
            raise ImageError(f"the image {shown(str(given.path))} has changed since its request began: send it again")
        return data


def _is_turned(image: Image, data: bytes) -> bool:
    """Whether the picture is seen with width and height exchanged."""
    if image.format == "PNG" and not any(mark in data for mark in _PNG_MARKS):
        return False  # Pillow would unpack it to look for them behind the pixels
    return image.getexif().get(_ORIENTATION) in _TURNED


def _open(data: bytes) -> Image:
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=FORMATS)


def _as_seen(image: Image) -> Image:
    """Upright, in RGB; what is transparent becomes white, as transformers has it."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(_DEEP_GREY):
        return _in_8_bits(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _in_8_bits(image: Image) -> Image:
    """In RGB, of a grey one of 16 bits, with the upper byte as Pillow has it for colours; it would cut greys off at 255
    instead, so that nearly all become white."""
    from PIL import Image

    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    clear = image.info.get("transparency")
    if clear is not None:
        grey[values == clear] = 255
    return Image.fromarray(grey).convert("RGB")


@contextmanager
def readable() -> Iterator[None]:
    """Turns the library's errors into ImageError. Its own limit on pixels is not that of the request."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f"an image is of no known format, or damaged: give {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError as error:
        raise ImageError(f"an image has too many pixels: {_line(error)}") from None
    except MemoryError:
        raise ImageError("an image needs more memory than there is: give one with fewer pixels") from None
    except Exception as error:  # decoders raise whatever a damaged file leads to
        raise ImageError(f"an image cannot be decoded: {_line(error)}; give one of {', '.join(FORMATS)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def is_picture(value: Any) -> bool:
    """Whether a value is an image of Pillow; imports nothing."""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)
