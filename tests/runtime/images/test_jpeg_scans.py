"""JPEGs of many scans are refused before they are decoded, and all others are not."""

from __future__ import annotations

import pytest

from llmc.runtime.images.image_error import ImageError
from llmc.runtime.images.image_limits import ImageLimits
from llmc.runtime.images.jpeg_scans import MOST_SCANS, check_scans
from llmc.runtime.images.picture import Picture

from support.image_forms import encoded, picture

SCAN, END = b"\xff\xda", b"\xff\xd9"
PROGRESSIVE = encoded(picture(40, 30), "JPEG", progressive=True, quality=30)


def _with_scans(count: int) -> bytes:
    """A progressive file that repeats its last scan, so that it has `count` of them."""
    scans = PROGRESSIVE.count(SCAN)
    last = PROGRESSIVE[PROGRESSIVE.rindex(SCAN) : -len(END)]
    return PROGRESSIVE[: -len(END)] + last * (count - scans) + END


def test_a_file_of_many_scans_is_refused() -> None:
    assert PROGRESSIVE.endswith(END)
    assert 1 < PROGRESSIVE.count(SCAN) < 20
    assert Picture(_with_scans(MOST_SCANS), ImageLimits()).size == (40, 30)
    with pytest.raises(ImageError, match="an image is a JPEG with more than 100 scans: save it in another way"):
        Picture(_with_scans(MOST_SCANS + 1), ImageLimits())


@pytest.mark.parametrize(
    "between", [b"", b"\xff", b"\xff\x00", b"\xff\xd0", b"\x00", b"\xff\x02", b"\xff\xfe\x00\x04ab"]
)
def test_nothing_between_scans_hides_them(between: bytes) -> None:
    with pytest.raises(ImageError, match="more than 100 scans"):
        check_scans(PROGRESSIVE[: -len(END)] + (between + SCAN + b"\x00\x02\x11\xff\x00\x22") * (MOST_SCANS + 1) + END)


def test_what_looks_like_scans_is_none() -> None:
    """In a segment, as in that of a camera, and behind the end, as films are."""
    held = SCAN * 1000
    segment = b"\xff\xe1" + (len(held) + 2).to_bytes(2, "big") + held
    data = PROGRESSIVE[:2] + segment + PROGRESSIVE[2:] + held
    assert Picture(data, ImageLimits()).pixels().tobytes() == Picture(PROGRESSIVE, ImageLimits()).pixels().tobytes()
    check_scans(encoded(picture(40, 30), "PNG") + held)


def test_a_file_of_many_segments_is_refused() -> None:
    with pytest.raises(ImageError, match="more than 10000 segments"):
        check_scans(PROGRESSIVE[:2] + b"\xff\xfe\x00\x02" * 10_001 + PROGRESSIVE[2:])


@pytest.mark.parametrize(
    "data", [b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xda", b"\xff\xd8\xff\xe1\xff", PROGRESSIVE[:300]]
)
def test_a_part_of_a_file_ends(data: bytes) -> None:
    check_scans(data)
