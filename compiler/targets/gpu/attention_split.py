"""How attention divides a context among groups of work items. Imports no tvm.

The size of a partition is part of the arithmetic: it fixes the order of a query's sums, equally in every graph.
"""

from __future__ import annotations

PARTITION = 128
"""Keys of a partition, counted from position 0. Each has its own softmax; partitions are folded in order."""
STATE = 2
"""float32 behind the values of a partial result: its maximum score and its sum of weights."""
_ITEMS = 64  # of a group, as in launch.py
_MOST_ROWS = 8
_MOST_SUMS = 16  # per work item, so that they stay in registers
_TILE_ROWS = 16  # query heads of neighbouring tokens
_TILE_SUMS = 32  # per work item
_LEAST_PARTITIONS = 3  # of a graph's longest context; for fewer, merging costs more than it gains
_SPLIT_TOKENS = 64
_MOST_PARTIALS = 8192  # per query head: 130 MiB for 32 heads of 128
_MOST_GROUPS = 128  # for the partitions of one token and its heads; groups take turns beyond it


def num_partitions(context: int) -> int:
    """Partitions of a sequence of `context` tokens."""
    return -(-context // PARTITION)


def segments_of(tokens: int, longest_context: int, max_context: int) -> int:
    """Partitions whose results a graph keeps side by side, 0 where one group walks the whole context.

    longest_context: in this graph, max_context: in any graph of the model, in tokens. A graph of many tokens occupies
    the device without a split, and its partial results would take much memory.
    """
    needed = num_partitions(longest_context)
    # A power of two, so that graphs of similar contexts share their kernels.
    segments = min(1 << (needed - 1).bit_length(), num_partitions(max_context))
    few = tokens <= _SPLIT_TOKENS and tokens * segments <= _MOST_PARTIALS
    return segments if few and needed >= _LEAST_PARTITIONS else 0


def partial_floats(width: int) -> int:
    """float32 in the partial result of one query head over one partition. width: of its values."""
    return width + STATE


def rows_together(heads: int, kv_heads: int, width: int) -> int:
    """Query heads that share one read of keys and values: a divisor of those that have the same."""
    most = max(1, min(_MOST_ROWS, _MOST_SUMS // -(-width // _ITEMS)))
    group = heads // kv_heads
    return max(rows for rows in range(1, most + 1) if group % rows == 0)


def one_group(heads: int, kv_heads: int, width: int) -> bool:
    """Whether all heads that share a KV head are in one group, with and without tensor cores."""
    return rows_together(heads, kv_heads, width) * kv_heads == heads


def side_by_side(segments: int) -> int:
    """Groups for the partitions of one unit that are worth launching."""
    return max(1, min(segments, _MOST_GROUPS))


def groups_of(heads: int, kv_heads: int, width: int, segments: int) -> int:
    """Groups per token that are worth launching."""
    return heads // rows_together(heads, kv_heads, width) * side_by_side(segments)


def tokens_together(heads: int, kv_heads: int, width: int) -> int:
    """Neighbouring tokens of a sequence that share one read of keys and values, where a step has several of one."""
    most = min(_TILE_ROWS, _TILE_SUMS // -(-width // _ITEMS))
    return max(1, most // rows_together(heads, kv_heads, width))
