"""Numbers of few bits that are looked up in a table, as floats or as pairs of bf16."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.linear.micro.base import B16X2, F32
from llmc.compiler.targets.cpu.kernels.linear.readers.numbers import Numbers


class LookedUp(Numbers):
    """Common to such numbers. count: size of the table.

    Table values are the numbers minus the middle of their range, or the numbers themselves if a zero point is stored.
    """

    count: ClassVar[int]

    def bind(self, k: b.Kernel) -> None:
        super().bind(k)
        values = self.table_values()
        if self.operand == F32:
            self.table = b.Vectors(len(values) // b.WIDTH)
            for i, value in enumerate(values):
                b.store(self.table.buffer, T.float32(value), i)
        if self.operand == B16X2:
            words = pairs_of_table(values)
            self.table = b.Vectors(len(words) // b.WIDTH, "int32")
            for i, word in enumerate(words):
                b.store(self.table.buffer, T.int32(word), i)

    def table_values(self) -> Sequence[float]:
        """The table: each number's value as a float."""
        return [float(i - self.middle) for i in range(self.count)]

    @property
    def middle(self) -> int:
        """Offset of the numbers, which the table's values lack; 0 if zero points are stored."""
        return 0 if self.p.asymmetric else self.count // 2

    @abstractmethod
    def bit_of(self, half: int, odd: int) -> int:
        """Lowest bit, in its word, of the pair that `bf16_of` looks up."""

    def bf16_of(self, word: b.Expr, half: int, odd: int) -> b.Expr:
        return T.call_extern("int32x16", f"llmc_looked_up_{self.bit_of(half, odd)}", word, self.table[0])


def is_bf16(values: Sequence[float]) -> bool:
    """Whether every value of a table is exact in bf16."""
    return not (np.asarray(values, np.float32).view(np.uint32) & 0xFFFF).any()


def pairs_of_table(values: Sequence[float]) -> list[int]:
    """Table of bf16 values, two per 32-bit word. One of 16 values stands there twice: a fifth bit of an index is
    ignored."""
    halves = np.asarray(values, np.float32).view(np.uint32) >> 16
    words = halves[0::2] | halves[1::2] << 16
    return [*words.view(np.int32).tolist()] * max(1, b.WIDTH // len(words))
