"""Matrices with separate tensors for numbers and scales: int8, FP8, and FP4 with two numbers a byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmc.quantize.checkpoints.base import (
    AGAIN,
    NOT_ROUNDED,
    Bytes,
    Floats,
    Inputs,
    Kind,
    Rows,
    ScaleKind,
    StoredFormat,
    StoredMatrix,
    StoredTensor,
)
from llmc.quantize.checkpoints.bits import nibbles
from llmc.quantize.checkpoints.floats import widened
from llmc.quantize.checkpoints.modules import PLAIN, Tensors
from llmc.quantize.formats.base import WHOLE_ROW, QuantizeError
from llmc.shown import shown

E8M0 = ("U8", "F8_E8M0")
"""Safetensors dtypes of power-of-two scales."""
_LARGEST_BLOCK = 1 << 20


@dataclass(frozen=True)
class Scales:
    """The scales of a matrix, in one tensor.

    rows_each: matrix rows that share a row of scales; 0 for one scale in all.
    kind: how the scales are stored.
    group_size: elements of a row that share a scale, or WHOLE_ROW.
    """

    name: str
    tensor: StoredTensor
    kind: ScaleKind
    rows_each: int
    group_size: int

    def codes(self, first: int, count: int) -> NDArray[Any]:
        """The stored scales of rows [first, first + count): [count, G]."""
        array = self.tensor.load()
        if not self.rows_each:
            return np.broadcast_to(array.reshape(1, 1), (count, 1))
        by_row = array.reshape(self.tensor.shape[0], -1)
        if self.rows_each == 1:
            return by_row[first : first + count]
        return by_row[(first + np.arange(count)) // self.rows_each]

    def read(self, first: int, count: int) -> tuple[Floats, Bytes | None]:
        """Scales [count, G], and their codes unless they are plain floats."""
        codes = self.codes(first, count)
        dtype = "F8_E8M0" if self.kind == "e8m0" else self.tensor.dtype
        return widened(dtype, codes), None if self.kind == "f32" else codes.astype(np.uint8)


def find_scales(
    tensors: Tensors,
    prefix: str,
    leaf: str,
    shape: tuple[int, int],
    per: Literal["tensor", "channel", "group", "block"],
    block: tuple[int, int] = (1, WHOLE_ROW),
    dtypes: tuple[str, ...] = PLAIN,
    of: str = "weight",
) -> Scales:
    """The scales `PREFIX.leaf` of a matrix of `shape`.

    block: (rows, columns) that share a scale; rows is 1 for groups. Raises QuantizeError.
    """
    n, k = shape
    name = f"{prefix}.{leaf}"
    if per == "tensor":
        tensor = tensors.scalar(prefix, leaf, dtypes, of)
        return Scales(name, tensor, _kind(tensor), 0, WHOLE_ROW)
    if per == "channel":
        tensor = tensors.get(prefix, leaf, dtypes, of=of)
        if tensor.shape not in ((n, 1), (n,)):
            raise QuantizeError(f"{name} has shape {shown(list(tensor.shape))}, not {[n, 1]}; {AGAIN}")
        return Scales(name, tensor, _kind(tensor), 1, WHOLE_ROW)
    rows, columns = block
    if not 16 <= columns <= _LARGEST_BLOCK or columns % 16 or not 1 <= rows <= _LARGEST_BLOCK:
        raise QuantizeError(
            f"{prefix} has scales of {shown(rows)} x {shown(columns)} numbers; llmc reads those of a multiple of 16 "
            f"columns: quantize the model with such groups or blocks"
        )
    tensor = tensors.get(prefix, leaf, dtypes, (-(-n // rows), -(-k // columns)), of)
    if per == "group" and k % columns:
        raise QuantizeError(f"{prefix} has rows of {k} numbers, which are not whole groups of {columns}; {AGAIN}")
    return Scales(name, tensor, _kind(tensor), rows, columns)


def _kind(tensor: StoredTensor) -> ScaleKind:
    if tensor.dtype in E8M0:
        return "e8m0"
    return "e4m3" if tensor.dtype == "F8_E4M3" else "f32"


def number_of(tensor: StoredTensor, name: str) -> float:
    """The value of a one-element tensor. Raises QuantizeError unless it is finite and positive."""
    value = float(widened(tensor.dtype, tensor.load()).reshape(-1)[0])
    if not (np.isfinite(value) and value > 0):
        raise QuantizeError(f"{name} holds {value}, not a positive number; {AGAIN}")
    return value


class FloatMatrix(StoredMatrix):
    """A matrix of FP8 numbers, one a byte, or FP4 numbers, two a byte with the first in the low half.

    overall: name and tensor of a second-level scale for the whole matrix.
    divides: the group scales are divided by it; otherwise multiplied.
    """

    def __init__(
        self,
        prefix: str,
        leaf: str,
        weight: StoredTensor,
        kind: Kind,
        scales: Scales,
        inputs: Inputs = NOT_ROUNDED,
        overall: tuple[str, StoredTensor] | None = None,
        divides: bool = False,
    ) -> None:
        rows, width = weight.shape
        bits = 8 if kind == "e4m3" else 4
        self._weight, self._scales, self._overall, self._divides = weight, scales, overall, divides
        names = {"weight": f"{prefix}.{leaf}", "scale": scales.name}
        if overall:
            names["overall"] = overall[0]
        format = StoredFormat(kind, bits, scales.group_size, scale_kind=scales.kind)
        super().__init__(prefix, (rows, width * 8 // bits), format, names, inputs)

    @property
    def overall_scale(self) -> np.float32 | None:
        """The factor or divisor of all group scales; None if there is none. Raises QuantizeError."""
        if self._overall is None:
            return None
        return np.float32(number_of(self._overall[1], self._overall[0]))

    def _read(self, first: int, count: int) -> Rows:
        packed = self._weight.load()[first : first + count]
        numbers = packed if self.format.bits == 8 else nibbles(packed)
        scale, codes = self._scales.read(first, count)
        overall = self.overall_scale
        if overall is not None:
            scale = scale / overall if self._divides else scale * overall
        return Rows(numbers, scale, None, codes)


class Int8Matrix(StoredMatrix):
    """Signed numbers of at most 8 bits, one a byte. zero: int8 zero points, shaped like the scales; None if all are
    0."""

    def __init__(
        self,
        prefix: str,
        weight: StoredTensor,
        bits: int,
        scales: Scales,
        zeros: Scales | None,
        inputs: Inputs = NOT_ROUNDED,
        factor: float = 1.0,
    ) -> None:
        self._weight, self._scales, self._zeros, self._factor = weight, scales, zeros, np.float32(factor)
        names = {"weight": f"{prefix}.weight", "scale": scales.name}
        if zeros:
            names["zero"] = zeros.name
        format = StoredFormat("int", bits, scales.group_size, asymmetric=zeros is not None)
        n, k = weight.shape
        super().__init__(prefix, (n, k), format, names, inputs)

    def _unsigned(self, name: str, signed: NDArray[Any]) -> Bytes:
        middle = 1 << (self.format.bits - 1)
        if self.format.bits < 8 and len(wrong := signed[(signed < -middle) | (signed >= middle)]):
            raise QuantizeError(f"{name} holds {wrong[0]}, which is not a number of {self.format.bits} bits; {AGAIN}")
        unsigned: Bytes = (signed.astype(np.int16) + middle).astype(np.uint8)
        return unsigned

    def _read(self, first: int, count: int) -> Rows:
        numbers = self._unsigned(self.tensors["weight"], self._weight.load()[first : first + count])
        scale, _ = self._scales.read(first, count)
        zero = None
        if self._zeros is not None:
            zero = self._unsigned(self._zeros.name, self._zeros.codes(first, count))
        return Rows(numbers, scale * self._factor, zero)
