"""The frame of a plain kernel: typed buffers, scalars, the task's share of the work, and variables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.dtypes import BF16, F16, FLOATS, HALVES

Expr = Any
_UNBOUNDED = 1 << 30  # buffer sizes are unknown to a kernel, and nothing is derived from this
NUM_TOKENS, NUM_SEQS, BLOCK_TABLE_STRIDE = 0, 1, 3
TIR_DTYPE = {
    "f32": "float32", **dict.fromkeys(HALVES, "uint16"), "i8": "int32", "i32": "int32", "u8": "uint8", "bool": "uint8",
    "f64": "float64",
}  # fmt: skip
"""TIR dtype of a buffer of each dtype: 16-bit floats as their bits, int8 activations as words."""


class Cell:
    """A variable."""

    def __init__(self, value: Expr, dtype: str = "float32") -> None:
        self._memory = T.alloc_buffer((1,), dtype, scope="local")
        self.set(value)

    def set(self, value: Expr) -> None:
        T.buffer_store(self._memory, value, [0])

    def get(self) -> Expr:
        return self._memory[0]


def let(value: Expr, dtype: str = "int32") -> Expr:
    """A value computed once, opaque to TVM's simplifier, which rewrites long index sums incorrectly."""
    return Cell(value, dtype).get()


class Array:
    """Local memory of a kernel."""

    def __init__(self, size: int, dtype: str = "float32") -> None:
        self._memory = T.alloc_buffer((size,), dtype, scope="local")

    def __getitem__(self, index: Expr) -> Expr:
        return self._memory[index]

    def __setitem__(self, index: Expr, value: Expr) -> None:
        T.buffer_store(self._memory, value, [index])

    def address(self, index: Expr) -> Expr:
        """The address of an element, for functions that a target defines."""
        return T.address_of(self._memory[index])


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    with T.If(condition), T.Then():
        yield


def is_nan(value: Expr) -> Expr:
    """Tests the bits: TVM assumes that every value equals itself."""
    return T.bitwise_and(T.reinterpret("int32", value), T.int32(0x7FFFFFFF)) > T.int32(0x7F800000)


def _f32_of_bf16(bits: Expr) -> Expr:
    return T.reinterpret("float32", T.shift_left(T.Cast("int32", bits), T.int32(16)))


def _bf16_of_f32(value: Expr) -> Expr:
    """The bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = let(T.reinterpret("int32", value))
    odd = T.bitwise_and(T.shift_right(bits, T.int32(16)), T.int32(1))
    rounded = T.shift_right(bits + (odd + T.int32(0x7FFF)), T.int32(16))
    nan = T.bitwise_or(T.shift_right(bits, T.int32(16)), T.int32(0x40))
    magnitude = T.bitwise_and(bits, T.int32(0x7FFFFFFF))
    return T.Cast("uint16", T.Select(magnitude > T.int32(0x7F800000), nan, rounded))


def _f32_of_f16(bits: Expr) -> Expr:
    """Uses integers only: not every machine of the target has float16 instructions."""
    half = let(T.Cast("int32", bits))
    magnitude = let(T.bitwise_and(half, T.int32(0x7FFF)))
    shifted = T.shift_left(magnitude, T.int32(13))
    normal = shifted + T.int32((127 - 15) << 23)
    # Infinity and NaN have the largest exponent in float32, too.
    special = T.bitwise_or(shifted, T.Select(magnitude > T.int32(0x7C00), T.int32(0x7FC00000), T.int32(0x7F800000)))
    subnormal = T.reinterpret("int32", T.Cast("float32", magnitude) * T.float32(2.0**-24))
    found = T.Select(magnitude >= T.int32(0x7C00), special, T.Select(magnitude < T.int32(0x400), subnormal, normal))
    sign = T.shift_left(T.bitwise_and(half, T.int32(0x8000)), T.int32(16))
    return T.reinterpret("float32", T.bitwise_or(found, sign))


def _f16_of_f32(value: Expr) -> Expr:
    """The bits of the nearest float16, ties to even; infinity beyond 65504; NaN stays NaN."""
    bits = let(T.reinterpret("int32", value))
    magnitude = let(T.bitwise_and(bits, T.int32(0x7FFFFFFF)))
    odd = T.bitwise_and(T.shift_right(magnitude, T.int32(13)), T.int32(1))
    normal = T.shift_right(magnitude - T.int32((127 - 15) << 23) + (odd + T.int32(0xFFF)), T.int32(13))
    # Adding 0.5 leaves a rounded subnormal's bits in the lowest bits of the sum.
    subnormal = T.reinterpret("int32", T.reinterpret("float32", magnitude) + T.float32(0.5)) - T.int32(0x3F000000)
    nan = T.bitwise_or(T.bitwise_and(T.shift_right(magnitude, T.int32(13)), T.int32(0x3FF)), T.int32(0x7E00))
    found = T.Select(magnitude < T.int32(0x38800000), subnormal, normal)
    found = T.Select(magnitude >= T.int32(0x47800000), T.int32(0x7C00), found)
    found = T.Select(magnitude > T.int32(0x7F800000), nan, found)
    sign = T.bitwise_and(T.shift_right(bits, T.int32(16)), T.int32(0x8000))
    return T.Cast("uint16", T.bitwise_or(found, sign))


_WIDENED = {BF16.name: _f32_of_bf16, F16.name: _f32_of_f16}
_ROUNDED = {BF16.name: _bf16_of_f32, F16.name: _f16_of_f32}


def widened(dtype: str, stored: Expr) -> Expr:
    """The float32 value of a stored float."""
    return _WIDENED[dtype](stored) if dtype in _WIDENED else stored


def rounded(dtype: str, value: Expr) -> Expr:
    """A float32 in the stored form of `dtype`."""
    return _ROUNDED[dtype](value) if dtype in _ROUNDED else value


def row_width(width: int, dtype: str) -> int:
    """Elements between rows of a linear layer's activation: whole 4-byte words."""
    per_word = FLOATS[dtype].per_word
    return -(-width // per_word) * per_word


class Calling(ABC):
    """The calling convention of a kernel: arguments after the buffers, and a call's share of the work."""

    @abstractmethod
    def declare(self, buffers: Mapping[str, str]) -> None:
        """Declares the arguments. buffers: TIR dtype by name (`TIR_DTYPE`)."""

    @abstractmethod
    def begin(self, enter: Callable[[AbstractContextManager[Any]], Any]) -> None:
        """Begins the body. enter: enters contexts that last for the whole body."""

    @abstractmethod
    def scalar(self, index: int) -> Expr:
        """Scalar argument `index`, as int32."""

    @abstractmethod
    def share(self, total: Expr) -> AbstractContextManager[Expr]:
        """Loops over this call's share of `total` units."""

    @abstractmethod
    def share_elements(self, rows: Expr, width: int) -> AbstractContextManager[tuple[Expr, Expr]]:
        """Loops over this call's share of the elements of rows: (row, element of it)."""

    def place(self, buffer: str, index: Expr) -> Expr:
        """The index of a buffer's element relative to the pointer argument."""
        return index


class Tasks(Calling):
    """One call runs one of several tasks, as on devices of kind cpu (FORMAT.md)."""

    def declare(self, buffers: Mapping[str, str]) -> None:
        self._given = T.arg("scalars", T.handle("int64"))
        self._task, self._num_tasks = T.arg("task", T.int32()), T.arg("num_tasks", T.int32())

    def begin(self, enter: Callable[[AbstractContextManager[Any]], Any]) -> None:
        self._scalars = T.decl_buffer((8,), "int64", data=self._given)

    def scalar(self, index: int) -> Expr:
        return let(T.Cast("int32", self._scalars[index]))

    @contextmanager
    def share(self, total: Expr) -> Iterator[Expr]:
        def bound(task: Expr) -> Expr:
            product = T.Cast("int64", task) * T.Cast("int64", total)
            return let(T.Cast("int32", T.truncdiv(product, T.Cast("int64", self._num_tasks))))

        with T.serial(bound(self._task), bound(self._task + 1)) as unit:
            yield unit

    @contextmanager
    def share_elements(self, rows: Expr, width: int) -> Iterator[tuple[Expr, Expr]]:
        with self.share(rows) as row, T.serial(width) as i:
            yield row, i


_CALLING: ContextVar[Callable[[], Calling]] = ContextVar("calling", default=Tasks)


@contextmanager
def called(how: Callable[[], Calling]) -> Iterator[None]:
    """Kernels built within this context use the calling convention that `how` makes."""
    token = _CALLING.set(how)
    try:
        yield
    finally:
        _CALLING.reset(token)


class Frame:
    """A kernel under construction. buffers: dtype by name, in operand order."""

    def __init__(self, symbol: str, buffers: Mapping[str, str]) -> None:
        self._symbol, self._dtypes = symbol, dict(buffers)
        self._stack, self._builder = ExitStack(), IRBuilder()
        self._buffers: dict[str, Expr] = {}
        self.calling = _CALLING.get()()

    def __enter__(self) -> Frame:
        enter = self._stack.enter_context
        enter(self._builder)
        enter(T.prim_func(s_tir=True))
        T.func_name(self._symbol)
        T.func_attr({"global_symbol": self._symbol, "tirx.noalias": True})
        declared = {name: TIR_DTYPE[dtype] for name, dtype in self._dtypes.items()}
        handles = {name: T.arg(name, T.handle(dtype)) for name, dtype in declared.items()}
        self.calling.declare(declared)
        for name, handle in handles.items():
            self._buffers[name] = T.decl_buffer((_UNBOUNDED,), declared[name], data=handle)
        self.calling.begin(enter)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def function(self) -> tirx.PrimFunc:
        return self._builder.get()

    def scalar(self, index: int) -> Expr:
        return self.calling.scalar(index)

    def share(self, total: Expr) -> AbstractContextManager[Expr]:
        """Loops over this call's share of `total` units."""
        return self.calling.share(total)

    def share_elements(self, rows: Expr, width: int) -> AbstractContextManager[tuple[Expr, Expr]]:
        """Loops over this call's share of the elements of rows: (row, element of it)."""
        return self.calling.share_elements(rows, width)

    def raw(self, name: str, index: Expr) -> Expr:
        """An element in stored form."""
        return self._buffers[name][self.calling.place(name, index)]

    def address(self, name: str, index: Expr) -> Expr:
        """The address of an element, for functions that a target defines."""
        return T.address_of(self.raw(name, index))

    def put_raw(self, name: str, value: Expr, index: Expr) -> None:
        T.buffer_store(self._buffers[name], value, [self.calling.place(name, index)])

    def load(self, name: str, index: Expr) -> Expr:
        """A float of a buffer, as float32."""
        return widened(self._dtypes[name], self.raw(name, index))

    def store(self, name: str, value: Expr, index: Expr) -> None:
        """Rounds a float32 to the buffer's dtype."""
        self.put_raw(name, rounded(self._dtypes[name], value), index)
