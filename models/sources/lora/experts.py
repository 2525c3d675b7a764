"""Low-rank changes of experts that an adapter has as one tensor, merged into them however a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.models.convert import Array, convert
from llmc.models.sources.base import Tensor
from llmc.models.sources.lora.adapter import Change, LowRank
from llmc.models.weight_map import Source, Target, WeightMap
from llmc.peft_experts import ExpertsChange, Matrices, layer_of

_OF_EXPERTS = (".experts.gate_up.weight", ".experts.down.weight")


def matrices_of(weights: WeightMap) -> dict[int, list[Matrices]]:
    """The matrices of experts of each layer, by the names of their parameters."""
    found: dict[int, list[Matrices]] = {}
    for target in weights.targets:
        if target.name.endswith(_OF_EXPERTS) and (layer := layer_of(target.name)) is not None:
            rows, columns = target.shape
            one = Matrices(
                target.name, target.matrices, rows // target.matrices, columns, target.name.endswith(_OF_EXPERTS[1])
            )
            found.setdefault(layer, []).append(one)
    return found


@dataclass(frozen=True)
class OfExperts:
    """The change of every expert's rows [first, first + count), as a change of the matrix of all of them below each
    other. scale: of products."""

    change: ExpertsChange
    scale: float
    first: int
    count: int
    length: None = None

    def rows(self, first: int, count: int) -> NDArray[np.float64]:
        """Rows [first, first + count) of the product."""
        found, end = list[NDArray[np.float64]](), first + count
        while first < end:
            expert, row = divmod(first, self.count)
            some = min(end - first, self.count - row)
            found.append(self.of_expert(expert).rows(row, some))
            first += some
        return np.concatenate(found)

    def of_expert(self, expert: int) -> LowRank:
        b = self.change.b[expert, self.first : self.first + self.count]
        return LowRank(self.change.a[expert], b, self.scale)


def of_sources(change: ExpertsChange, scale: float, target: Target) -> Iterator[tuple[Source, Change]]:
    """What a change is of each tensor of its target: of one expert each, or of all."""
    experts, sources = target.matrices, target.sources
    apart = len(sources) % experts == 0 and sources[0].stored is None and len(sources) >= experts
    each = len(sources) // experts if apart else len(sources)
    count = change.b.shape[1] // each
    for index, source in enumerate(sources):
        expert, part = divmod(index, each) if apart else (0, index)
        of_all = OfExperts(change, scale, part * count, count)
        yield source, of_all.of_expert(expert) if apart else of_all


class MergedStack(Tensor):
    """Matrices [experts, rows, columns] plus changes, in float32. turned: they are [experts, columns, rows]."""

    def __init__(self, base: Tensor, changes: tuple[Change, ...], *, turned: bool) -> None:
        """changes: of the matrices below each other."""
        self._base, self._changes, self._turned = base, changes, turned
        self._rows = base.shape[2 if turned else 1]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._base.shape

    def read(self, first: int, out: Array) -> None:
        matrix = np.empty((1, *self.shape[1:]), np.float32)
        for expert in range(first, first + len(out)):
            self._base.read(expert, matrix)
            total = matrix[0].astype(np.float64)
            for change in self._changes:
                product = change.rows(expert * self._rows, self._rows)
                total += product.T if self._turned else product
            convert(total.astype(np.float32)[None], out[expert - first : expert - first + 1])
