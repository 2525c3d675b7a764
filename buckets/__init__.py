"""Buckets, ladders and selection; pure Python, imports nothing else of llmc."""

from .bucket import Bucket, BucketError, BucketLadder, select
from .ladder import default_ladder, exponential, ramp_up
from .spec import parse_spec

__all__ = [
    "Bucket",
    "BucketError",
    "BucketLadder",
    "default_ladder",
    "exponential",
    "parse_spec",
    "ramp_up",
    "select",
]
