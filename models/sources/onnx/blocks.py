"""Weights of onnxruntime's operator MatMulNBits: 4- or 8-bit integers, in blocks with one scale each.

Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MatMulNBits
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.models.brief import brief, brief_name
from llmc.models.convert import DTYPES, Array, convert
from llmc.models.errors import ModelError
from llmc.models.sources.base import Tensor
from llmc.models.sources.stored import Stored
from llmc.quantize.checkpoints.bits import nibbles
from llmc.quantize.formats.base import SCALE, Quantized
from llmc.quantize.formats.integers import ZERO, Integers

if TYPE_CHECKING:
    import onnx

OPERATOR = ("com.microsoft", "MatMulNBits")
NUMBERS, SCALES, ZEROS, ORDER, BIAS = 1, 2, 3, 4, 5
"""Positions of its inputs; input 0 is the activation."""
PARTS = (NUMBERS, SCALES, ZEROS, ORDER)
_BITS, _STEP = (4, 8), 32
BLOCK_TYPES = tuple(f"int{bits}" for bits in _BITS)
"""Type names of such matrices."""
_ELEMENTS = 1 << 16  # temporaries of this size stay in cache


class File(Protocol):
    """The interface of `OnnxFile` that is used here."""

    path: Path
    model: onnx.ModelProto
    initializers: dict[str, onnx.TensorProto]

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype[Any] | None: ...

    def array(self, name: str) -> Array: ...


def values_name(node: onnx.NodeProto) -> str:
    """The name of the matrix [n, k] that a node multiplies by, seen as a float tensor."""
    return f"{node.input[NUMBERS]}/values"


@dataclass(frozen=True, eq=False)
class BlockMatrix:
    """A matrix [n, k] of a file. called: its tensor's name in errors. numbers: uint8 [n, bytes of a row]. scales: [n,
    blocks]. zeros: uint8 [n, bytes of a row]; None if all are the middle of the range."""

    called: str
    shape: tuple[int, int]
    format: Integers
    numbers: Array
    scales: Array
    zeros: Array | None

    @property
    def type_name(self) -> str:
        return f"int{self.format.bits}"

    def tensor(self, rows: NDArray[np.int64] | None) -> Tensor:
        """The given rows; None for all."""
        return _BlockTensor(self, rows)

    def unpacked(self, packed: Array, count: int) -> Array:
        """Unpacked numbers, uint8 [rows, count]."""
        found: Array = nibbles(packed)[:, :count] if self.format.bits == 4 else packed[:, :count]
        return found

    def read(self, rows: Any, out: Quantized) -> None:
        """rows: a slice or indices. Raises ModelError."""
        scales = self.scales[rows].astype(np.float32)
        if not np.isfinite(scales).all():
            wrong = scales[~np.isfinite(scales)][0]
            raise ModelError(f"{self.called} has a scale of {wrong}; export the model again, or download it again")
        np.copyto(out.numbers, self.unpacked(self.numbers[rows], self.shape[1]))
        np.copyto(out.planes[SCALE], scales)
        if self.zeros is not None:
            np.copyto(out.planes[ZERO], self.unpacked(self.zeros[rows], scales.shape[1]))


class _StoredBlocks(Stored):
    def __init__(self, matrix: BlockMatrix, rows: NDArray[np.int64] | None) -> None:
        self._matrix, self._rows, self.format = matrix, rows, matrix.format

    def read(self, first: int, out: Quantized) -> None:
        places = slice(first, first + len(out.numbers))
        self._matrix.read(places if self._rows is None else self._rows[places], out)


class _BlockTensor(Tensor):
    def __init__(self, matrix: BlockMatrix, rows: NDArray[np.int64] | None) -> None:
        self._matrix, self._rows, self._stored = matrix, rows, _StoredBlocks(matrix, rows)

    @property
    def shape(self) -> tuple[int, ...]:
        n, k = self._matrix.shape
        return (n if self._rows is None else len(self._rows), k)

    @property
    def stored(self) -> Stored:
        return self._stored

    def read(self, first: int, out: Array) -> None:
        format, k = self._matrix.format, self._matrix.shape[1]
        at_once = max(1, _ELEMENTS // k)
        for at in range(0, len(out), at_once):
            some = out[at : at + at_once]
            quantized = Quantized.empty(format, len(some), k)
            self._stored.read(first + at, quantized)
            convert(format.value(quantized).astype(np.float32), some)


def block_matrices(file: File) -> dict[str, BlockMatrix]:
    """Matrices by `values_name`. Raises ModelError."""
    nodes = [node for node in file.model.graph.node if (node.domain, node.op_type) == OPERATOR]
    return {values_name(node): _Reader(file, node).matrix() for node in nodes}


class _Reader:
    """The checked attributes and inputs of one node."""

    def __init__(self, file: File, node: onnx.NodeProto) -> None:
        self._file, self._node = file, node
        self._called = f"{file.path}: node {brief_name(node.name or node.output[0])} (MatMulNBits)"
        self._attributes = {a.name: a.i for a in node.attribute}

    def _wrong(self, why: str) -> ModelError:
        return ModelError(f"{self._called} {why}")

    def _has(self, place: int) -> bool:
        return place < len(self._node.input) and bool(self._node.input[place])

    def _whole(self, name: str) -> int:
        value: int = self._attributes.get(name, 0)
        if value <= 0:
            raise self._wrong(f"has the attribute {name} = {brief(value)}, not a positive number; export it again")
        return value

    def _array(self, place: int, what: str, count: int, dtypes: frozenset[np.dtype[Any]]) -> Array:
        """Raises ModelError unless the input has `count` elements."""
        name = self._node.input[place] if self._has(place) else ""
        if name not in self._file.initializers:
            raise self._wrong(f"has no {what} in the file; export the model with its weights as initializers")
        dtype, shape = self._file.dtype(name), self._file.shape(name)
        if dtype not in dtypes:
            wanted = " or ".join(sorted(map(str, dtypes)))
            raise self._wrong(f"has {what} of type {dtype}, and llmc reads {wanted}; quantize the model so")
        array = self._file.array(name)
        if array.size != count:
            raise self._wrong(f"has {what} of shape {brief(list(shape))}, and its sizes ask for {count} elements")
        return array

    def matrix(self) -> BlockMatrix:
        n, k, bits, block = (self._whole(name) for name in ("N", "K", "bits", "block_size"))
        if bits not in _BITS:
            raise self._wrong(f"has weights of {bits} bits, and llmc reads those of 4 and 8; quantize the model so")
        if block % _STEP or k % block:
            raise self._wrong(
                f"has rows of {k} numbers in blocks of {block}; llmc reads blocks of a multiple of {_STEP} that "
                "divides them: quantize the model with such blocks"
            )
        if self._has(ORDER):
            raise self._wrong("has columns in an order of their own (g_idx); quantize the model without act-order")
        blocks, byte = k // block, frozenset({np.dtype(np.uint8)})
        numbers = self._array(NUMBERS, "weights", n * k * bits // 8, byte)
        scales = self._array(SCALES, "scales", n * blocks, frozenset(DTYPES.values()))
        zeros = None
        if self._has(ZEROS):
            each = -(-blocks * bits // 8)
            zeros = self._array(ZEROS, "zero points", n * each, byte).reshape(n, each)
        called = f"{self._file.path}: tensor {brief_name(self._node.input[NUMBERS])}"
        format = Integers(bits, block, asymmetric=zeros is not None)
        return BlockMatrix(called, (n, k), format, numbers.reshape(n, -1), scales.reshape(n, blocks), zeros)
