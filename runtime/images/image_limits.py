"""Limits on the images of a request: a few bytes may unpack to gigabytes of pixels."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.runtime.images.image_error import ImageError

DEFAULT_IMAGES = 16


@dataclass(frozen=True)
class ImageLimits:
    """images: most of one request. bytes: of one image as it is sent. pixels: of one image, checked before it is
    unpacked; the default has room for the largest photographs of phones. side: pixels of the longer side; the default
    is the most that JPEG has. Resizing takes memory for each line and column, whatever the other side."""

    images: int = DEFAULT_IMAGES
    bytes: int = 32 << 20
    pixels: int = 64 << 20
    side: int = (1 << 16) - 1

    def check_count(self, count: int) -> None:
        """Raises ImageError."""
        if count > self.images:
            raise ImageError(f"the request has {count} images: give at most {self.images}")

    def check_bytes(self, count: int) -> None:
        """Raises ImageError."""
        if count > self.bytes:
            raise ImageError(f"an image has {count} bytes: give at most {self.bytes}")

    def check_size(self, width: int, height: int) -> None:
        """Raises ImageError."""
        if width * height > self.pixels:
            raise ImageError(f"an image has {width}x{height} pixels: give at most {self.pixels} in all")
        if max(width, height) > self.side:
            raise ImageError(f"an image has {width}x{height} pixels: give at most {self.side} on each side")
