"""Weights of 5-bit numbers: one word per line, and one extra word behind every four lines.

Each half of a line's word has three numbers of 5 bits and the top bit of the fourth number. The other bits of the
fourth are in the extra word. A shift brings the line's pairs (0, 2), (1, 3), (4, 6) to the lowest bits of 16-bit lanes;
(5, 7) is assembled.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import fives
from llmc.compiler.targets.cpu.kernels.linear.micro.base import F32
from llmc.compiler.targets.cpu.kernels.linear.readers.sharing import Sharing, pair_of
from llmc.compiler.targets.cpu.target import Target

_LAST = 3
"""Number of the pair that is assembled: (5, 7)."""


class FiveBits(Sharing):
    """The second word of a line, which is assembled, has the last pair."""

    bits, count, second = 5, 32, "fives_3"

    @staticmethod
    def helpers(target: Target) -> str:
        return fives.helpers(target)

    def word_of(self, unit: int) -> int:
        return int(pair_of(unit)[0] == _LAST if self.operand == F32 else unit == _LAST)

    def pair_of(self, word: b.Expr, half: int, odd: int) -> b.Expr:
        pair = 2 * half + odd
        return word if pair == _LAST else T.call_extern("int32x16", f"llmc_fives_{pair}", word)

    def bit_of(self, half: int, odd: int) -> int:
        return _bit_of(2 * half + odd)

    def element(self, word: b.Expr, place: int) -> b.Expr:
        pair, high = pair_of(place)
        bit = 16 * high + _bit_of(pair)
        shifted = T.shift_right(word, T.broadcast(T.int32(bit), b.WIDTH)) if bit else word
        return b.call("five", shifted, self.table[0], self.table[1])


def _bit_of(pair: int) -> int:
    """Lowest bit of a pair in its word."""
    return 0 if pair == _LAST else 5 * pair
