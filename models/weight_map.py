"""From a checkpoint's tensors to a model's parameters: total, so no tensor is missing, left over or of another
shape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmc.models.brief import brief_name
from llmc.models.errors import ModelError

Shape = tuple[int, ...]
Rows = NDArray[np.int32]


@dataclass(frozen=True)
class Source:
    """A tensor that the checkpoint must have, with its shape in the model.

    stored: its stored shape, if different: a matrix [columns, rows], a matrix that is one vector row by row, stacked
    matrices [count, rows, columns], or a matrix whose columns are several axes [rows, …, …, …].
    turned: stored as [count, columns, rows]; a vector is the matrix column by column.
    blocks: the stored matrix is a stack of that many, each transposed.
    """

    name: str
    shape: Shape
    stored: Shape | None = None
    turned: bool = False
    blocks: int = 0

    @property
    def stored_shape(self) -> Shape:
        """As the checkpoint has it."""
        return self.shape if self.stored is None else self.stored

    @property
    def is_transposed(self) -> bool:
        """Whether it is a matrix stored as [columns, rows]."""
        return len(self.shape) == 2 and self.stored is not None and len(self.stored) == 2 and not self.blocks


@dataclass(frozen=True)
class HeadPart:
    """Of the `rows` rows of each head, those from `first` on, `count` of them. turned: each head's part is transposed,
    so it has a row per column."""

    rows: int
    first: int
    count: int
    turned: bool = False

    def shape_of(self, shape: Shape) -> Shape:
        """The shape of the part, for a matrix [rows of all heads, columns]."""
        heads, columns = shape[0] // self.rows, shape[1]
        return (heads * columns, self.count) if self.turned else (heads * self.count, columns)


@dataclass(frozen=True)
class Target:
    """A parameter and its sources: one tensor, or several stacked.

    dtype: "act" for weights in the activation dtype, "f32" for norms and biases.
    makes: for a gated layer read by exactly one linear layer, that layer's weight; rows i of gate and up correspond to
    its column i.
    rows: int32; row i is row rows[i] of the sources; None for identity.
    plus: added to every value.
    pairs: number of blocks of rows in which even rows come first, then odd ones; 0 for identity.
    of_rows: function applied to each float32 row; None for identity.
    precise: a small, sensitive matrix, which llmc does not quantize.
    table: a matrix whose rows are picked by ids or positions; only a tied embedding is multiplied by inputs, too.
    matrices: number of equal blocks of rows, whose columns may be stored in orders of their own.
    part: the part of each head that is taken; always as floats.
    times: float32; element i of a vector is multiplied by times[i]; None for 1.
    """

    name: str
    sources: tuple[Source, ...]
    dtype: Literal["act", "f32"]
    makes: str | None = None
    rows: Rows | None = field(default=None, compare=False)
    plus: float = 0.0
    of_rows: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = field(default=None, compare=False)
    precise: bool = False
    table: bool = False
    pairs: int = 0
    part: HeadPart | None = None
    matrices: int = 1
    times: NDArray[np.float32] | None = field(default=None, compare=False)

    @property
    def shape(self) -> Shape:
        rows = sum(s.shape[0] for s in self.sources) if self.rows is None else len(self.rows)
        shape = (rows, *self.sources[0].shape[1:])
        return shape if self.part is None else self.part.shape_of(shape)

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a linear layer that may be quantized. A tied output projection is a table."""
        return self.dtype == "act" and not self.table and not self.precise


@dataclass(frozen=True)
class WeightMap:
    """targets: every parameter of the model; tied ones once. unused: ignored tensors. other_modules: name prefixes of
    ignored modules. head: the module that makes logits, also where its weight is the embedding's; empty for none."""

    targets: tuple[Target, ...]
    unused: frozenset[str]
    other_modules: tuple[str, ...] = ()
    head: str = ""

    def sources(self) -> Iterator[Source]:
        """Every tensor that the checkpoint must have."""
        return (source for target in self.targets for source in target.sources)

    def with_rows(self, names: Collection[str]) -> WeightMap:
        """The map of a checkpoint in which the matrices called so are stored as [rows, columns]."""
        if not any(source.is_transposed and source.name in names for source in self.sources()):
            return self

        def plain(source: Source) -> Source:
            return replace(source, stored=None) if source.is_transposed and source.name in names else source

        return replace(self, targets=tuple(replace(t, sources=tuple(map(plain, t.sources))) for t in self.targets))

    def check(
        self,
        shapes: Mapping[str, Shape],
        origin: str,
        config_name: str = "config.json",
        called: Callable[[str], str] = str,
    ) -> None:
        """Raises ModelError if the checkpoint `origin` has a missing, misshapen or unknown tensor.

        config_name: the file that implies the shapes. called: maps our tensor names to the files'.
        """
        again = f"correct {config_name} or download the checkpoint again"
        sources = {source.name: source for source in self.sources()}
        for source in sources.values():
            found = shapes.get(source.name)
            if found is None:
                raise ModelError(
                    f"{origin} lacks the tensor {called(source.name)} of shape {list(source.stored_shape)}; {again}"
                )
            if found != source.stored_shape:
                raise ModelError(
                    f"{origin}: tensor {called(source.name)} has shape {list(found)} where {config_name} "
                    f"implies {list(source.stored_shape)}; {again}"
                )
        known = sources.keys() | self.unused
        unknown = sorted(name for name in shapes if name not in known and not name.startswith(self.other_modules))
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise ModelError(
                f"{origin} has the tensor {brief_name(called(unknown[0]))} of shape {list(shapes[unknown[0]])}{more}, "
                f"which this architecture does not use; {again}"
            )
