"""What lies in blocks: half-precision numbers, and numbers of 1, 2 and 4 bits in bytes."""

from __future__ import annotations

import numpy as np

from llmc.models.convert import Array


def halves(blocks: Array, at: int) -> Array:
    """The f16 at a byte of every block, as float32 [blocks, 1]."""
    # A copy, since its place in memory may be odd.
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def nibbles(data: Array, group: int) -> Array:
    """Of every `group` bytes the lower halves, then the upper ones: uint8 [blocks, twice the bytes]."""
    packed = data.reshape(len(data), -1, 1, group)
    found = np.empty((len(data), packed.shape[1], 2, group), np.uint8)
    np.bitwise_and(packed[:, :, 0], 15, out=found[:, :, 0])
    np.right_shift(packed[:, :, 0], 4, out=found[:, :, 1])
    return found.reshape(len(data), -1)


def pairs_of_bits(data: Array, group: int) -> Array:
    """Of every `group` bytes the lowest two bits, then the next ones: uint8 [blocks, four times the bytes]."""
    packed = data.reshape(len(data), -1, 1, group)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return ((packed >> shifts) & 3).reshape(len(data), -1)


def bits(data: Array, group: int) -> Array:
    """Of every `group` bytes the lowest bits, then the next ones: uint8 [blocks, eight times the bytes]."""
    packed = data.reshape(len(data), -1, 1, group)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)
    return ((packed >> shifts) & 1).reshape(len(data), -1)
