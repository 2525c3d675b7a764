"""How attention splits a context into pieces for several threads. Imports no tvm.

The sizes are part of the arithmetic: they fix the order of a query's sums, equally in every graph.
"""

from __future__ import annotations

_PARTITION_KEYS = 256  # least keys of a partition, which has its own softmax
_SEGMENT_PARTITIONS = 4
STATE_LANES = 32  # float32 beside the values of a partial result: its maximum and its sum, 16 copies each


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def partition_keys(block_size: int) -> int:
    """Keys in a partition: whole blocks."""
    return block_size * _ceil_div(_PARTITION_KEYS, block_size)


def segment_keys(block_size: int) -> int:
    """Keys in a segment, the least work of a thread."""
    return _SEGMENT_PARTITIONS * partition_keys(block_size)


def num_segments(context: int, block_size: int) -> int:
    """Segments of a sequence of `context` tokens."""
    return _ceil_div(context, segment_keys(block_size))


def partial_floats(head_dim: int) -> int:
    """float32 in the partial result of one query head over one segment."""
    return _ceil_div(head_dim, 16) * 16 + STATE_LANES
