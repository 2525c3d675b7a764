"""From a checkpoint's tensors to a model's parameters; nothing is read before it is needed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from llmc.models.config import ModelConfig
from llmc.models.convert import DTYPES, Array
from llmc.models.errors import ModelError
from llmc.models.registry import get_family
from llmc.models.sources.base import ArrayTensor, Checkpoint, Tensor
from llmc.models.sources.reordered import ColumnsTaken, PairsParted, RowsTaken
from llmc.models.sources.reshaped import (
    Flattened,
    Mapped,
    OfHeads,
    Scaled,
    Shifted,
    Stacked,
    Transposed,
    Unrolled,
    parted,
)
from llmc.models.sources.stored import Stored
from llmc.models.weight_map import Source, WeightMap
from llmc.quantize.formats.base import Quantized


def _starts(counts: Iterable[int]) -> tuple[int, ...]:
    """The first row of each of several stacked parts, then the total."""
    return tuple(accumulate(counts, initial=0))


def _of_parts(starts: Sequence[int], first: int, count: int) -> Iterator[tuple[int, int, slice]]:
    """Splits rows [first, first + count) of stacked parts: (part, first row in it, destination rows)."""
    at, index = first, bisect_right(starts, first) - 1
    while at < first + count:
        end = min(first + count, starts[index + 1])
        if at < end:
            yield index, at - starts[index], slice(at - first, end - first)
        at, index = end, index + 1


class _Joined(Stored):
    """Stacked parts in one format. columns: their order, or one per matrix, [matrices, K]."""

    def __init__(self, parts: Sequence[Stored], counts: Sequence[int], columns: NDArray[np.int32] | None) -> None:
        self._parts, self._starts, self.columns = parts, _starts(counts), columns
        self.format, self.int8_inputs = parts[0].format, parts[0].int8_inputs
        self.is_scattered = any(part.is_scattered for part in parts)

    def read(self, first: int, out: Quantized) -> None:
        for index, begin, rows in _of_parts(self._starts, first, len(out.numbers)):
            self._parts[index].read(begin, out.rows(rows))


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model whose value stays in the checkpoint until read.

    dtype: stored dtype, "f32", "bf16" or "f16". parts: stacked tensors. columns: if reordered, column j is column
    columns[j] of the model's. matrices: see `Target`; with several, columns is [matrices, K].
    """

    name: str
    dtype: str
    parts: tuple[Tensor, ...]
    columns: NDArray[np.int32] | None = None
    matrices: int = 1

    @classmethod
    def of(cls, name: str, dtype: str, *arrays: Array) -> Parameter:
        """A parameter whose values are in memory, f32, f16 or bf16."""
        return cls(name, dtype, tuple(map(ArrayTensor, arrays)))

    @cached_property
    def _first_rows(self) -> tuple[int, ...]:
        # Experts have hundreds of parts, and rows are read a few at a time.
        return _starts(part.shape[0] for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._first_rows[-1], *self.parts[0].shape[1:])

    def read(self, first: int, out: Array) -> None:
        """Writes rows [first, first + len(out)) to `out`, converted to its dtype; `out` may be strided."""
        for index, begin, rows in _of_parts(self._first_rows, first, len(out)):
            self.parts[index].read(begin, out[rows])

    @cached_property
    def _stored_parts(self) -> tuple[Stored, ...]:
        """All parts as stored, in one format; empty if no format holds them all."""
        found = [part.stored for part in self.parts]
        stored = [part for part in found if part is not None]
        parts = stored[0].alike(stored[1:]) if len(stored) == len(found) else None
        return tuple(parts or ())

    @cached_property
    def _orders(self) -> tuple[tuple[NDArray[np.int32] | None, ...], ...]:
        """Column orders of every part of every matrix that may have its own order."""
        parts = self._stored_parts
        of_matrix = len(parts) // self.matrices if len(parts) % self.matrices == 0 and parts else len(parts)
        orders = tuple(part.columns for part in parts)
        return tuple(orders[at : at + of_matrix] for at in range(0, len(parts), max(1, of_matrix)))

    @cached_property
    def has_other_orders(self) -> bool:
        """Whether only differing column orders prevent the parts from forming one stored matrix."""
        return any(not _same_order(one, orders[0]) for orders in self._orders for one in orders)

    def _joined_columns(self) -> NDArray[np.int32] | None:
        """The order of all parts, or one per matrix; None if none is reordered."""
        firsts = [orders[0] for orders in self._orders]
        if len(firsts) == 1 or all(first is None for first in firsts):
            return firsts[0]
        plain = np.arange(self.shape[1], dtype=np.int32)
        return np.stack([plain if first is None else first for first in firsts])

    @cached_property
    def stored(self) -> Stored | None:
        """The matrix in a format that holds all stored parts exactly; None if there is none."""
        if not self._stored_parts or self.has_other_orders:
            return None
        return _Joined(self._stored_parts, [part.shape[0] for part in self.parts], self._joined_columns())

    def in_stored_order(self) -> Parameter:
        """The matrix with columns in stored order."""
        columns = None if self.stored is None else self.stored.columns
        if columns is None:
            return self
        return replace(self, parts=(ColumnsTaken(self, self.stored, columns),), columns=columns)

    def with_rows(self, order: NDArray[np.int32]) -> Parameter:
        """The parameter whose row i is row order[i] of this one."""
        return replace(self, parts=(RowsTaken(self, self.stored, order),))

    def value(self) -> Array:
        """The whole parameter in its dtype, as a new array."""
        out = np.empty(self.shape, DTYPES[self.dtype])
        self.read(0, out)
        return out


def _same_order(a: NDArray[np.int32] | None, b: NDArray[np.int32] | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def check_checkpoint(config: ModelConfig, checkpoint: Checkpoint) -> WeightMap:
    """The weight map of `config`, checked against the names, shapes and dtypes in `checkpoint`'s headers.

    Allocates nothing of the model's size. Raises ModelError.
    """
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    weights = checkpoint.weight_map(config) or get_family(config.model_type).weight_map_of(config, shapes)
    weights.check(shapes, str(checkpoint.path), checkpoint.config_name, checkpoint.called)
    read = {source.name for target in weights.targets for source in target.sources}
    for name in sorted(checkpoint.adapted() - read):
        raise ModelError(
            f"an adapter changes {checkpoint.called(name)}, which the model does not read; give the model that the "
            "adapter was made for"
        )
    for name in sorted(read):
        checkpoint.check_dtype(name)
    return weights


def load_parameters(config: ModelConfig, checkpoint: Checkpoint, act_dtype: str) -> Iterator[Parameter]:
    """Yields every parameter in order, without the rotary tables' buffers.

    Linear and embedding weights are in act_dtype ("f32", "bf16" or "f16"), norms and biases in float32. Raises
    ModelError before the first one if the checkpoint does not fit.
    """
    for target in check_checkpoint(config, checkpoint).targets:
        dtype = act_dtype if target.dtype == "act" else "f32"
        parts = tuple(_tensor(checkpoint, source) for source in target.sources)
        parameter = Parameter(target.name, dtype, parts, matrices=target.matrices)
        if target.pairs:
            parameter = replace(parameter, parts=(PairsParted(parameter, parameter.stored, target.pairs),))
        if target.plus:
            parameter = replace(parameter, parts=(Shifted(parameter, target.plus),))
        if target.of_rows is not None:
            parameter = replace(parameter, parts=(Mapped(parameter, target.of_rows),))
        if target.part is not None:
            parameter = replace(parameter, parts=(OfHeads(parameter, target.part),))
        if target.rows is not None:
            parameter = parameter.with_rows(target.rows)
        yield parameter if target.times is None else replace(parameter, parts=(Scaled(parameter, target.times),))


def _tensor(checkpoint: Checkpoint, source: Source) -> Tensor:
    """The source tensor in the model's shape."""
    tensor = checkpoint.tensor(source.name)
    if source.stored is None:
        return tensor
    if source.blocks:
        return Stacked(parted(tensor, source.blocks), turned=source.turned)
    if len(source.shape) == 1:
        return Flattened(tensor, turned=source.turned)
    if len(source.stored) > 3:
        return Unrolled(tensor)
    return Stacked(tensor, turned=source.turned) if len(source.stored) == 3 else Transposed(tensor)
