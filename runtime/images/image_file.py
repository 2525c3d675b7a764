"""An image that is a file of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmc.regular_file import read_regular
from llmc.runtime.images.image_error import ImageError
from llmc.runtime.images.image_limits import ImageLimits
from llmc.shown import shown


@dataclass(frozen=True)
class ImageFile:
    """Read whenever its bytes are needed: a batch of many images holds none of them."""

    path: Path

    def read(self, limits: ImageLimits) -> bytes:
        """All bytes. Raises ImageError, also for a pipe."""
        try:
            return read_regular(self.path, limits.bytes)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ImageError(f"the image {shown(str(self.path))} cannot be read: {why}") from error
