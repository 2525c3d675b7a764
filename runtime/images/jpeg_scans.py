"""Counts the scans of a JPEG: a decoder goes through all pixels for each, and a scan may have a few bytes."""

from __future__ import annotations

import re

from llmc.runtime.images.image_error import ImageError

MOST_SCANS = 100
"""Of one image. Encoders write about ten."""
_MOST_SEGMENTS = 10_000
"""Far more than files have, which keep colours, places and texts in them."""
_BEGIN = b"\xff\xd8"
_MARKER = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")
"""What is no byte of a scan's data, and no mark to restart in it."""
_BEGIN_OF_IMAGE, _END_OF_IMAGE, _SCAN, _FIRST_WITH_LENGTH = 0xD8, 0xD9, 0xDA, 0xC0
_MARKER_BYTES = 2


def check_scans(data: bytes) -> None:
    """Raises ImageError for a JPEG with too many scans. Other files have none."""
    if not data.startswith(_BEGIN):
        return
    scans = segments = at = 0
    while found := _MARKER.search(data, at):
        at, marker = found.end(), data[found.end() - 1]
        if marker == _END_OF_IMAGE:
            return
        scans, segments = scans + (marker == _SCAN), segments + 1
        if scans > MOST_SCANS or segments > _MOST_SEGMENTS:
            what, most = ("scans", MOST_SCANS) if scans > MOST_SCANS else ("segments", _MOST_SEGMENTS)
            raise ImageError(f"an image is a JPEG with more than {most} {what}: save it in another way")
        if marker >= _FIRST_WITH_LENGTH and marker != _BEGIN_OF_IMAGE:
            # What a segment holds may look like markers, as the small pictures in photographs do.
            at += max(int.from_bytes(data[at : at + 2], "big"), _MARKER_BYTES)
