"""A tensor of a GGUF file, with rows in our order, dequantized a few blocks at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from llmc.models.brief import brief_name
from llmc.models.convert import DTYPES, Array, convert
from llmc.models.errors import ModelError
from llmc.models.sources.base import ArrayTensor, Tensor
from llmc.models.sources.gguf.architecture import Place
from llmc.models.sources.gguf.dequantize.parts import Parts
from llmc.models.sources.gguf.dequantize.registry import PARTS, dequantize
from llmc.models.sources.gguf.header import GgufFile
from llmc.models.sources.gguf.stored import LAYOUTS, StoredBlocks, StoredCodes
from llmc.models.sources.gguf.types import StoredType
from llmc.models.sources.stored import Stored

_PLAIN = {name.upper(): dtype for name, dtype in DTYPES.items()}
_ELEMENTS = 1 << 16  # temporaries of this size stay in cache


@dataclass(frozen=True)
class HeadRows:
    """Row order of q and k in llama.cpp files with interleaved rope: rotation pairs are neighbours; ours are
    half-split.

    head_dim: rows per head. rotary_dim: the number of leading ones in pairs.
    """

    head_dim: int
    rotary_dim: int

    def stored(self, rows: Array) -> Array:
        """File positions of our rows."""
        head, within = np.divmod(rows, self.head_dim)
        half = self.rotary_dim // 2
        paired = np.where(within < half, 2 * within, 2 * (within - half) + 1)
        found: Array = head * self.head_dim + np.where(within < self.rotary_dim, paired, within)
        return found


class QuantizedTensor(Tensor):
    """A tensor of blocks. called: its name in errors. order: None if rows are in our order."""

    def __init__(
        self, called: str, rows: Array, shape: tuple[int, ...], type: StoredType, order: HeadRows | None
    ) -> None:
        self._called, self._rows, self._shape, self._type, self._order = called, rows, shape, type, order

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def read(self, first: int, out: Array) -> None:
        if len(self._shape) == 1:
            convert(self._values(0, 1)[0, first : first + len(out)], out)
            return
        for at in range(0, len(out), self._rows_at_once):
            some = out[at : at + self._rows_at_once]
            convert(self._values(first + at, len(some)), some)

    @property
    def stored(self) -> Stored | None:
        layout = LAYOUTS.get(self._type.name)
        if len(self._shape) == 2 and self._type.name == "MXFP4":
            return StoredCodes(self._blocks, self._rows_at_once)
        if layout is None or len(self._shape) != 2:
            return None
        return StoredBlocks(self._parts, self._rows_at_once, layout, layout)

    @property
    def _rows_at_once(self) -> int:
        return max(1, _ELEMENTS // self._shape[-1])

    def _parts(self, first: int, count: int) -> Parts:
        return PARTS[self._type.name](self._blocks(first, count))

    def _values(self, first: int, count: int) -> Array:
        """float32 [count, columns] of rows [first, first + count)."""
        blocks = self._blocks(first, count)
        values = np.empty((len(blocks), self._type.elements), np.float32)
        # The largest scale times a number may be infinite; infinity is then the value.
        with np.errstate(over="ignore"):
            dequantize(self._type.name, blocks, values)
        found: Array = values.reshape(count, -1)
        return found

    def _blocks(self, first: int, count: int) -> Array:
        """uint8 [blocks, bytes of a block] of rows in our order. Raises ModelError."""
        rows = np.arange(first, first + count)
        stored = rows if self._order is None else self._order.stored(rows)
        # Contiguous rows are a view of the file.
        data = self._rows[first : first + count] if self._order is None else self._rows[stored]
        blocks = data.reshape(-1, self._type.nbytes)
        self._check_scales(blocks, stored)
        return blocks

    def _check_scales(self, blocks: Array, rows: Array) -> None:
        for at in self._type.scales:
            # Finite unless all exponent bits, in the second byte, are set.
            bad = (blocks[:, at + 1] & 0x7C) == 0x7C
            if bad.any():
                block = int(bad.argmax())
                value = float(np.ascontiguousarray(blocks[block, at : at + 2]).view(np.float16)[0])
                raise self._wrong_scale(value, int(rows[block * len(rows) // len(blocks)]))
        if self._type.power is not None and (bad := blocks[:, self._type.power] == 255).any():
            raise self._wrong_scale(math.nan, int(rows[int(bad.argmax()) * len(rows) // len(blocks)]))

    def _wrong_scale(self, value: float, row: int) -> ModelError:
        return ModelError(
            f"{self._called} of type {self._type.name} has a scale of {value} in row {row}; download it again"
        )


class _OrderedArray(Tensor):
    """An unquantized tensor with reordered rows."""

    def __init__(self, array: Array, order: HeadRows) -> None:
        self._array, self._order = array, order

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def read(self, first: int, out: Array) -> None:
        convert(self._array[self._order.stored(np.arange(first, first + len(out)))], out)


def open_tensor(file: GgufFile, place: Place, order: HeadRows | None = None) -> Tensor:
    """A tensor of a file, or a part of it, not read yet. order: of its rows, if not ours."""
    entry, rows = file.tensors[place.name], file.rows(place.name)
    shape = place.shape(entry.shape)
    if place.expert is not None:
        # The order of a bias, seen as a one-column matrix.
        each = math.prod(shape[:-1])
        rows = rows[place.expert * each : (place.expert + 1) * each]
    if entry.type.name not in _PLAIN:
        called = f"{file.path}: tensor {brief_name(place.name)}"
        if order is not None and len(shape) == 1:
            raise ModelError(f"{called} is a vector of type {entry.type.name}; convert the model with F32 vectors")
        return QuantizedTensor(called, rows, shape, entry.type, order)
    array = rows.view(_PLAIN[entry.type.name]).reshape(shape)
    return ArrayTensor(array) if order is None else _OrderedArray(array, order)
