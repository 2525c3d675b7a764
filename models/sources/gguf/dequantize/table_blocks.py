"""Blocks of 4 bits an element that stand for the values of one table: IQ4_NL and IQ4_XS."""

from __future__ import annotations

import numpy as np

from llmc.models.convert import Array
from llmc.models.sources.gguf.dequantize.fields import halves, nibbles

_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def iq4_nl(blocks: Array, out: Array) -> None:
    np.multiply(halves(blocks, 0), _VALUES[nibbles(blocks[:, 2:], 16)], out=out)


def iq4_xs(blocks: Array, out: Array) -> None:
    """Eight groups, with scales of 6 bits: the upper two in a word, the lower four in bytes."""
    word = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    upper = (word >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & 3
    scales = (nibbles(blocks[:, 4:8], 1) | (upper << 4)).view(np.int8)
    scales -= 32
    grouped = out.reshape(len(out), 8, 32)
    values = _VALUES[nibbles(blocks[:, 8:], 16)].reshape(grouped.shape)
    np.multiply((halves(blocks, 0) * scales)[:, :, None], values, out=grouped)
