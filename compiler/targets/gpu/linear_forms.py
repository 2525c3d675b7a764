"""How a group computes a linear layer on tensor cores, by the number of rows of x that share a weight.

Few rows are a matter of reading the weight: by Little's law, a GPU needs as many bytes in flight as its memory's
bandwidth times its latency. Many rows are a matter of products for each byte of shared memory. Imports no tvm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmc.compiler.targets.gpu.tensor_cores import (
    ITEMS,
    MATRIX_COLUMNS,
    MATRIX_ROWS,
    SPAN,
    STEP_BYTES,
    WARPS,
    TensorLayer,
)

SHARED_BYTES = 48 << 10
"""Shared memory that a kernel may have without asking the driver for more."""
FEW_ROWS = 2 * MATRIX_COLUMNS
"""Up to this many rows of x, each warp reads x by itself, and only the weight is staged."""
PLACES = 264
"""Groups that run at a time: registers leave room for two on each of some 132 processors."""
RESULT_BYTES = 4 * MATRIX_ROWS * MATRIX_COLUMNS
"""Of the sums of one product."""
_MOST_STAGES = 8
_INDEX_BYTES = 8  # of shared memory for each expert; TVM gives the indices of all forms one place
_FOLD_BYTES = 4 * ITEMS  # in which a group folds what its items have of a normed row
_WIDE = 8192  # weight rows from which tiles of a few rows of x still occupy all processors with 64 weight rows each
_EXPERT_ROWS = 16  # tokens for whose rows of experts a launch has groups
_MOST = (1 << 31) - 1
_SOME_ROWS = 64
_STAGE_BYTES = 8 << 10  # of a ring; half of it where warps divide a stage, or a normed row lies beside it
_SUMS_BYTES = 16 << 10  # of scale groups, so that stages of short ones are still deep
_LEAST_RING_STAGES, _MOST_RING_STAGES = 4, 12
_MOST_X_READ = 8  # products whose part of x a warp reads ahead, in registers


@dataclass(frozen=True)
class Form:
    """How a group computes tiles of x rows that share a weight, if these are more than `above` and up to `most`.

    fragments, tiles: of 16 weight rows and of 8 rows of x, for each warp. across, below: warps along both.
    """

    above: int
    most: int
    fragments: int
    tiles: int
    across: int
    below: int

    @property
    def weight_rows(self) -> int:
        """Weight rows of a group."""
        return self.across * self.fragments * MATRIX_ROWS

    @property
    def x_rows(self) -> int:
        """Rows of x of a group."""
        return self.below * self.tiles * MATRIX_COLUMNS

    def stages(self, layer: TensorLayer) -> int:
        """Steps that shared memory holds at a time."""
        free = free_bytes(layer) - self._scale_bytes(layer)
        return max(3, min(_MOST_STAGES, free // self._step_bytes(layer)))

    def shared_bytes(self, layer: TensorLayer) -> int:
        return self.stages(layer) * self._step_bytes(layer) + self._scale_bytes(layer)

    def _scale_bytes(self, layer: TensorLayer) -> int:
        """Of two spans of short groups: a scale of each, and an offset."""
        return 2 * self.weight_rows * (SPAN // layer.short) * (8 if layer.offsets else 4) if layer.short else 0

    def _step_bytes(self, layer: TensorLayer) -> int:
        return self.weight_rows * layer.weight_step_bytes + self.x_rows * STEP_BYTES


@dataclass(frozen=True)
class FewForm:
    """How a group computes a tile of a few rows of x: weight rows come through a ring of stages in shared memory.

    tiles: of 8 rows of x. units: of 16 columns of the result. splits: warps that share the stages of a unit; more than
    one only where bits do not depend on it. depth: steps of a stage.
    """

    layer: TensorLayer
    tiles: int
    units: int
    splits: int
    depth: int

    @property
    def above(self) -> int:
        return self.most - MATRIX_COLUMNS

    @property
    def most(self) -> int:
        return 1 if self.layer.normed else self.tiles * MATRIX_COLUMNS

    @property
    def x_rows(self) -> int:
        return self.most

    @property
    def columns(self) -> int:
        """Columns of the result of a group."""
        return self.units * MATRIX_ROWS

    @property
    def weight_rows(self) -> int:
        """Weight rows of a group."""
        return self.columns * self.layer.parts

    @property
    def warp_steps(self) -> int:
        """Steps of a stage that a warp multiplies."""
        return self.depth // self.splits

    @property
    def groups(self) -> int:
        """Scale groups that end in a stage, or the one that a stage belongs to."""
        return max(1, self.depth // self.layer.group_steps) if self.layer.grouped else 1

    @property
    def passed(self) -> bool:
        """Whether warps pass sums of scale groups to each other, which then are added in their order."""
        return self.splits > 1 and self.layer.grouped

    @property
    def x_in_place(self) -> bool:
        """Whether each step of x takes the place of the one multiplied a stage before. For two tiles of gated layers,
        scales and offsets of groups of a product leave no registers for both."""
        layer = self.layer
        return self.tiles > 1 and layer.parts > 1 and layer.offsets and layer.halved

    @property
    def sums_bytes(self) -> int:
        """Sums of scale groups of a stage, twice: those of one stage are read while those of the next are written."""
        return 2 * self.groups * self.unit_bytes if self.passed else 0

    @property
    def unit_bytes(self) -> int:
        """Sums of all units."""
        return self.units * self.layer.parts * self.tiles * RESULT_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.weight_rows * self.depth * self.layer.weight_step_bytes

    @property
    def stages(self) -> int:
        return min(_MOST_RING_STAGES, (free_bytes(self.layer) - self.sums_bytes) // self.stage_bytes)

    @property
    def is_deep(self) -> bool:
        """Whether memory has enough to do while a stage is multiplied."""
        return self.stages >= _LEAST_RING_STAGES

    @property
    def row_begin(self) -> int:
        """Where in shared memory a normed row begins, in bytes: behind stages and sums."""
        return self.stages * self.stage_bytes + self.sums_bytes

    @property
    def shared_bytes(self) -> int:
        return self.row_begin + self.layer.row_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of the weight that a group waits for at a time: all stages but the one it multiplies."""
        return (self.stages - 1) * self.stage_bytes


def free_bytes(layer: TensorLayer) -> int:
    """Shared memory for stages, beside the index of experts, or a normed row."""
    if not layer.normed:
        return SHARED_BYTES - _INDEX_BYTES * layer.experts
    # Rows of int8 also need their largest number, and its sum as an integer.
    folds = 3 if layer.dtype == "i8" else 1
    return SHARED_BYTES - layer.row_bytes - folds * _FOLD_BYTES


def few_forms(layer: TensorLayer) -> tuple[FewForm, ...]:
    """The forms for up to 8 and up to 16 rows of x, or for the one row that a layer norms."""
    return (_few_form(layer, 1),) if layer.normed else (_few_form(layer, 1), _few_form(layer, 2))


def few_groups(layer: TensorLayer) -> int:
    """Groups that up to 8 rows of x occupy."""
    return layer.top_k * -(-layer.columns // few_forms(layer)[0].columns)


def _few_form(layer: TensorLayer, tiles: int) -> FewForm:
    """As many columns a group as leave one for every place on the GPU."""
    of_unit = layer.top_k * layer.columns
    units = next((n for n in (1, 2) if of_unit <= PLACES * n * MATRIX_ROWS), WARPS)
    splits = WARPS // units if _divides(layer) else 1
    while not (form := _shallow(layer, tiles, units, splits)).is_deep and splits > 1:
        splits //= 2
    while _fits(deeper := replace(form, depth=2 * form.depth)):
        form = deeper
    return form


def _shallow(layer: TensorLayer, tiles: int, units: int, splits: int) -> FewForm:
    """With the least steps a stage: each warp has one, or a scale group where it shares a unit, or a span."""
    whole = layer.short or (splits > 1 and layer.grouped)
    return FewForm(layer, tiles, units, splits, splits * (layer.group_steps if whole else 1))


def _divides(layer: TensorLayer) -> bool:
    """Whether warps may divide the steps of a stage, each with chains of its own, and still give the same bits.

    Sums of integers are exact. Chains of scale groups are added in the order of groups, whoever made them.
    """
    if layer.grouped:
        return layer.group_steps in (1, 2, 4)
    return layer.dtype == "i8"


def _fits(form: FewForm) -> bool:
    """Whether a stage is not too large. A scale group has whole stages, or a stage whole groups."""
    layer, least = form.layer, form.layer.group_steps
    return (
        not layer.short  # a warp has the scales of one span in registers
        and form.stage_bytes <= (_STAGE_BYTES // 2 if form.splits > 1 or layer.normed else _STAGE_BYTES)
        and form.sums_bytes <= _SUMS_BYTES
        and form.warp_steps * form.tiles <= _MOST_X_READ
        and (not layer.grouped or least % form.depth == 0 or form.depth % least == 0)
    )


def forms(layer: TensorLayer) -> tuple[Form, ...]:
    """The forms for more than a few rows, which every number of rows has one of.

    A warp with 64 weight rows and 64 rows of x reads little of shared memory per product. With scale groups it has half
    of that, since each sum takes two registers. Offsets, and sums of x beside them, take those of two tiles.
    """
    tall = Form(FEW_ROWS, _MOST, 2, 6 if layer.offsets else 8, across=4, below=1)
    if layer.experts:
        return (tall,)
    some = Form(FEW_ROWS, _SOME_ROWS, max(layer.parts, 2 if layer.rows >= _WIDE else 1), 4, across=2, below=2)
    many = tall if layer.grouped else Form(FEW_ROWS, _MOST, 4, 8, across=2, below=2)
    return some, Form(_SOME_ROWS, _MOST, many.fragments, many.tiles, many.across, many.below)


def launch_tiles(layer: TensorLayer) -> tuple[int, int]:
    """(groups, rows of x that they are for).

    As many groups as few rows occupy. They take turns at the tiles of many rows, so large graphs have few idle groups.
    """
    return few_groups(layer), _EXPERT_ROWS if layer.experts else 4 * forms(layer)[-1].x_rows
