"""Groups with small steps and shifts under the scale and offset of a block: value = (number − middle) · step · scale −
shift · offset.

A block has a scale and, if the format has offsets, an offset, both floats. Each of its groups has a step and a shift,
bytes of −128 … 127. A block of a single group has neither: its step is 1. Numbers of 4 bits may be codes of a table
instead (`tables.py`): value = table[code] · step · scale. llama.cpp's formats convert without loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.formats.base import FLOAT, SCALE, Plane, Quantized, WeightFormat, check_finite, groups_of, inverse_of
from llmc.quantize.formats.scheme import Scheme
from llmc.quantize.formats.tables import TABLES, nearest, wanted_scale

STEP, OFFSET, SHIFT = "step", "offset", "shift"
MIDDLE = 128
"""Bias of stored steps and shifts: stored byte − 128 is the value."""
_LARGEST = 63  # largest step or shift that rounding produces; imported weights may have larger ones


@dataclass(frozen=True)
class Affine(WeightFormat):
    """block: elements per block, a multiple of group_size.
    offsets: an offset is stored beside each scale.
    table: name in `TABLES` for codes, which have no offsets; empty for integers.
    scale_kind: of scales and offsets, "f32" or "f16".
    """

    bits: int
    group_size: int = 32
    block: int = 256
    offsets: bool = True
    table: str = ""
    scale_kind: str = FLOAT
    kind: ClassVar[str] = "affine"

    @property
    def middle(self) -> int:
        """The middle subtracted from numbers; 0 for numbers of fewer than 6 bits with offsets."""
        return 0 if self.offsets and self.bits < 6 else 1 << (self.bits - 1)

    @property
    def stepped(self) -> bool:
        """Whether a block has several groups, each with a step."""
        return self.block != self.group_size

    def planes(self, k: int) -> tuple[Plane, ...]:
        blocks, groups = groups_of(k, self.block), self.groups(k)
        found = [(SCALE, self.scale_kind, blocks, True), (OFFSET, self.scale_kind, blocks, self.offsets),
                 (STEP, "u8", groups, self.stepped), (SHIFT, "u8", groups, self.offsets and self.stepped)]  # fmt: skip
        return tuple(Plane(name, dtype, count) for name, dtype, count, has in found if has)

    def scales(self, k: int) -> int:
        return self.groups(k)

    def describe(self) -> str:
        offsets = " with offsets" if self.offsets else ""
        return super().describe() + offsets + (f", in blocks of {self.block}" if self.stepped else "")

    def value(self, quantized: Quantized) -> NDArray[np.float64]:
        k, planes = quantized.numbers.shape[1], quantized.planes
        element = np.arange(k)
        group, block = element // self.group_size, element // self.block

        def scaled(of_block: str, of_group: str) -> NDArray[np.float64]:
            found = planes[of_block][:, block].astype(np.float64)
            return found * (planes[of_group][:, group].astype(np.float64) - MIDDLE) if self.stepped else found

        numbers = np.take(TABLES[self.table], quantized.numbers) if self.table else quantized.numbers
        middle = 0 if self.table else self.middle
        wide: NDArray[np.float64] = (numbers.astype(np.float64) - middle) * scaled(SCALE, STEP)
        return wide - scaled(OFFSET, SHIFT) if self.offsets else wide

    def quantize_rows(self, weight: NDArray[np.float32], out: Quantized) -> None:
        k, top = weight.shape[1], np.float32((1 << self.bits) - 1)
        starts = np.arange(0, k, self.group_size)
        low, high = np.minimum.reduceat(weight, starts, 1), np.maximum.reduceat(weight, starts, 1)
        check_finite(low, high)
        if self.table:
            scale = self._of_blocks(wanted_scale(self.table, low, high), out, SCALE, STEP)
            weight *= inverse_of(scale)[:, self.group_of(k)]
            np.copyto(out.numbers, nearest(self.table, weight))
            return
        if self.offsets:
            low, high = np.minimum(low, 0), np.maximum(high, 0)
            scale = (high - low) / top
            offset = self._of_blocks(-(low + np.float32(self.middle) * scale), out, OFFSET, SHIFT)
        else:
            scale = np.maximum(-low, high) / np.float32(self.middle - 1)
        scale = self._of_blocks(scale, out, SCALE, STEP)
        group = self.group_of(k)
        if self.offsets:
            weight += offset[:, group]
        weight *= inverse_of(scale)[:, group]
        np.rint(weight, out=weight)
        weight += np.float32(self.middle)
        np.clip(weight, 0, top, out=weight)
        np.copyto(out.numbers, weight, casting="unsafe")

    def _of_blocks(self, wanted: NDArray[Any], out: Quantized, of_block: str, of_group: str) -> Any:
        """Writes the closest representable values to those wanted by groups, [R, groups]; returns the values
        written."""
        if not self.stepped:
            np.copyto(out.planes[of_block], wanted)
            return out.planes[of_block].astype(np.float32)
        of = self.block // self.group_size
        starts = np.arange(0, wanted.shape[1], of)
        block = np.arange(wanted.shape[1]) // of
        np.divide(np.maximum.reduceat(np.abs(wanted), starts, 1), np.float32(_LARGEST), out=out.planes[of_block])
        whole = out.planes[of_block][:, block].astype(np.float32)
        steps = np.rint(wanted * inverse_of(whole))
        np.copyto(out.planes[of_group], steps + np.float32(MIDDLE), casting="unsafe")
        return steps * whole


SCHEMES: tuple[Scheme, ...] = ()
"""None: such weights only come from checkpoints, and are named after the closest scheme."""
