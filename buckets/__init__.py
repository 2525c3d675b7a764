"""Buckets, ladders, selection and planning. Pure Python and numpy; imports nothing else of llmc.

The names here need no numpy; `llmc.buckets.trace` and `llmc.buckets.planner` do.
"""

from .bucket import Bucket, BucketError, BucketLadder, select
from .environment import LadderVariables, read_environment
from .grids import Limits
from .ladder import default_ladder, exponential, padding_bounded, ramp_up
from .spec import format_spec, parse_spec

__all__ = [
    "Bucket",
    "BucketError",
    "BucketLadder",
    "LadderVariables",
    "Limits",
    "default_ladder",
    "exponential",
    "format_spec",
    "padding_bounded",
    "parse_spec",
    "ramp_up",
    "read_environment",
    "select",
]
