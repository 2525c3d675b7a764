"""The frame of a plain kernel: typed buffers, scalars, the task's share of the work, and cells for variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.dtypes import FLOATS

Expr = Any
_UNBOUNDED = 1 << 30  # shapes of whole buffers are not known to a kernel; nothing is derived from this
NUM_TOKENS, BLOCK_TABLE_STRIDE = 0, 3
TIR_DTYPE = {
    "f32": "float32",
    "bf16": "uint16",
    "f16": "uint16",
    "i8": "int32",
    "i32": "int32",
    "u8": "uint8",
    "bool": "uint8",
}
"""How a buffer of each dtype is declared: bfloat16 and half precision as their bits, int8 activations as the
words of their rows."""


class Cell:
    """One variable."""

    def __init__(self, value: Expr, dtype: str = "float32") -> None:
        self._memory = T.alloc_buffer((1,), dtype, scope="local")
        self.set(value)

    def set(self, value: Expr) -> None:
        T.buffer_store(self._memory, value, [0])

    def get(self) -> Expr:
        return self._memory[0]


def let(value: Expr, dtype: str = "int32") -> Expr:
    """A value computed once, and opaque to TVM's simplifier, which rewrites long index sums unsoundly."""
    return Cell(value, dtype).get()


class Array:
    """Local memory of a kernel."""

    def __init__(self, size: int, dtype: str = "float32") -> None:
        self._memory = T.alloc_buffer((size,), dtype, scope="local")

    def __getitem__(self, index: Expr) -> Expr:
        return self._memory[index]

    def __setitem__(self, index: Expr, value: Expr) -> None:
        T.buffer_store(self._memory, value, [index])


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    with T.If(condition), T.Then():
        yield


def is_nan(value: Expr) -> Expr:
    """By its bits: TVM takes any value to equal itself."""
    return T.bitwise_and(T.reinterpret("int32", value), T.int32(0x7FFFFFFF)) > T.int32(0x7F800000)


def f32_of_bf16(bits: Expr) -> Expr:
    return T.reinterpret("float32", T.shift_left(T.Cast("int32", bits), T.int32(16)))


def bf16_of_f32(value: Expr) -> Expr:
    """The bits of the nearest bfloat16, ties to even; what is not a number stays so."""
    bits = let(T.reinterpret("int32", value))
    odd = T.bitwise_and(T.shift_right(bits, T.int32(16)), T.int32(1))
    rounded = T.shift_right(bits + (odd + T.int32(0x7FFF)), T.int32(16))
    nan = T.bitwise_or(T.shift_right(bits, T.int32(16)), T.int32(0x40))
    magnitude = T.bitwise_and(bits, T.int32(0x7FFFFFFF))
    return T.Cast("uint16", T.Select(magnitude > T.int32(0x7F800000), nan, rounded))


def f32_of_f16(bits: Expr) -> Expr:
    """Without the CPU's conversion, which not every machine has."""
    word = let(T.Cast("int32", bits))
    magnitude = let(T.shift_left(T.bitwise_and(word, T.int32(0x7FFF)), T.int32(13)))
    finite = T.reinterpret("float32", magnitude) * T.float32(2.0**112)
    special = T.reinterpret("float32", T.bitwise_or(magnitude, T.int32(0x7F800000)))
    value = let(T.Select(magnitude >= T.int32(0x0F800000), special, finite), "float32")
    sign = T.shift_left(T.bitwise_and(word, T.int32(0x8000)), T.int32(16))
    return T.reinterpret("float32", T.bitwise_or(T.reinterpret("int32", value), sign))


def f16_of_f32(value: Expr) -> Expr:
    """The bits of the nearest half, ties to even; what is too large becomes infinite, what is not a number stays so."""
    bits = let(T.reinterpret("int32", value))
    magnitude = let(T.bitwise_and(bits, T.int32(0x7FFFFFFF)))
    odd = T.bitwise_and(T.shift_right(magnitude, T.int32(13)), T.int32(1))
    normal = T.shift_right(magnitude + (odd + T.int32(0xFFF)), T.int32(13)) - T.int32(112 << 10)
    # Numbers below 2⁻¹⁴ are multiples of 2⁻²⁴, which is the unit of the last place of 0.5.
    small = T.reinterpret("int32", T.reinterpret("float32", magnitude) + T.float32(0.5)) - T.int32(0x3F000000)
    finite = T.Select(magnitude < T.int32(0x38800000), small, normal)
    large = T.Select(magnitude > T.int32(0x7F800000), T.int32(0x7E00), T.int32(0x7C00))
    rounded = let(T.Select(magnitude >= T.int32(0x477FF000), large, finite))
    sign = T.bitwise_and(T.shift_right(bits, T.int32(16)), T.int32(0x8000))
    return T.Cast("uint16", T.bitwise_or(rounded, sign))


_TO_F32 = {"bf16": f32_of_bf16, "f16": f32_of_f16}
_OF_F32 = {"bf16": bf16_of_f32, "f16": f16_of_f32}


def row_width(width: int, dtype: str) -> int:
    """Elements between two rows of an activation of a linear layer: whole words of 4 bytes."""
    per_word = FLOATS[dtype].per_word
    return -(-width // per_word) * per_word


class Frame:
    """One kernel while it is written. buffers: dtype by name, in operand order."""

    def __init__(self, symbol: str, buffers: Mapping[str, str]) -> None:
        self._symbol, self._dtypes = symbol, dict(buffers)
        self._stack, self._builder = ExitStack(), IRBuilder()
        self._buffers: dict[str, Expr] = {}

    def __enter__(self) -> Frame:
        enter = self._stack.enter_context
        enter(self._builder)
        enter(T.prim_func(s_tir=True))
        T.func_name(self._symbol)
        T.func_attr({"global_symbol": self._symbol, "tirx.noalias": True})
        handles = {name: T.arg(name, T.handle(TIR_DTYPE[dtype])) for name, dtype in self._dtypes.items()}
        scalars = T.arg("scalars", T.handle("int64"))
        self._task, self._num_tasks = T.arg("task", T.int32()), T.arg("num_tasks", T.int32())
        for name, handle in handles.items():
            dtype = TIR_DTYPE[self._dtypes[name]]
            self._buffers[name] = T.decl_buffer((_UNBOUNDED,), dtype, data=handle)
        self._scalars = T.decl_buffer((8,), "int64", data=scalars)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def function(self) -> tirx.PrimFunc:
        return self._builder.get()

    def scalar(self, index: int) -> Expr:
        return let(T.Cast("int32", self._scalars[index]))

    @contextmanager
    def share(self, total: Expr) -> Iterator[Expr]:
        """Loop over this task's contiguous share of `total` units."""

        def bound(task: Expr) -> Expr:
            product = T.Cast("int64", task) * T.Cast("int64", total)
            return let(T.Cast("int32", T.truncdiv(product, T.Cast("int64", self._num_tasks))))

        with T.serial(bound(self._task), bound(self._task + 1)) as unit:
            yield unit

    def raw(self, name: str, index: Expr) -> Expr:
        """An element as it is stored."""
        return self._buffers[name][index]

    def put_raw(self, name: str, value: Expr, index: Expr) -> None:
        T.buffer_store(self._buffers[name], value, [index])

    def load(self, name: str, index: Expr) -> Expr:
        """A float of a buffer, as float32."""
        value, widen = self.raw(name, index), _TO_F32.get(self._dtypes[name])
        return value if widen is None else widen(value)

    def store(self, name: str, value: Expr, index: Expr) -> None:
        """Rounds a float32 to the buffer's dtype."""
        narrow = _OF_F32.get(self._dtypes[name])
        self.put_raw(name, value if narrow is None else narrow(value), index)
