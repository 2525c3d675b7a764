"""What the items of a group make together of one number each: in one tree, so that bits depend on nothing else."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from llmc.compiler.targets.gpu.kernels.groups import Shared, sync
from llmc.compiler.targets.gpu.launch import ITEMS
from llmc.compiler.targets.reference.kernels.frame import Expr, is_nan, let, when

Combine = Callable[[Expr, Expr], Expr]


def add(a: Expr, b: Expr) -> Expr:
    return a + b


def largest(a: Expr, b: Expr) -> Expr:
    """Of floats; what is not a number stays so."""
    return T.Select(T.Or(a > b, is_nan(a)), a, b)


class Fold:
    """A place where numbers of all items become one; may be used again and again."""

    def __init__(self, combine: Combine, dtype: str = "float32") -> None:
        self._combine, self._dtype = combine, dtype
        self._memory = Shared(ITEMS, dtype)

    def __call__(self, item: Expr, value: Expr) -> Expr:
        """The same for every item. Every item of the group comes here."""
        memory = self._memory
        sync()
        memory[item] = value
        half = ITEMS // 2
        while half:
            sync()
            with when(item < half):
                memory[item] = self._combine(let(memory[item], self._dtype), let(memory[item + half], self._dtype))
            half //= 2
        sync()
        return let(memory[0], self._dtype)
