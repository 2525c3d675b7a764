"""A small layer over TVM's IR builder: flat buffers, 16-lane vectors, the kernel ABI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.dtypes import FLOATS, HALVES
from llmc.compiler.kernel_spec import KernelSpecError
from llmc.compiler.targets.cpu.kernels.ir import stores, vector
from llmc.compiler.targets.cpu.target import Target

Expr = Any
_LINE_BYTES = 64
WIDTH = 16  # float32 per vector, on every target
_UNBOUNDED = 1 << 30  # buffer sizes are unknown to a kernel, and nothing is derived from this
LANES = {name: dtype.per_word for name, dtype in FLOATS.items()}  # elements per packed word
TIR_DTYPE = {"f32": "float32", **dict.fromkeys(HALVES, "uint16"), "i32": "int32"}

HALF = ("low", "high")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def lanes_of(dtype: str) -> int:
    if dtype not in LANES:
        raise KernelSpecError(f"dtype {dtype!r} is not one of {', '.join(LANES)}")
    return LANES[dtype]


def word_dtype(dtype: str) -> str:
    """The TIR dtype of a word in a packed tensor: one float32, or two 16-bit floats."""
    return "float32" if lanes_of(dtype) == 1 else "int32"


def call(name: str, *args: Expr) -> Expr:
    """Calls a helper that returns 16 floats."""
    return T.call_extern("float32x16", f"llmc_{name}", *args)


def do(name: str, *args: Expr) -> None:
    """Calls a helper for its effect."""
    T.evaluate(T.call_extern("int32", f"llmc_{name}", *args))


def half_of(dtype: str, word: Expr, which: int) -> Expr:
    """The float in half `which` of a word; 0 is the low half."""
    return T.call_extern("float32", f"llmc_{dtype}_{HALF[which]}_one", word)


def half_in_all(dtype: str, word: Expr, which: int) -> Expr:
    """As `half_of`, broadcast to every lane."""
    return call(f"{dtype}_{HALF[which]}_all", word)


def halves_of(dtype: str, words: Expr, which: int) -> Expr:
    """16 floats: half `which` of each of 16 words."""
    return call(f"{dtype}_{HALF[which]}", words)


def splat(value: Expr) -> Expr:
    if isinstance(value, (int, float)):
        value = T.float32(value)
    return T.broadcast(value, WIDTH)


def at(buffer: Expr, index: Expr) -> Expr:
    """The address of an element."""
    return T.address_of(buffer[index])


def store(buffer: Expr, value: Expr, index: Expr) -> None:
    T.buffer_store(buffer, value, [index])


def load_vector(buffer: Expr, index: Expr, count: Expr = WIDTH, dtype: str = "f32") -> Expr:
    """`count` floats from `index` on, zeros in the other lanes; reads nothing beyond."""
    if dtype == "f32" and isinstance(count, int) and count == WIDTH:
        return buffer[T.ramp(index, 1, WIDTH)]
    return call(f"load_{dtype}", at(buffer, index), count)


def store_vector(buffer: Expr, value: Expr, index: Expr, count: Expr = WIDTH, dtype: str = "f32") -> None:
    do(f"store_{dtype}", value, at(buffer, index), count)


def let(value: Expr) -> Expr:
    """An int32 kept in a register and opaque to TVM's simplifier, which rewrites long index sums incorrectly."""
    cell = T.alloc_buffer((1,), "int32", scope="local")
    T.buffer_store(cell, value, [0])
    return cell[0]


class Scratch:
    """Stack memory aligned to a cache line. TVM aligns only to 16 bytes, and vectors across two lines load at half
    speed."""

    def __init__(self, count: int, dtype: str) -> None:
        self.buffer = T.alloc_buffer((count + WIDTH,), dtype, scope="local")
        address = T.reinterpret("int64", T.address_of(self.buffer[0]))
        past = T.Cast("int32", T.bitwise_and(address, T.int64(_LINE_BYTES - 1)))
        self.start = let(T.truncdiv(_LINE_BYTES - past, 4))

    def at(self, index: Expr) -> Expr:
        """The address of an element."""
        return at(self.buffer, self.start + index)

    def vector(self, index: Expr) -> Expr:
        """The 16 elements from `index` on, which is a multiple of 16."""
        return self.buffer[T.ramp(self.start + index, 1, WIDTH)]

    def element(self, index: Expr) -> Expr:
        """One element."""
        return self.buffer[self.start + index]

    def store(self, value: Expr, index: Expr) -> None:
        T.buffer_store(self.buffer, value, [T.ramp(self.start + index, 1, WIDTH)])


class Vectors:
    """An array of 16-lane vectors in registers; indices must be constants once loops are unrolled."""

    def __init__(self, count: int, dtype: str = "float32") -> None:
        self.buffer = T.alloc_buffer((count * WIDTH,), dtype, scope="local")

    def __getitem__(self, index: Expr) -> Expr:
        return self.buffer[T.ramp(index * WIDTH, 1, WIDTH)]

    def __setitem__(self, index: Expr, value: Expr) -> None:
        T.buffer_store(self.buffer, value, [T.ramp(index * WIDTH, 1, WIDTH)])

    def address(self, index: Expr) -> Expr:
        return T.address_of(self.buffer[index * WIDTH])

    def lane(self, index: Expr) -> Expr:
        """One float of the array."""
        return self.buffer[index]


def kept(value: Expr, dtype: str = "float32") -> Expr:
    """A vector kept in a register."""
    register = Vectors(1, dtype)
    register[0] = value
    return register[0]


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    with T.If(condition), T.Then():
        yield


def pieces(width: int) -> list[tuple[int, int]]:
    """(start, count) of the vectors that cover `width` elements."""
    return [(start, min(WIDTH, width - start)) for start in range(0, width, WIDTH)]


class Kernel:
    """The frame of a kernel: buffers by name, scalars, task and num_tasks.

    Buffers do not overlap, so a kernel may keep partial results in its output. ranged: another kernel calls it for
    tasks [task, task_end); task_end is an extra argument after task.
    """

    def __init__(self, symbol: str, buffers: Sequence[tuple[str, str]], helpers: str, *, ranged: bool = False) -> None:
        self.symbol = symbol
        self._ranged = ranged
        self._specs = buffers
        self._helpers = helpers
        self._stack = ExitStack()
        self._builder = IRBuilder()
        self.buffers: dict[str, Expr] = {}

    @classmethod
    def of(cls, symbol: str, buffers: Sequence[tuple[str, str]], target: Target) -> Kernel:
        """A frame with only the vector helpers of a target."""
        return cls(symbol, buffers, vector.helpers(target.mcpu))

    def __enter__(self) -> Kernel:
        enter = self._stack.enter_context
        enter(self._builder)
        enter(T.prim_func(s_tir=True))
        T.func_name(self.symbol)
        T.func_attr({"global_symbol": self.symbol, "tirx.noalias": True})
        handles = [(name, dtype, T.arg(name, T.handle(dtype))) for name, dtype in self._specs]
        scalars = T.arg("scalars", T.handle("int64"))
        self.task = T.arg("task", T.int32())
        self.task_end = T.arg("task_end", T.int32()) if self._ranged else self.task + 1
        self.num_tasks = T.arg("num_tasks", T.int32())
        for name, dtype, handle in handles:
            self.buffers[name] = T.decl_buffer((_UNBOUNDED,), dtype, data=handle)
        self._scalars = T.decl_buffer((8,), "int64", data=scalars)
        enter(T.attr(0, "pragma_import_llvm", self._helpers))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def scalar(self, index: int) -> Expr:
        return let(T.Cast("int32", self._scalars[index]))

    def __getitem__(self, name: str) -> Expr:
        return self.buffers[name]

    @contextmanager
    def share(self, total: Expr) -> Iterator[Expr]:
        """Loops over this task's contiguous share of `total` units."""
        first, last = self.share_bounds(total)
        with T.serial(first, last) as unit:
            yield unit

    def share_bounds(self, total: Expr) -> tuple[Expr, Expr]:
        """(first, end) of this task's contiguous share of `total` units."""
        first = T.call_extern("int32", "llmc_share", self.task, total, self.num_tasks)
        last = T.call_extern("int32", "llmc_share", self.task_end, total, self.num_tasks)
        return let(first), let(last)

    def function(self) -> tirx.PrimFunc:
        return self._builder.get()


def packed_position(row: Expr, row_tile: int, words: int) -> Expr:
    """Index of a row's word 0 in a packed activation `[tile][words][row_tile]`."""
    return T.truncdiv(row, row_tile) * (words * row_tile) + T.truncmod(row, row_tile)


def put(buffer: Expr, value: Expr, base: Expr, element: Expr, dtype: str, row_tile: int, count: int) -> None:
    """Writes elements [element, element + count) of a row whose word 0 is at `base`; `element` starts a word."""
    word = element if dtype == "f32" else T.truncdiv(element, 2)
    do(stores.put_name(dtype, row_tile, count), value, at(buffer, base + word * row_tile))
