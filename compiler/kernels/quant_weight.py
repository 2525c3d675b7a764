"""The panels of a quantized weight, as kernels read them.

A line is 8 elements of K: two words of 8-bit numbers or one word of 4-bit ones, low halves first. A panel is its lines,
each as words of all columns; each group of lines has, where it is asymmetric, a zero point for each column.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernels import builder as b

LINE = 8
_AHEAD = 768  # words between a line of one row's stream and what is fetched with it
_MASK = 0x0F0F0F0F


class QuantWeight:
    """A weight of `bits` bits in panels of `columns`: `lines` of K in `groups` of `group_lines`.

    integer: its numbers are used as bytes, not as float32. `bind` comes before everything else.
    """

    def __init__(
        self, bits: int, columns: int, lines: int, groups: int, group_lines: int, *, integer: bool, asymmetric: bool
    ) -> None:
        self.bits, self.columns, self.lines = bits, columns, lines
        self.groups, self.group_lines = groups, group_lines
        self.integer, self.asymmetric = integer, asymmetric
        self.vectors = columns // b.WIDTH
        self.line_words = bits // 4
        self.panel_words = lines * self.line_words

    def bind(self, w: tirx.Buffer, zero: tirx.Buffer | None) -> None:
        """Takes the buffers of the kernel that is being written, and makes what its numbers are looked up in."""
        self.w, self.zero = w, zero
        if not self.integer and self.bits == 4:
            middle = 0 if self.asymmetric else 1 << (self.bits - 1)
            self.table = T.alloc_buffer((b.WIDTH,), "float32", scope="local")
            for i in range(b.WIDTH):
                b.store(self.table, T.float32(i - middle), i)

    def packed(self, panel: b.Expr, line: b.Expr, v: int) -> list[b.Expr]:
        """The words of one line of 16 columns, kept in registers."""
        start = (panel * self.panel_words + line * self.line_words) * self.columns + v * b.WIDTH
        kept = b.Vectors(self.line_words, "int32")
        for word in range(self.line_words):
            kept[word] = self.w[T.ramp(start + word * self.columns, 1, b.WIDTH)]
        return [kept[word] for word in range(self.line_words)]

    def fetch(self, panel: b.Expr, line: b.Expr, v: int, *, one_row: bool) -> None:
        """One row asks for what comes a while after a line of each stream; several, who read one panel at a time, for
        as much of the next panel, at as many places: few streams are slow."""
        for word in range(self.line_words):
            if one_row:
                start = panel * self.panel_words + line * self.line_words + word
                at = start * self.columns + (v * b.WIDTH + _AHEAD)
            else:
                place = (v * self.line_words + word) * self.lines
                at = (panel + 1) * (self.panel_words * self.columns) + (line + place) * b.WIDTH
            b.do("prefetch", b.at(self.w, at))

    def bytes_of(self, packed: Sequence[b.Expr]) -> list[b.Expr]:
        """Both words of a line as unsigned bytes."""
        if self.bits == 8:
            return list(packed)
        mask = T.broadcast(T.int32(_MASK), b.WIDTH)
        high = T.shift_right(packed[0], T.broadcast(T.int32(4), b.WIDTH))
        return [T.bitwise_and(packed[0], mask), T.bitwise_and(high, mask)]

    def element(self, packed: Sequence[b.Expr], place: int, zero: b.Expr | None) -> b.Expr:
        """number − zero of element `place` of a line as float32, exactly; 8-bit ones times 2²⁴."""
        if self.bits == 8:
            return b.call(f"byte_{place % 4}", packed[place // 4])
        bit = (place % 4) * 8 + (place // 4) * 4
        word = T.shift_right(packed[0], T.broadcast(T.int32(bit), b.WIDTH)) if bit else packed[0]
        value = b.call("nibble", word, self.table[T.ramp(0, 1, b.WIDTH)])
        return value if zero is None else b.call("sub", value, zero)

    def zeros(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors:
        """The zero points of a group of some panels, as numbers of the kind that sums are."""
        assert self.zero is not None
        kind = "int32" if self.integer else "float32"
        found = b.Vectors(len(panels) * self.vectors, kind)
        for i, panel in enumerate(panels):
            for v in range(self.vectors):
                at = (panel * self.groups + group) * self.columns + v * b.WIDTH
                found[i * self.vectors + v] = T.Cast(f"{kind}x{b.WIDTH}", self.zero[T.ramp(at, 1, b.WIDTH)])
        return found

    def unpack(self, wide: b.Scratch, panel: b.Expr, line0: b.Expr, length: b.Expr) -> None:
        """Lines [line0, line0 + length) of a panel to `wide`: bytes for integers, else number − zero as float32."""
        if self.integer or not self.asymmetric:
            with T.serial(length) as line:
                self._unpack_line(wide, panel, line0, line, None)
            return
        with T.serial(b.let(T.truncdiv(length + (self.group_lines - 1), self.group_lines))) as group:
            first = b.let(group * self.group_lines)
            zeros = self.zeros([panel], T.truncdiv(line0, self.group_lines) + group)
            here = b.let(T.min(length - first, self.group_lines))
            with T.serial(here) as line:
                self._unpack_line(wide, panel, line0, first + line, zeros)

    def _unpack_line(
        self, wide: b.Scratch, panel: b.Expr, line0: b.Expr, line: b.Expr, zeros: b.Vectors | None
    ) -> None:
        for v in range(self.vectors):
            words = self.packed(panel, line0 + line, v)
            if self.integer:
                values = self.bytes_of(words)
            else:
                zero = None if zeros is None else zeros[v]
                values = [self.element(words, place, zero) for place in range(LINE)]
            for i, value in enumerate(values):
                wide.store(value, (line * len(values) + i) * self.columns + v * b.WIDTH)
