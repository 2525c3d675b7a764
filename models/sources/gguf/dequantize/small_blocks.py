"""Blocks of 32 elements with one scale, some with a minimum: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0."""

from __future__ import annotations

import numpy as np

from llmc.models.convert import Array
from llmc.models.sources.gguf.dequantize.fields import halves, nibbles
from llmc.models.sources.gguf.dequantize.parts import Parts


def q4_0(blocks: Array) -> Parts:
    numbers = nibbles(blocks[:, 2:], 16).view(np.int8)
    numbers -= 8
    return Parts(numbers, halves(blocks, 0))


def q4_1(blocks: Array) -> Parts:
    return Parts(nibbles(blocks[:, 4:], 16).view(np.int8), halves(blocks, 0), offset=-halves(blocks, 2))


def _five_bits(blocks: Array, at: int) -> Array:
    """Four bytes of fifth bits, then the low nibbles."""
    numbers = nibbles(blocks[:, at + 4 :], 16)
    numbers |= np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4
    return numbers.view(np.int8)


def q5_0(blocks: Array) -> Parts:
    numbers = _five_bits(blocks, 2)
    numbers -= 16
    return Parts(numbers, halves(blocks, 0))


def q5_1(blocks: Array) -> Parts:
    return Parts(_five_bits(blocks, 4), halves(blocks, 0), offset=-halves(blocks, 2))


def q8_0(blocks: Array) -> Parts:
    return Parts(blocks[:, 2:].view(np.int8), halves(blocks, 0))
