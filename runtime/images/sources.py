"""Where the bytes of an image come from: data: URLs of a request, and in Python also files, bytes and Pillow's."""

from __future__ import annotations

import base64
import binascii
import os
import re
from pathlib import Path
from typing import Any

from llmc.runtime.images.image_error import ImageError
from llmc.runtime.images.image_file import ImageFile
from llmc.runtime.images.image_limits import ImageLimits
from llmc.runtime.images.picture import is_picture
from llmc.shown import shown

URL_PATTERN = r"^[Dd][Aa][Tt][Aa]:([\w.+\-]+/[\w.+\-]+)?(;[\w.+=\-]+)*;[Bb][Aa][Ss][Ee]64,"
"""How a data: URL begins, in the words of JSON Schema."""
_DATA = re.compile(URL_PATTERN, re.ASCII)
_FETCHED = ("http://", "https://", "ftp://", "file://")
_EXAMPLE = "data:image/png;base64,…"


def check_url(url: Any) -> None:
    """Raises ImageError for what is no data: URL. Others are never fetched: they could name addresses that only this
    machine reaches."""
    if not isinstance(url, str) or _DATA.match(url) is None:
        is_fetched = isinstance(url, str) and url.lower().startswith(_FETCHED)
        why = "is not fetched" if is_fetched else "is no data: URL"
        raise ImageError(f"the image {shown(url)} {why}: send its bytes, as {_EXAMPLE}")


def from_url(url: Any, limits: ImageLimits) -> bytes:
    """The bytes in a data: URL of a request. Raises ImageError for anything else."""
    check_url(url)
    return from_base64(url[url.index(",") + 1 :], limits)


def from_base64(text: str, limits: ImageLimits) -> bytes:
    """The bytes of a base64 text. Raises ImageError."""
    limits.check_bytes(len(text) * 3 // 4 - 2)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"an image is not valid base64: {' '.join(str(error).split())}") from None


def from_python(given: Any, limits: ImageLimits) -> Any:
    """Bytes, an ImageFile that is not read yet, or an image of Pillow: of what a caller of the Python API gives, which
    may be a path or a data: URL. Raises ImageError."""
    if is_picture(given):
        return given
    if isinstance(given, (bytes, bytearray, memoryview)):
        return bytes(given)
    if isinstance(given, str) and (given[:5].lower() == "data:" or given.lower().startswith(_FETCHED)):
        return from_url(given, limits)
    if isinstance(given, (str, os.PathLike)):
        return ImageFile(Path(given))
    raise ImageError(f"the image {shown(given)} is neither a path, nor bytes, nor an image of Pillow")
