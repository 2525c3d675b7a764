"""Calling convention of GPU kernels (FORMAT.md, devices of kind opencl): any number of groups share the work.

Bits do not depend on the number of groups: it decides which group computes a unit, not how.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.dependent import AWAIT
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.reference.kernels.frame import Array, Calling, Expr, Frame, let, when

MOST_GROUPS = 1 << 16
UNROLLED = "unrolled"
"""Begins the names of variables of loops that are unrolled."""
_UNIT_BYTES = 64  # alignment of operands
_ITEM_BYTES = {"float32": 4, "uint16": 2, "int32": 4, "uint8": 1, "float64": 8}


class Groups(Calling):
    """One call is one work item. group, item: its group's number, and its number within the group."""

    def __init__(self, items: int = ITEMS) -> None:
        self.items = items

    group: Expr
    item: Expr
    num_groups: Expr

    def declare(self, buffers: Mapping[str, str]) -> None:
        self._dtypes = dict(buffers)
        self._at = {name: T.arg(f"{name}_at", T.int32()) for name in buffers}
        self._given = T.arg("scalars", T.handle("int32"))

    def begin(self, enter: Callable[[AbstractContextManager[Any]], Any]) -> None:
        self._scalars = T.decl_buffer((8,), "int32", data=self._given)
        self.group = enter(T.launch_thread("blockIdx.x", MOST_GROUPS))
        self.item = enter(T.launch_thread("threadIdx.x", self.items))
        self.num_groups = let(T.call_pure_extern("int32", "llmc_num_groups"))
        self._starts = {
            name: let(at * (_UNIT_BYTES // _ITEM_BYTES[self._dtypes[name]])) for name, at in self._at.items()
        }

    def scalar(self, index: int) -> Expr:
        return let(self._scalars[index])

    @contextmanager
    def share(self, total: Expr) -> Iterator[Expr]:
        """Loops over units of work, one per item at a time."""
        first, step = let(self.group * self.items + self.item), let(self.num_groups * self.items)
        with T.serial(let(T.truncdiv(total - first + (step - 1), step))) as turn:
            yield let(first + turn * step)

    @contextmanager
    def share_elements(self, rows: Expr, width: int) -> Iterator[tuple[Expr, Expr]]:
        """As `share`; neighbouring items take neighbouring elements."""
        with self.share(let(rows * width)) as unit:
            row = let(T.truncdiv(unit, width))
            yield row, let(unit - row * width)

    @contextmanager
    def share_groups(self, total: Expr) -> Iterator[Expr]:
        """Loops over units of work, one per group at a time; the group's items cooperate."""
        step = self.num_groups
        with T.serial(let(T.truncdiv(total - self.group + (step - 1), step))) as turn:
            yield let(self.group + turn * step)

    def place(self, buffer: str, index: Expr) -> Expr:
        return self._starts[buffer] + index


class Shared(Array):
    """Memory shared by the items of a group."""

    def __init__(self, size: int, dtype: str = "float32") -> None:
        self._memory = T.alloc_buffer((size,), dtype, scope="shared")


def calling(k: Frame) -> Groups:
    """The calling convention in effect."""
    assert isinstance(k.calling, Groups)
    return k.calling


def all_of(conditions: Sequence[Expr]) -> AbstractContextManager[None]:
    """A body under some conditions, of which there may be none."""
    return when(functools.reduce(T.And, conditions)) if conditions else nullcontext()


def await_earlier() -> None:
    """Waits until earlier kernels have ended, where this one may begin before. Until then it may read what no kernel
    writes (`dependent.py`). Every group calls it."""
    T.evaluate(T.call_extern("int32", AWAIT))


def sync() -> None:
    """Barrier: all items of the group arrive, and see each other's writes to shared memory."""
    T.evaluate(T.tvm_storage_sync("shared"))


def sync_written() -> None:
    """As `sync`; items also see what others of the group wrote to operands."""
    T.evaluate(T.call_extern("int32", "llmc_sync_written"))


@contextmanager
def turns(k: Frame, count: Expr) -> Iterator[Expr]:
    """Loop over 0 … count − 1 whose body has a `sync`.

    The count is hidden from compilers: if such a loop is unrolled, PoCL 3.1 misplaces guarded code between two
    barriers.
    """
    with T.serial(let(T.min(calling(k).num_groups, 1) * count)) as turn:
        yield turn


@contextmanager
def unrolled(count: int) -> Iterator[Expr]:
    """Loop over 0 … count − 1 that the device's compiler unrolls: arrays stay in registers, and text stays short."""
    with T.attr(T.int32(0), "pragma_unroll_explicit", T.int32(0)), T.unroll(count) as index:
        IRBuilder.name(UNROLLED, index)
        yield index


@contextmanager
def spread(k: Frame, count: int) -> Iterator[Expr]:
    """Loops over 0 … count − 1, whose numbers the items take in turn."""
    item, items = calling(k).item, calling(k).items
    whole, rest = divmod(count, items)
    with T.serial(whole + bool(rest)) as turn:
        index = let(turn * items + item)
        if rest:
            with T.If(index < count), T.Then():
                yield index
        else:
            yield index


@contextmanager
def some(k: Frame, count: Expr) -> Iterator[Expr]:
    """As `spread`, of a count that is known when the kernel runs."""
    item, items = calling(k).item, calling(k).items
    with T.serial(let(T.truncdiv(count - item + (items - 1), items))) as turn:
        yield let(turn * items + item)
