"""Unpacks small numbers from the words of a checkpoint; the first number is in the lowest bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORD = 32


def words_of(count: int, bits: int) -> int:
    """The number of 32-bit words that hold `count` numbers packed without gaps."""
    return -(-count * bits // _WORD)


def unpack(words: NDArray[Any], bits: int, count: int) -> NDArray[np.uint8]:
    """The first `count` numbers along the last axis of int32 words [..., W]; a number may lie in two words."""
    words = words.view(np.uint32)
    out = np.empty((*words.shape[:-1], count), np.uint8)
    mask = np.uint32((1 << bits) - 1)
    if _WORD % bits == 0:
        each = _WORD // bits
        for i in range(min(each, count)):
            wanted = out[..., i::each]
            np.copyto(wanted, (words[..., : wanted.shape[-1]] >> np.uint32(i * bits)) & mask, casting="unsafe")
        return out
    for i in range(count):
        word, shift = divmod(i * bits, _WORD)
        number = words[..., word] >> np.uint32(shift)
        if shift + bits > _WORD:
            number = number | (words[..., word + 1] << np.uint32(_WORD - shift))
        np.copyto(out[..., i], number & mask, casting="unsafe")
    return out


def unpack_slice(words: NDArray[Any], bits: int, first: int, count: int) -> NDArray[np.uint8]:
    """Numbers [first, first + count) along the last axis of int32 words [..., W]."""
    # A number starts at a word boundary only once in 32 numbers.
    start = first - first % _WORD
    part = words[..., words_of(start, bits) : words_of(first + count, bits)]
    return unpack(part, bits, first + count - start)[..., first - start :]


def nibbles(packed: NDArray[np.uint8], low_first: bool = True) -> NDArray[np.uint8]:
    """Unpacks bytes [..., B] into 4-bit numbers [..., 2 B]."""
    out = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., 0 if low_first else 1 :: 2])
    np.right_shift(packed, 4, out=out[..., 1 if low_first else 0 :: 2])
    return out
