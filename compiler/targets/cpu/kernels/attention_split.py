"""How attention cuts a context into pieces that several threads may work on. Imports no tvm.

The sizes are part of the arithmetic: they decide in which order a query's sums are formed, in every graph.
"""

from __future__ import annotations

_PARTITION_KEYS = 256  # at least: a softmax of its own
_SEGMENT_PARTITIONS = 4
STATE_LANES = 32  # float32 beside the values of a partial result: its maximum and its sum, 16 times each


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def partition_keys(block_size: int) -> int:
    """Keys of a partition: whole blocks."""
    return block_size * _ceil_div(_PARTITION_KEYS, block_size)


def segment_keys(block_size: int) -> int:
    """Keys of a segment, the least that a thread takes on."""
    return _SEGMENT_PARTITIONS * partition_keys(block_size)


def num_segments(context: int, block_size: int) -> int:
    """Segments of a sequence of `context` tokens."""
    return _ceil_div(context, segment_keys(block_size))


def partial_floats(head_dim: int) -> int:
    """float32 of the partial result of one query head over one segment."""
    return _ceil_div(head_dim, 16) * 16 + STATE_LANES
