"""The panels of a quantized weight, as kernels read them.

A line is 8 elements of K: two words of 8-bit numbers or one word of 4-bit ones, low halves first. A panel is its lines,
each as words of all columns; each group of lines may have a byte for each column: a zero point, or a step with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.cpu.kernels import builder as b

LINE = 8
_MASK = 0x0F0F0F0F


@dataclass(frozen=True)
class Steps:
    """Of a group of a panel, for each vector of columns: what makes bytes of 4-bit numbers, times · number + plus,
    which are (number − zero) · step + 128. They lie in memory: in registers there is no place for them beside sums."""

    memory: b.Scratch

    def times(self, v: b.Expr) -> b.Expr:
        """In both halves of a word."""
        return self.memory.vector(2 * v * b.WIDTH)

    def plus(self, v: b.Expr) -> b.Expr:
        """In all bytes of a word."""
        return self.memory.vector((2 * v + 1) * b.WIDTH)


class QuantWeight:
    """A weight of `bits` bits in panels of `columns`: `lines` of K in `groups` of `group_lines`.

    integer: its numbers are used as bytes, not as float32; steps: as `Steps` says. `bind` comes before everything else.
    """

    def __init__(
        self, bits: int, columns: int, lines: int, groups: int, group_lines: int, *, integer: bool, asymmetric: bool,
        steps: bool = False,
    ) -> None:  # fmt: skip
        self.bits, self.columns, self.lines = bits, columns, lines
        self.groups, self.group_lines = groups, group_lines
        self.integer, self.asymmetric, self.has_steps = integer, asymmetric, steps
        self.vectors = columns // b.WIDTH
        self.line_words = bits // 4
        self.panel_words = lines * self.line_words

    def bind(self, w: tirx.Buffer, of_group: tirx.Buffer | None) -> None:
        """Takes the buffers of the kernel that is being written, and makes what its numbers are looked up in."""
        self.w, self.of_group = w, of_group
        if self.has_steps:
            self._steps = Steps(b.Scratch(2 * self.columns, "int32"))
        if not self.integer and self.bits == 4:
            middle = 0 if self.asymmetric else 1 << (self.bits - 1)
            self.table = T.alloc_buffer((b.WIDTH,), "float32", scope="local")
            for i in range(b.WIDTH):
                b.store(self.table, T.float32(i - middle), i)

    @property
    def line_bytes(self) -> int:
        """Of a line of a panel."""
        return 4 * self.line_words * self.columns

    @property
    def line_vectors(self) -> int:
        """Vectors of a line of a panel."""
        return self.line_words * self.vectors

    def position(self, panel: b.Expr, line: b.Expr) -> b.Expr:
        """Where a line of a panel starts."""
        return (panel * self.panel_words + line * self.line_words) * self.columns

    def word(self, panel: b.Expr, line: b.Expr, v: int, i: int) -> b.Expr:
        """Word i of a line of 16 columns, kept in a register."""
        kept = b.Vectors(1, "int32")
        kept[0] = self.w[T.ramp(self.position(panel, line) + (i * self.columns + v * b.WIDTH), 1, b.WIDTH)]
        return kept[0]

    def fetch(self, position: b.Expr, level: int = 1) -> None:
        """Brings a vector of the weight into the cache of a level."""
        b.do("prefetch_l2" if level == 2 else "prefetch", b.at(self.w, position))

    def step_and_zero(self, panel: b.Expr, group: b.Expr, v: int) -> tuple[b.Expr, b.Expr]:
        """Of a group of 16 columns, as int32."""
        assert self.of_group is not None
        both = T.Cast(
            "int32x16", self.of_group[T.ramp((panel * self.groups + group) * self.columns + v * b.WIDTH, 1, b.WIDTH)]
        )
        return T.bitwise_and(both, T.broadcast(T.int32(15), b.WIDTH)), T.shift_right(
            both, T.broadcast(T.int32(4), b.WIDTH)
        )

    def fetch_steps(self, panel: b.Expr, group: b.Expr) -> None:
        """Brings what `steps` reads of a group of a panel into the cache."""
        b.do("prefetch", b.at(self.of_group, (panel * self.groups + group) * self.columns))

    def bytes_of(self, word: b.Expr, half: int, steps: Steps | None = None, v: int = 0) -> b.Expr:
        """Four numbers of a half of a line as unsigned bytes; word: where they are; v: which vector of `steps`."""
        if self.bits == 8:
            return word
        bits = T.shift_right(word, T.broadcast(T.int32(4), b.WIDTH)) if half else word
        numbers = T.bitwise_and(bits, T.broadcast(T.int32(_MASK), b.WIDTH))
        if steps is None:
            return numbers
        return T.call_extern("int32x16", "llmc_stepped", numbers, steps.times(v), steps.plus(v))

    def element(self, word: b.Expr, place: int, zero: b.Expr | None) -> b.Expr:
        """number − zero of element `place` of a line as float32, exactly; 8-bit ones times 2²⁴. word: where it is."""
        if self.bits == 8:
            value = b.call(f"byte_{place % 4}", word)
            return value if zero is None else b.call("sub", value, zero)
        bit = (place % 4) * 8 + (place // 4) * 4
        shifted = T.shift_right(word, T.broadcast(T.int32(bit), b.WIDTH)) if bit else word
        value = b.call("nibble", shifted, self.table[T.ramp(0, 1, b.WIDTH)])
        return value if zero is None else b.call("sub", value, zero)

    def zeros(self, panels: Sequence[b.Expr], group: b.Expr) -> b.Vectors:
        """The zero points of a group of some panels, as numbers of the kind that sums or `element` have."""
        assert self.of_group is not None
        kind = "int32" if self.integer else "float32"
        found = b.Vectors(len(panels) * self.vectors, kind)
        for i, panel in enumerate(panels):
            for v in range(self.vectors):
                at = (panel * self.groups + group) * self.columns + v * b.WIDTH
                value = T.Cast(f"{kind}x{b.WIDTH}", self.of_group[T.ramp(at, 1, b.WIDTH)])
                if self.bits == 8 and not self.integer:
                    value = b.call("mul", b.call("sub", value, b.splat(128.0)), b.splat(2.0**24))
                found[i * self.vectors + v] = value
        return found

    def steps(self, panel: b.Expr, group: b.Expr) -> Steps:
        """Those of a group of a panel, until this is called again."""
        assert self.of_group is not None
        for v in range(self.vectors):
            at = b.at(self.of_group, (panel * self.groups + group) * self.columns + v * b.WIDTH)
            self._steps.memory.store(T.call_extern("int32x16", "llmc_step_times", at), 2 * v * b.WIDTH)
            self._steps.memory.store(T.call_extern("int32x16", "llmc_step_plus", at), (2 * v + 1) * b.WIDTH)
        return self._steps

    def unpack(self, wide: b.Scratch, panel: b.Expr, line0: b.Expr, length: b.Expr) -> None:
        """Lines [line0, line0 + length) of a panel to `wide`: bytes for integers, else number − zero as float32."""
        if not self.has_steps and (self.integer or not self.asymmetric):
            with T.serial(length) as line:
                self._unpack_line(wide, panel, line0, line, None)
            return
        with T.serial(b.let(T.truncdiv(length + (self.group_lines - 1), self.group_lines))) as group:
            first = b.let(group * self.group_lines)
            number = b.let(T.truncdiv(line0, self.group_lines) + group)
            found = self.steps(panel, number) if self.has_steps else self.zeros([panel], number)
            here = b.let(T.min(length - first, self.group_lines))
            with T.serial(here) as line:
                self._unpack_line(wide, panel, line0, first + line, found)

    def _unpack_line(
        self, wide: b.Scratch, panel: b.Expr, line0: b.Expr, line: b.Expr,
        of_group: b.Vectors | Steps | None,
    ) -> None:  # fmt: skip
        places = 2 if self.integer else LINE
        for v in range(self.vectors):
            words = [self.word(panel, line0 + line, v, i) for i in range(self.line_words)]
            of_place = [words[place * self.line_words // places] for place in range(places)]
            if self.integer:
                steps = of_group if isinstance(of_group, Steps) else None
                values = [self.bytes_of(word, half, steps, v) for half, word in enumerate(of_place)]
            else:
                zero = of_group[v] if isinstance(of_group, b.Vectors) else None
                values = [self.element(word, place, zero) for place, word in enumerate(of_place)]
            for i, value in enumerate(values):
                wide.store(value, (line * len(values) + i) * self.columns + v * b.WIDTH)
