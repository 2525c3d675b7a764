"""Blocks of 4-bit codes of one table: IQ4_NL, IQ4_XS and MXFP4."""

from __future__ import annotations

import numpy as np

from llmc.models.convert import Array
from llmc.models.sources.gguf.dequantize.fields import halves, nibbles
from llmc.models.sources.gguf.dequantize.parts import Parts
from llmc.quantize.formats.codes import power_of
from llmc.quantize.formats.tables import TABLES

_NUMBERS = TABLES["iq4_nl"].astype(np.int8)
_TWICE_E2M1 = (2 * TABLES["e2m1"]).astype(np.int8)


def iq4_nl(blocks: Array) -> Parts:
    return Parts(_NUMBERS[nibbles(blocks[:, 2:], 16)], halves(blocks, 0))


def iq4_xs(blocks: Array) -> Parts:
    """Eight groups with 6-bit scales: the upper two bits in a word, the lower four in bytes."""
    word = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    upper = (word >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & 3
    scales = (nibbles(blocks[:, 4:8], 1) | (upper << 4)).view(np.int8)
    scales -= 32
    return Parts(_NUMBERS[nibbles(blocks[:, 8:], 16)], halves(blocks, 0), scales)


def mxfp4(blocks: Array) -> Parts:
    """A power of two, then 4-bit floats, which are multiples of 1/2."""
    half_power = power_of(blocks[:, :1]) / np.float32(2)
    return Parts(_TWICE_E2M1[nibbles(blocks[:, 1:], 16)], half_power)
