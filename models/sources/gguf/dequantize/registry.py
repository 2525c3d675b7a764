"""The function of each quantized type, by exact name."""

from __future__ import annotations

from collections.abc import Callable

from llmc.models.convert import Array
from llmc.models.sources.gguf.dequantize import k_blocks, small_blocks, table_blocks
from llmc.models.sources.gguf.dequantize.parts import Parts

PARTS: dict[str, Callable[[Array], Parts]] = {
    "Q4_0": small_blocks.q4_0,
    "Q4_1": small_blocks.q4_1,
    "Q5_0": small_blocks.q5_0,
    "Q5_1": small_blocks.q5_1,
    "Q8_0": small_blocks.q8_0,
    "Q2_K": k_blocks.q2_k,
    "Q3_K": k_blocks.q3_k,
    "Q4_K": k_blocks.q4_k,
    "Q5_K": k_blocks.q5_k,
    "Q6_K": k_blocks.q6_k,
    "IQ4_NL": table_blocks.iq4_nl,
    "IQ4_XS": table_blocks.iq4_xs,
    "MXFP4": table_blocks.mxfp4,
}


def dequantize(type: str, blocks: Array, out: Array) -> None:
    """Writes the values of blocks of a type to float32 [blocks, elements of a block]."""
    PARTS[type](blocks).write(out)
