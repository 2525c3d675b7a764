"""fused: the kernel of a row program (`compiler/graph/passes/rowwise.py`).

Without a reduction, items share the elements. With one, a group works on a row, and one tree folds each reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.kernels.fold import Fold
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, spread, sync, turns
from llmc.compiler.targets.reference.kernels.frame import Cell, Expr, Frame, let, when
from llmc.compiler.targets.reference.kernels.fused import Row, combination, program_of


def _axes(index: Expr, shape: Sequence[int]) -> list[Expr]:
    """The axis indices of element `index` in row-major order."""
    axes: list[Expr] = []
    for extent in reversed(shape):
        axes.insert(0, let(T.truncmod(index, extent)))
        index = let(T.truncdiv(index, extent))
    return axes


def fused(spec: KernelSpec) -> tirx.PrimFunc:
    program, buffers = program_of(spec)
    outputs = [(number, out["shape"]) for number, out in enumerate(program["outputs"])]
    reductions = [number for number, stage in enumerate(program["stages"]) if stage["reduce"]]
    with Frame(spec.symbol(), buffers) as k:
        rows = k.scalar(int(spec.as_dict()["rows"]))
        if reductions:
            # Shared memory is allocated per kernel, not per reduction.
            places = [_Reduction(k, number, program["stages"][number]) for number in reductions]
            with calling(k).share_groups(rows) as row:
                emitted = Row(k, program, row)
                for one in places:
                    one.compute(emitted)
                for number, shape in outputs:
                    with spread(k, prod(shape)) as element:
                        emitted.put(number, _axes(element, shape))
        else:
            for number, shape in outputs:
                width = prod(shape)
                with k.share(let(rows * width)) as unit:
                    row, element = let(T.truncdiv(unit, width)), let(T.truncmod(unit, width))
                    Row(k, program, row).put(number, _axes(element, shape))
    return k.function()


class _Reduction:
    """A reduction: the whole group computes each element of its result."""

    def __init__(self, k: Frame, number: int, stage: Mapping[str, Any]) -> None:
        self._k, self._number, self._shape, self._extents = k, number, stage["shape"], stage["extents"]
        self._fold, self._kept = Fold(k, combination(stage["reduce"])), Shared(prod(stage["shape"]))

    def compute(self, row: Row) -> None:
        item, combine = calling(self._k).item, row.combine(self._number)
        with turns(self._k, prod(self._shape)) as place:
            spatial, total = _axes(place, self._shape), Cell(row.start(self._number))
            with spread(self._k, prod(self._extents)) as i:
                total.set(combine(total.get(), row.term(self._number, spatial, _axes(i, self._extents))))
            found = self._fold(total.get())
            with when(item == 0):
                self._kept[place] = found
        sync()
        row.keep(self._number, self._kept)
