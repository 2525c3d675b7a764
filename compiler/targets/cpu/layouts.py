"""Row layouts of activations, context splits of attention and row widths of the KV cache on a CPU. Imports neither
torch nor tvm."""

from __future__ import annotations

from llmc.compiler.graph.commands import GraphShape, round_up
from llmc.compiler.targets.cpu.kernels.attention_split import STATE_LANES, num_segments, partial_floats
from llmc.compiler.targets.cpu.target import Target

ADAPTER_PANEL = 16
"""Rows in a panel of an adapter's matrix: one vector."""
_SPLIT_TOKENS = 64
_MOST_PARTIALS = 1024  # per query head: 20 MiB for 32 heads of 128


def graph_shape(
    target: Target, tokens: int, samples: int, longest_context: int, max_context: int, block_size: int
) -> GraphShape:
    """See `targets.base.Target`."""
    row_tile, sample_row_tile = target.row_tile_for(tokens), target.row_tile_for(samples)
    return GraphShape(
        round_up(tokens, row_tile),
        round_up(samples, sample_row_tile),
        row_tile,
        sample_row_tile,
        _segments(tokens, longest_context, max_context, block_size),
    )


def _segments(tokens: int, longest_context: int, max_context: int, block_size: int) -> int:
    """Splits contexts that may be long, if tokens alone may not occupy every core.

    A graph of many tokens needs no split, and its partial results would take much memory.
    """
    segments = num_segments(max_context, block_size)
    few = tokens <= _SPLIT_TOKENS and tokens * segments <= _MOST_PARTIALS
    return segments if few and num_segments(longest_context, block_size) > 1 else 0


def value_width(head_dim: int) -> int:
    """Elements in a row of V in the KV cache: whole vectors at any level, as in partial results."""
    return partial_floats(head_dim) - STATE_LANES


def attention_scratch_bytes(rows: int, num_heads: int, head_dim: int, segments: int) -> int:
    """See `targets.base.Target`."""
    return 4 * rows * num_heads * segments * partial_floats(head_dim)
