"""Buffers beside a model's parameters, whose values follow from its configuration and max_len."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmc.models.config import ModelConfig
from llmc.models.rope import Array, cos_sin_table


def table_shapes(config: ModelConfig, max_len: int) -> dict[str, tuple[int, ...]]:
    """Shapes by buffer name."""
    slopes = {} if config.alibi is None else {"slopes": (config.num_heads,)}
    return {**{name: (max_len, rope.dim) for name, rope in config.rope_tables.items()}, **slopes}


def tables(config: ModelConfig, max_len: int) -> Iterator[tuple[str, Array]]:
    """(name, values float32) of rotary tables and ALiBi slopes. Raises ModelError."""
    for name, rope in config.rope_tables.items():
        yield name, cos_sin_table(rope, max_len)
    if config.alibi is not None:
        yield "slopes", np.array(config.alibi.slopes, np.float32)
