"""Fields of blocks: half-precision numbers, and packed numbers of 1, 2 and 4 bits."""

from __future__ import annotations

import numpy as np

from llmc.models.convert import Array


def halves(blocks: Array, at: int) -> Array:
    """The f16 at byte `at` of every block, as float32 [blocks, 1]."""
    # Copied, because its address may be odd.
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def nibbles(data: Array, group: int) -> Array:
    """Per `group` bytes, the low nibbles, then the high ones: uint8 [blocks, 2 · bytes]."""
    packed = data.reshape(len(data), -1, 1, group)
    found = np.empty((len(data), packed.shape[1], 2, group), np.uint8)
    np.bitwise_and(packed[:, :, 0], 15, out=found[:, :, 0])
    np.right_shift(packed[:, :, 0], 4, out=found[:, :, 1])
    return found.reshape(len(data), -1)


def pairs_of_bits(data: Array, group: int) -> Array:
    """Per `group` bytes, the lowest two bits, then the next two, and so on: uint8 [blocks, 4 · bytes]."""
    packed = data.reshape(len(data), -1, 1, group)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return ((packed >> shifts) & 3).reshape(len(data), -1)


def bits(data: Array, group: int) -> Array:
    """Per `group` bytes, the lowest bits, then the next ones, and so on: uint8 [blocks, 8 · bytes]."""
    packed = data.reshape(len(data), -1, 1, group)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)
    return ((packed >> shifts) & 1).reshape(len(data), -1)
