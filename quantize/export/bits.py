"""Packs small numbers into words, the first number in the lowest bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack(numbers: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Packs the last axis into int32 [..., words]. bits: 4 or 8. A row is zero-padded to whole words."""
    each = 32 // bits
    count = numbers.shape[-1]
    words = np.zeros((*numbers.shape[:-1], -(-count // each)), np.uint32)
    for i in range(min(each, count)):
        some = numbers[..., i::each]
        words[..., : some.shape[-1]] |= some.astype(np.uint32) << np.uint32(i * bits)
    return words.view(np.int32)


def nibble_pairs(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Packs 4-bit numbers [..., K] into bytes [..., K / 2], the first of each pair in the low half."""
    return numbers[..., ::2] | (numbers[..., 1::2] << np.uint8(4))


def stored_scale(scale: NDArray[Any], dtype: str) -> tuple[NDArray[Any], str]:
    """Scales as bits of `dtype`, which must hold them exactly, and the safetensors name of that dtype."""
    if dtype == "bf16":
        return (np.ascontiguousarray(scale).view(np.uint32) >> 16).astype(np.uint16), "BF16"
    return (scale.astype(np.float16), "F16") if dtype == "f16" else (np.ascontiguousarray(scale), "F32")
