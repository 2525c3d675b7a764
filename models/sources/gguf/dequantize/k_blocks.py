"""Blocks of 256 elements whose groups have scales of 4 to 8 bits: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K."""

from __future__ import annotations

import numpy as np

from llmc.models.convert import Array
from llmc.models.sources.gguf.dequantize.fields import bits, halves, nibbles, pairs_of_bits
from llmc.models.sources.gguf.dequantize.parts import Parts


def q2_k(blocks: Array) -> Parts:
    packed = blocks[:, :16]
    numbers = pairs_of_bits(blocks[:, 16:80], 32).view(np.int8)
    return Parts(numbers, halves(blocks, 80), packed & 15, halves(blocks, 82), packed >> 4)


def q3_k(blocks: Array) -> Parts:
    scales = nibbles(blocks[:, 96:104], 8)
    scales |= pairs_of_bits(blocks[:, 104:108], 4) << 4
    signed = scales.view(np.int8)
    signed -= 32
    numbers = pairs_of_bits(blocks[:, 32:96], 32).view(np.int8)
    # The third bit is set for numbers that are not lowered by 4.
    numbers -= ((bits(blocks[:, :32], 32) ^ 1) << 2).view(np.int8)
    return Parts(numbers, halves(blocks, 108), signed)


def _scales_and_minima(blocks: Array) -> tuple[Array, Array]:
    """[blocks, 8] each, for Q4_K and Q5_K: twelve bytes hold eight scales and eight minima of 6 bits."""
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 2) & 48)), axis=1)
    minima = np.concatenate((mid & 63, (high >> 4) | ((mid >> 2) & 48)), axis=1)
    return scales, minima


def q4_k(blocks: Array) -> Parts:
    scales, minima = _scales_and_minima(blocks)
    numbers = nibbles(blocks[:, 16:], 32).view(np.int8)
    return Parts(numbers, halves(blocks, 0), scales, halves(blocks, 2), minima)


def q5_k(blocks: Array) -> Parts:
    scales, minima = _scales_and_minima(blocks)
    numbers = nibbles(blocks[:, 48:], 32)
    numbers |= bits(blocks[:, 16:48], 32) << 4
    return Parts(numbers.view(np.int8), halves(blocks, 0), scales, halves(blocks, 2), minima)


def q6_k(blocks: Array) -> Parts:
    numbers = nibbles(blocks[:, :128], 64)
    numbers |= pairs_of_bits(blocks[:, 128:192], 32) << 4
    signed = numbers.view(np.int8)
    signed -= 32
    return Parts(signed, halves(blocks, 208), blocks[:, 192:208].view(np.int8))
