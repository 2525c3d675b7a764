"""Low-rank changes of experts that an adapter has as one tensor, merged into them however a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmc.models.convert import Array
from llmc.models.sources.base import ArrayTensor, Tensor
from llmc.models.sources.lora.adapter import LowRank, Merged
from llmc.models.weight_map import Source, Target, WeightMap
from llmc.peft_experts import ExpertsChange, Matrices
from llmc.peft_format import layer_of

_GATE_UP, _DOWN = ".experts.gate_up.weight", ".experts.down.weight"


def matrices_of(weights: WeightMap) -> dict[str, list[Matrices]]:
    """The matrices of experts of each layer, for `changes_of`."""
    found: dict[str, list[Matrices]] = {}
    for target in weights.targets:
        if target.name.endswith((_GATE_UP, _DOWN)) and (_is_apart(target) or _is_stacked(target)):
            rows, columns = target.shape
            sizes = target.matrices, rows // target.matrices, columns
            one = Matrices(target.name, *sizes, down=target.name.endswith(_DOWN))
            found.setdefault(layer_of(target.sources[0].name), []).append(one)
    return found


def _is_apart(target: Target) -> bool:
    """Whether each expert has tensors of its own."""
    plain = target.rows is None and all(source.stored is None for source in target.sources)
    return plain and len(target.sources) % target.matrices == 0


def _is_stacked(target: Target) -> bool:
    """Whether tensors have the matrices of all experts: a dimension for experts, or one of their rows in one tensor."""
    if len(target.sources) == 1 and target.sources[0].stored is None:
        return True
    return all(source.stored is not None and len(source.stored) == 3 for source in target.sources)


@dataclass(frozen=True)
class OfExperts:
    """The change of rows [first, first + count) of each expert."""

    change: ExpertsChange
    scale: float
    first: int
    count: int

    def of_expert(self, expert: int, *, turned: bool = False) -> LowRank:
        """turned: of the matrix [columns, rows]."""
        a, b = self.change.a[expert], self.change.b[expert, self.first : self.first + self.count]
        return LowRank(a, b, self.scale, turned=turned)


def of_sources(change: ExpertsChange, scale: float, target: Target) -> Iterator[tuple[Source, LowRank | OfExperts]]:
    """What a change is of each tensor of its target: of one expert each, or of all."""
    apart = _is_apart(target)
    each = len(target.sources) // target.matrices if apart else len(target.sources)
    count = change.b.shape[1] // each
    for index, source in enumerate(target.sources):
        expert, part = divmod(index, each) if apart else (0, index)
        of_all = OfExperts(change, scale, part * count, count)
        yield source, of_all.of_expert(expert) if apart else of_all


class MergedStack(Tensor):
    """Matrices [experts, rows, columns] plus changes, in float32. turned: they are [experts, columns, rows]."""

    def __init__(self, base: Tensor, changes: tuple[OfExperts, ...], *, turned: bool) -> None:
        self._base, self._changes, self._turned = base, changes, turned

    @property
    def shape(self) -> tuple[int, ...]:
        return self._base.shape

    def read(self, first: int, out: Array) -> None:
        matrix = np.empty((1, *self.shape[1:]), np.float32)
        for expert, to in enumerate(out, first):
            self._base.read(expert, matrix)
            changes = tuple(change.of_expert(expert, turned=self._turned) for change in self._changes)
            Merged(ArrayTensor(matrix[0]), changes).read(0, to)


class MergedRows(Tensor):
    """A matrix [experts · rows, columns] plus changes of all experts, in float32."""

    def __init__(self, base: Tensor, changes: tuple[OfExperts, ...]) -> None:
        self._base, self._changes = base, changes

    @property
    def shape(self) -> tuple[int, ...]:
        return self._base.shape

    def read(self, first: int, out: Array) -> None:
        rows, at = self._changes[0].count, 0
        while at < len(out):
            expert, begin = divmod(first + at, rows)
            some = out[at : at + rows - begin]
            changes = tuple(change.of_expert(expert) for change in self._changes)
            Merged(_Rows(self._base, expert * rows, rows), changes).read(begin, some)
            at += len(some)


class _Rows(Tensor):
    """Rows [first, first + count) of a matrix."""

    def __init__(self, whole: Tensor, first: int, count: int) -> None:
        self._whole, self._first, self._count = whole, first, count

    @property
    def shape(self) -> tuple[int, ...]:
        return self._count, self._whole.shape[1]

    def read(self, first: int, out: Array) -> None:
        self._whole.read(self._first + first, out)
