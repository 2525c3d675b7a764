"""Folds one number per item of a group into one, by a fixed tree, so that bits depend on nothing else."""

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
    """The larger float; NaN if either is NaN."""
    return T.Select(T.Or(a > b, is_nan(a)), a, b)


class Fold:
    """Shared memory in which the items' numbers are folded; reusable."""

    def __init__(self, combine: Combine, dtype: str = "float32") -> None:
        self._combine, self._dtype = combine, dtype
        self._memory = Shared(ITEMS, dtype)

    def __call__(self, item: Expr, value: Expr) -> Expr:
        """The folded number, equal in every item. Every item of the group must call it."""
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
