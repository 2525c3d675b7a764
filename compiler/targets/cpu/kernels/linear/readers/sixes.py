"""Weights of 6-bit numbers: one word per line, and one extra word behind every two lines.

Each half of a line's word has two numbers of 6 bits and the top four bits of the fourth number. The third number and
the other two bits of the fourth are in the extra word. Pairs lie at bits 0 and 6 of 16-bit lanes. The line's word has
(0, 2) and (1, 3); its second word, which is assembled, has (4, 6) and (5, 7).
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import sixes
from llmc.compiler.targets.cpu.kernels.linear.readers.sharing import Sharing, pair_of
from llmc.compiler.targets.cpu.target import Target


class SixBits(Sharing):
    """Numbers become bf16 by a table of two vectors, and float32 by conversion."""

    bits, count, second = 6, 64, "sixes_second"

    @staticmethod
    def helpers(target: Target) -> str:
        return sixes.helpers(target)

    def pair_of(self, word: b.Expr, half: int, odd: int) -> b.Expr:
        return T.call_extern("int32x16", f"llmc_sixes_{odd}", word)

    def bit_of(self, half: int, odd: int) -> int:
        return 6 * odd

    def bf16_of(self, word: b.Expr, half: int, odd: int) -> b.Expr:
        return T.call_extern("int32x16", f"llmc_looked_up_six_{odd}", word, self.table[0], self.table[1])

    def element(self, word: b.Expr, place: int) -> b.Expr:
        pair, high = pair_of(place)
        bit = 16 * high + self.bit_of(0, pair % 2)
        shifted = T.shift_right(word, T.broadcast(T.int32(bit), b.WIDTH)) if bit else word
        return b.call("six", shifted, b.splat(float(-self.middle)))
