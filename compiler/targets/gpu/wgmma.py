"""Which rows of x a linear layer multiplies with Hopper's `wgmma`, and in which tiles. Imports no tvm.

NVIDIA documents neither the order in which `wgmma` adds, nor that it adds as `mma.sync` does. So it is an option of the
target: for all rows, or for those tiles of many rows that pay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmc.compiler.targets.gpu.linear_forms import FEW_ROWS, FewForm, Form, few_forms, forms, free_bytes
from llmc.compiler.targets.gpu.tensor_cores import MATRIX_COLUMNS, MATRIX_ROWS, STEP_BYTES, WARPS, TensorLayer

OFF, ALL, MANY = "", "wgmma", "wgmma-many"
"""For no rows, for any number of them, and for tiles of more than 64 rows, or more than 16 of an expert."""
WAYS = (ALL, MANY)
"""As a target's name has them, behind the architecture: `sm_90a+wgmma`."""
ARCHITECTURE = "sm_90a"
"""The one that has the instruction."""
NOT_TAKEN = "scale groups of less than 64 numbers with steps, offsets, or codes whose scale is no power of two"
"""Why a layer on tensor cores is not computed by it."""
X_STAGES = 3
"""Steps of x in shared memory: one is multiplied, the next one is there, and one may still be read by other warps."""
_MOST_STAGES = 10


@dataclass(frozen=True)
class WgmmaForm:
    """How a warp group computes tiles of x rows that share a weight, if these are more than `above` and up to `most`.

    fragments: of 16 weight rows, for each of the four warps. tiles: of 8 rows of x, which all warps share.
    """

    above: int
    most: int
    fragments: int
    tiles: int

    @property
    def weight_rows(self) -> int:
        """Weight rows of a group."""
        return WARPS * self.fragments * MATRIX_ROWS

    @property
    def x_rows(self) -> int:
        """Rows of x of a group."""
        return self.tiles * MATRIX_COLUMNS

    @property
    def x_step_bytes(self) -> int:
        return self.x_rows * STEP_BYTES

    def stages(self, layer: TensorLayer) -> int:
        """Steps of the weight that shared memory holds at a time."""
        free = free_bytes(layer) - X_STAGES * self.x_step_bytes
        return min(_MOST_STAGES, free // (self.weight_rows * layer.weight_step_bytes))

    def shared_bytes(self, layer: TensorLayer) -> int:
        return X_STAGES * self.x_step_bytes + self.stages(layer) * self.weight_rows * layer.weight_step_bytes


@dataclass(frozen=True)
class RowForms:
    """The forms of a layer, which every number of rows has one of."""

    few: tuple[FewForm, ...]
    many: tuple[Form, ...]
    wgmma: tuple[WgmmaForm, ...]

    def shared_bytes(self, layer: TensorLayer) -> int:
        """Of the form that needs most."""
        sizes = [form.shared_bytes for form in self.few]
        sizes += [form.shared_bytes(layer) for form in self.many]
        return max(sizes + [form.shared_bytes(layer) for form in self.wgmma])


def row_forms(layer: TensorLayer, way: str) -> RowForms:
    """way: OFF, or one of WAYS. Sums of integers are exact, so a layer of integers mixes both instructions."""
    if layer.normed:
        return RowForms(few_forms(layer), (), ())
    few, many = few_forms(layer), forms(layer)
    if way == OFF or not takes(layer):
        return RowForms(few, many, ())
    wide = _wide(layer, many[-1])
    if way == MANY or layer.dtype == "i8":
        return RowForms(few, many[:-1], (wide,))
    # Sixteen weight rows of a warp, with a gate of each part.
    least = WgmmaForm(0, MATRIX_COLUMNS, layer.parts, 1)
    some = [least, replace(least, above=MATRIX_COLUMNS, most=FEW_ROWS, tiles=2)]
    some += [WgmmaForm(form.above, form.most, form.fragments, form.x_rows // MATRIX_COLUMNS) for form in many[:-1]]
    return RowForms((), (), (*some, wide))


def takes(layer: TensorLayer) -> bool:
    """Whether a layer uses `wgmma` where the target does. Short groups would wait for each step of products."""
    return not layer.short


def _wide(layer: TensorLayer, form: Form) -> WgmmaForm:
    """In place of the form for the most rows.

    Sums take 128 registers: of two fragments by 128 rows of x, or by half of them where each sum takes two. An expert
    seldom has as many rows.
    """
    return WgmmaForm(form.above, form.most, 2, 8 if layer.grouped or layer.experts else 16)
