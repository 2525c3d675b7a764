"""Blocks used without requantization: the weight format that holds each type exactly, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from llmc.models.convert import Array
from llmc.models.sources.gguf.dequantize.fields import nibbles
from llmc.models.sources.gguf.dequantize.parts import Parts
from llmc.models.sources.stored import Stored
from llmc.quantize.formats.affine import MIDDLE, OFFSET, SHIFT, STEP, Affine
from llmc.quantize.formats.base import FLOAT, HALF, SCALE, Quantized, WeightFormat
from llmc.quantize.formats.codes import E8M0, Codes
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.tables import codes_of

LAYOUTS: dict[str, Affine] = {
    name: replace(layout, scale_kind=HALF)
    for name, layout in {
        "Q4_0": Affine(4, 32, 32, offsets=False),
        "Q4_1": Affine(4, 32, 32),
        "Q5_0": Affine(5, 32, 32, offsets=False),
        "Q5_1": Affine(5, 32, 32),
        "Q8_0": Affine(8, 32, 32, offsets=False),
        "Q2_K": Affine(4, 16),
        "Q3_K": Affine(4, 16, offsets=False),
        "Q4_K": Affine(4, 32),
        "Q5_K": Affine(5, 32),
        "Q6_K": Affine(6, 16, offsets=False),
        "IQ4_NL": Affine(4, 32, 32, offsets=False, table="iq4_nl"),
        "IQ4_XS": Affine(4, 32, offsets=False, table="iq4_nl"),
    }.items()
}
"""2- and 3-bit numbers take 4 bits. Single-group blocks without offsets become `Integers`, or `Codes` with a table."""


class StoredBlocks(Stored):
    """A matrix of one type. parts: fields of rows [first, first + count). at_once: rows read at a time.

    layout: of its type. held: the same, or a layout that also holds other types.
    """

    def __init__(self, parts: Callable[[int, int], Parts], at_once: int, layout: Affine, held: Affine) -> None:
        self.parts, self.at_once, self.layout, self.held = parts, at_once, layout, held
        self.format: WeightFormat = held
        if not held.stepped and not held.offsets:
            size, kind = held.group_size, held.scale_kind
            self.format = Codes(held.table, size, kind) if held.table else Integers(held.bits, size, scale_kind=kind)

    def read(self, first: int, out: Quantized) -> None:
        for at in range(0, len(out.numbers), self.at_once):
            some = out.rows(slice(at, at + self.at_once))
            self._write(self.parts(first + at, len(some.numbers)), some)

    def _write(self, parts: Parts, out: Quantized) -> None:
        format = self.held
        numbers = parts.numbers.reshape(out.numbers.shape)
        if format.table:
            np.copyto(out.numbers, codes_of(format.table, numbers))
        else:
            np.add(numbers, np.int16(format.middle), out=out.numbers, casting="unsafe")
        self._write_pair(parts.scale, parts.step, out, SCALE, STEP)
        if format.offsets:
            offset = np.zeros_like(parts.scale) if parts.offset is None else parts.offset
            self._write_pair(offset, parts.shift, out, OFFSET, SHIFT)

    def _write_pair(self, of_block: Array, of_group: Array | None, out: Quantized, whole: str, times: str) -> None:
        """Writes block values and group multipliers. of_group: None for ones."""
        format, layout, rows = self.held, self.layout, len(out.numbers)
        groups = np.ones((len(of_block), layout.block // layout.group_size), np.int16) if of_group is None else of_group
        if format.stepped:
            bytes_ = groups.astype(np.int16).reshape(rows, -1) + np.int16(MIDDLE)
            np.copyto(out.planes[times], np.repeat(bytes_, layout.group_size // format.group_size, 1), casting="unsafe")
            found = np.repeat(of_block.reshape(rows, -1), layout.block // format.block, 1)
        else:
            # A half times a byte is exact in float32.
            products = (of_block * groups.astype(np.float32)).reshape(rows, -1)
            found = np.repeat(products, layout.group_size // format.group_size, 1)
        np.copyto(out.planes[whole], found)

    def alike(self, others: Sequence[Stored]) -> Sequence[Stored] | None:
        """Holds matrices of several types in one layout: the smaller groups, offsets if any has them, the most bits of
        any.

        Unsigned numbers beside signed ones are held as signed, which takes a bit more: all have 6 or 8 bits. Codes
        beside integers become integers of 8 bits.
        """
        blocks = [other for other in others if isinstance(other, StoredBlocks)]
        if len(blocks) < len(others):
            return None
        layouts = [one.layout for one in (self, *blocks)]
        signs, tables = ({getattr(layout, name) for layout in layouts} for name in ("offsets", "table"))
        table = layouts[0].table if len(tables) == len(signs) == 1 else ""
        if len(tables) > 1:
            bits = 8
        elif len(signs) == 1:
            bits = max(layout.bits for layout in layouts)
        else:
            signed = max(layout.bits + layout.offsets for layout in layouts)
            bits = 6 if signed <= 6 else 8
        group, block = (min(getattr(layout, name) for layout in layouts) for name in ("group_size", "block"))
        # What groups of a block have is no half once it is multiplied by their steps.
        kind = FLOAT if group == block and any(layout.stepped for layout in layouts) else HALF
        format = Affine(bits, group, block, any(signs), table, kind)
        return [StoredBlocks(one.parts, one.at_once, one.layout, format) for one in (self, *blocks)]


class StoredCodes(Stored):
    """An MXFP4 matrix. blocks: uint8 [blocks, bytes of a block] of rows [first, first + count)."""

    def __init__(self, blocks: Callable[[int, int], Array], at_once: int) -> None:
        self._blocks, self._at_once = blocks, at_once
        self.format = Codes("e2m1", 32, E8M0)

    def read(self, first: int, out: Quantized) -> None:
        for at in range(0, len(out.numbers), self._at_once):
            some = out.rows(slice(at, at + self._at_once))
            blocks = self._blocks(first + at, len(some.numbers))
            np.copyto(some.numbers, nibbles(blocks[:, 1:], 16).reshape(some.numbers.shape), casting="unsafe")
            np.copyto(some.planes[SCALE], blocks[:, 0].reshape(some.planes[SCALE].shape))
