"""Tensor core operands: their rows, how a step of rows is copied, and each lane's words of a fragment.

Four lanes share a row. A lane holds contiguous elements along K: 16 bytes of x, and as many numbers of the weight. The
first half is its part of one product, the second half its part of the next. Both operands are thus permuted alike along
K, which leaves sums unchanged, and each lane reads contiguous memory.

Where each product of a step has a scale group of its own, it has the first or the second half of the step. There a lane
reads half as many bytes of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.groups import Shared
from llmc.compiler.targets.gpu.tensor_cores import INTEGERS, STEP_BYTES, TensorLayer
from llmc.compiler.targets.reference.kernels.frame import TIR_DTYPE, Array, Expr, Frame, let, row_width
from llmc.compiler.targets.reference.kernels.matrix import Matrix
from llmc.compiler.targets.reference.kernels.padding import number_bytes
from llmc.compiler.targets.reference.kernels.rows_int8 import Int8Rows

LANES = 4
"""Lanes that share a row of a fragment."""
_BANKS_BYTES = 128  # that shared memory reads at a time
_READ_TOGETHER = 8  # rows whose lanes read at a time
_WORDS = 4  # words per lane, for two products
_ELEMENT_BYTES = {"uint16": 2, "int32": 4, "uint8": 1}


def call(name: str, *arguments: Expr) -> None:
    """Calls a function of the prelude."""
    T.evaluate(T.call_extern("int32", name, *arguments))


def late(number: Expr) -> Expr:
    """The number, of which compilers compute nothing earlier: until here, other values need the registers."""
    return let(T.call_extern("int32", "llmc_late", number))


@dataclass(frozen=True)
class Operand:
    """Rows of a buffer. Sizes in bytes.

    stride: between rows. step_bytes: one step of a row. halved: whether each product has half of a step. aligned:
    whether rows begin at multiples of 16 bytes.
    """

    buffer: str
    dtype: str
    stride: int
    step_bytes: int = STEP_BYTES
    halved: bool = False

    @property
    def aligned(self) -> bool:
        return self.stride % 16 == 0

    @property
    def copied(self) -> int:
        """Bytes that an item copies at a time."""
        return 16 if self.aligned else 4

    @property
    def lane_bytes(self) -> int:
        return self.step_bytes // LANES

    def address(self, k: Frame, row: Expr, step: Expr, at: Expr) -> Expr:
        """The address `at` bytes into a step of a row."""
        item = _ELEMENT_BYTES[TIR_DTYPE[self.dtype]]
        return k.address(self.buffer, let(row * (self.stride // item) + (step * self.step_bytes + at) // item))

    @property
    def half_bytes(self) -> int:
        """Between the two parts of a lane of a halved step."""
        return self.step_bytes // 2

    def seat(self, place: Expr, at: Expr) -> Expr:
        """Where byte `at` of a step is in shared memory. place: of the row.

        Lanes of eight rows read a half of a step at a time. Rows that would meet in a bank have their halves exchanged.
        """
        return T.bitwise_xor(at, self._turn(place)) if self._turns else at

    @property
    def _turns(self) -> bool:
        return self.halved and self.half_bytes >= self.copied and _READ_TOGETHER * self.step_bytes > _BANKS_BYTES

    def _turn(self, place: Expr) -> Expr:
        apart = _BANKS_BYTES // self.step_bytes  # rows that begin in the same bank
        return T.bitwise_and(T.truncdiv(place, apart), T.int32(1)) * self.half_bytes

    def load(self, k: Frame, to: Array, first: Expr, row: Expr, step: Expr, lane: Expr) -> None:
        """Loads a lane's part of a row from global memory into words of `to`, from `first` on."""
        halves = 2 if self.halved else 1
        size = self.lane_bytes // halves
        for half in range(halves):
            at = let(lane * size + half * self.half_bytes)
            call(f"llmc_load{size}", to.address(first + half * size // 4), self.address(k, row, step, at))

    def read(self, to: Array, shared: Shared, row: Expr, lane: Expr, of_row: Expr) -> None:
        """Loads a lane's part of a row from shared memory, where rows are contiguous. row: offset of the row, in words.
        of_row: its place, by its last three bits."""
        if not self.halved:
            call(f"llmc_load{self.lane_bytes}", to.address(0), shared.address(let(row + lane * (self.lane_bytes // 4))))
            return
        words, size = self.half_bytes // 4, self.lane_bytes // 2
        if size < 4:
            call("llmc_load2_twice", to.address(0), shared.address(row), shared.address(let(row + words)), lane)
            return
        first = let(lane * (size // 4) + (T.truncdiv(self._turn(of_row), 4) if self._turns else 0))
        for half in range(2):
            at = let(row + T.bitwise_xor(first, T.int32(half * words)))
            call(f"llmc_load{size}", to.address(half * size // 4), shared.address(at))


def x_operand(layer: TensorLayer, groups: int) -> Operand:
    """x as an operand. groups: number of sums in an int8 row."""
    if layer.dtype == "i8":
        return Operand("x", "i8", 4 * Int8Rows(layer.width, groups).words)
    return Operand("x", layer.dtype, 2 * row_width(layer.width, layer.dtype), halved=layer.halved)


class Weight(ABC):
    """Rows of a weight as fragments. zeros: whether words need the zero point of their scale group."""

    operand: Operand
    zeros = False

    @abstractmethod
    def words(self, stored: Array, zero: Expr) -> Array:
        """A lane's words of a fragment, from its part of a stored row. zero: its zero point, as an integer."""


class Halves(Weight):
    """16-bit floats, multiplied as stored."""

    def __init__(self, layer: TensorLayer) -> None:
        self.operand = Operand("weight", layer.dtype, 2 * row_width(layer.width, layer.dtype))

    def words(self, stored: Array, zero: Expr) -> Array:
        return stored


class Bytes(Weight):
    """Unsigned numbers for integer products; zero points are corrected by the sums of x."""

    def __init__(self, layer: TensorLayer) -> None:
        self._packed = layer.bits == 4
        self.operand = _numbers(layer)

    def words(self, stored: Array, zero: Expr) -> Array:
        if not self._packed:
            return stored
        words = Array(_WORDS, "uint32")
        for word in range(2):
            call("llmc_nibbles_i8", words.address(2 * word), stored[word])
        return words


class NumbersAsHalves(Weight):
    """Integers minus zero points, exact as halves; scales are applied to sums."""

    def __init__(self, layer: TensorLayer, middle: int) -> None:
        self.operand = _numbers(layer)
        self.zeros = layer.asymmetric
        self._layer, self._middle = layer, middle

    def words(self, stored: Array, zero: Expr) -> Array:
        layer, words = self._layer, Array(_WORDS, "uint32")
        less = zero if self.zeros else T.int32(self._middle)
        if layer.bits == 4:
            call(f"llmc_nibbles_{layer.dtype}", words.address(0), stored[0], less)
        else:
            for word in range(2):
                call(f"llmc_bytes_{layer.dtype}", words.address(2 * word), stored[word], less)
        return words


class FloatsAsHalves(Weight):
    """Floats of 8 or 4 bits, exact as halves; scales are applied to sums."""

    def __init__(self, layer: TensorLayer) -> None:
        self.operand, self._layer = _numbers(layer), layer

    def words(self, stored: Array, zero: Expr) -> Array:
        words = Array(_WORDS, "uint32")
        for word in range(_WORDS * self._layer.bits // 16):
            to = words.address(word * (16 // self._layer.bits))
            call(f"llmc_{self._layer.numbers}_{self._layer.dtype}", to, stored[word])
        return words


def _numbers(layer: TensorLayer) -> Operand:
    """Rows of stored numbers."""
    return Operand("weight", "u8", number_bytes(layer.width, layer.bits), layer.weight_step_bytes, layer.halved)


def weight_of(layer: TensorLayer, matrix: Matrix | None) -> Weight:
    if matrix is None:
        return Halves(layer)
    if layer.dtype == "i8":
        return Bytes(layer)
    return NumbersAsHalves(layer, matrix.format.middle) if layer.numbers == INTEGERS else FloatsAsHalves(layer)
