"""choose_experts: a group works on a row. Items compare their own experts, and a fold finds the best of all."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.choose import SCALES, TAKEN, ChoiceOfRow
from llmc.compiler.targets.gpu.kernels.fold import Fold
from llmc.compiler.targets.gpu.kernels.groups import calling, spread, sync, turns
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, when

_LAST = 0x7FFFFFFF


def _larger(a: Expr, b: Expr) -> Expr:
    return T.Select(a > b, a, b)


class _Choice(ChoiceOfRow):
    """All items know what is chosen, and compute the weights."""

    def __init__(self, k: Frame, spec: KernelSpec) -> None:
        self._k, self._best_of = k, Fold(k, _larger, "int64")
        super().__init__(spec)

    def keys_array(self, size: int) -> Any:
        return T.alloc_buffer((size,), "int32", scope="shared")

    def each(self, count: int) -> AbstractContextManager[Expr]:
        return spread(self._k, count)

    def turns(self, count: int) -> AbstractContextManager[Expr]:
        return turns(self._k, T.int32(count))

    def meet(self) -> None:
        sync()

    def take_best(self, keys: Any, count: int) -> Expr:
        # Of equal keys the first counts, so its number is the largest.
        best = Cell(_numbered(T.int32(TAKEN), T.int32(_LAST)), "int64")
        with spread(self._k, count) as i:
            best.set(_larger(best.get(), let(_numbered(let(keys[i]), i), "int64")))
        chosen = let(_LAST - T.Cast("int32", T.bitwise_and(self._best_of(best.get()), T.int64(_LAST))))
        with when(calling(self._k).item == 0):
            T.buffer_store(keys, T.int32(TAKEN), [chosen])
        sync()
        return chosen


def _numbered(key: Expr, place: Expr) -> Expr:
    """An int64 that orders keys, and equal ones by their place."""
    return T.shift_left(T.Cast("int64", key), T.int64(32)) + T.Cast("int64", _LAST - place)


def choose_experts(spec: KernelSpec) -> tirx.PrimFunc:
    p = spec.as_dict()
    experts, width, scales = int(p["experts"]), 2 * int(p["top_k"]), {SCALES: "f32"} if p.get("scaled") else {}
    with Frame(spec.symbol(), {"choice": "f32", "scores": "f32", **scales, "out": "i32"}) as k:
        choice = _Choice(k, spec)

        with calling(k).share_groups(k.scalar(int(p["rows"]))) as row:

            def store(value: Expr, j: Expr) -> None:
                with when(calling(k).item == 0):
                    k.put_raw("out", value, row * width + j)

            choice.emit(
                lambda e: k.raw("choice", row * experts + e),
                lambda e: k.raw("scores", row * experts + e),
                store,
                (lambda e: k.raw(SCALES, e)) if scales else None,
            )
    return k.function()
