"""Linear layers on tensor cores: mma.sync of 16 weight rows by 8 rows of x, over ascending K.

A sum is one chain of products of 16 or 32 elements, in any tile. The weight is always the first operand. For few rows
of x, a group streams the weight (`tensor_few`). For more, it stages a tile's steps in shared memory, with all stages
but one in flight; or it multiplies with `wgmma`, where the target says so (`wgmma_linear`). A chain is scaled into a
float where a scale group ends. Rows of experts have tiles by expert, wherever they lie.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.dependent import AWAIT
from llmc.compiler.targets.gpu.kernels.fragments import call
from llmc.compiler.targets.gpu.kernels.groups import Shared, calling, sync
from llmc.compiler.targets.gpu.kernels.row_tiles import Tile, row_tiles
from llmc.compiler.targets.gpu.kernels.short_groups import SharedScales
from llmc.compiler.targets.gpu.kernels.staged import Staged
from llmc.compiler.targets.gpu.kernels.tensor_few import few_rows
from llmc.compiler.targets.gpu.kernels.tensor_sums import HALF, Layer, Sums
from llmc.compiler.targets.gpu.kernels.wgmma_linear import wgmma_rows
from llmc.compiler.targets.gpu.linear_forms import Form
from llmc.compiler.targets.gpu.tensor_cores import MATRIX_COLUMNS, MATRIX_ROWS, STEP_BYTES, TensorLayer
from llmc.compiler.targets.gpu.wgmma import OFF, row_forms
from llmc.compiler.targets.reference.kernels.experts import check_index
from llmc.compiler.targets.reference.kernels.frame import Expr, Frame, let, when
from llmc.compiler.targets.reference.kernels.linear import activated_dtype
from llmc.compiler.targets.reference.kernels.matrices import matrix_of


def _many(of: Layer, rows: Expr, form: Form, memory: Shared) -> None:
    """Many rows of x: one unit is a group's tile of weight rows by rows of x; each warp takes a piece."""
    k, steps, stages, parts = of.k, of.layer.steps, form.stages(of.layer), of.parts
    row_tile = row_tiles(k, of.layer, rows, form)
    weight = Staged(of, of.weight.operand, form.weight_rows, stages, memory, 0)
    begin = stages * form.weight_rows * of.layer.weight_step_bytes // 4
    x = Staged(of, of.x, form.x_rows, stages, memory, begin)
    sums = Sums(of, form.fragments, form.tiles)
    scales = None
    if sums.short is not None:
        assert of.matrix is not None
        behind = begin + stages * form.x_rows * STEP_BYTES // 4
        scales = SharedScales(k, of.layer, of.matrix, form.weight_rows, memory, behind)
    warp_rows, warp_places = form.fragments * MATRIX_ROWS, form.tiles * MATRIX_COLUMNS
    warp, below = let(T.truncmod(of.warp, form.across)), let(T.truncdiv(of.warp, form.across) * warp_places)
    wide = form.weight_rows // parts  # columns of a tile
    count = row_tile.count
    # Neighbouring groups have the same weight rows.
    with calling(k).share_groups(let(count * -(-of.columns // wide))) as unit:
        number, column = let(T.truncmod(unit, count)), let(T.truncdiv(unit, count) * wide)
        tile: Tile = row_tile.at(number)
        if not of.layer.experts:
            call(AWAIT)

        def weight_row(place: Expr) -> Expr:
            """Warps take neighbouring rows; with a gate, 16 of each part in turn."""
            block, within = let(T.truncdiv(place, MATRIX_ROWS)), let(T.truncmod(place, MATRIX_ROWS))
            of_part = let(T.min(column + T.truncdiv(block, parts) * MATRIX_ROWS + within, of.columns - 1))
            return let(tile.base + of_part + T.truncmod(block, parts) * of.columns)

        weight.rows(weight_row)
        x.rows(lambda place: tile.row(let(T.min(place, tile.count - 1))))
        sums.begin(tile, let(column + warp * (warp_rows // parts)), below)

        def copy(step: Expr) -> None:
            with T.If(step < steps), T.Then():
                weight.copy(step)
                x.copy(step)
            call("llmc_copies_end")

        sync()
        for ahead in range(stages - 1):
            copy(let(T.int32(ahead)))
        if scales is not None:
            scales.begin(weight_row)
        with T.serial(steps) as step:
            call(f"llmc_copies_wait<{stages - 2}>")
            sync()
            copy(let(step + (stages - 1)))
            places = [
                [let(warp * warp_rows + (fragment * MATRIX_ROWS + half * HALF) + of.of_row) for half in range(2)]
                for fragment in range(form.fragments)
            ]
            stored = [[weight.read(step, place) for place in pair] for pair in places]
            if scales is not None and sums.short is not None:
                scales.enter(sums.short, step, [place for pair in places for place in pair])
                with when(T.truncmod(step + 1, of.layer.group_steps) == 0):
                    scales.give(let(T.truncdiv(step + 1, of.layer.group_steps)))
            sums.multiply(step, stored, lambda tile: x.read(step, let(below + of.of_row + tile * MATRIX_COLUMNS)))
            sums.end_step(step)
        call("llmc_copies_wait<0>")
        sums.end()
        sums.write()


def tensor_linear(spec: KernelSpec, layer: TensorLayer, wgmma: str = OFF) -> tirx.PrimFunc:
    """layer: from `tensor_layer`. wgmma: for which rows (`wgmma.py`). Raises KernelSpecError."""
    p = spec.as_dict()
    matrix = None
    x = "f32" if layer.normed else layer.dtype
    inputs = {"x": x, "weight": layer.dtype}
    if layer.experts:
        check_index(spec)
    if layer.length:
        matrix = matrix_of(p, layer.width)
        inputs = {"x": x, **matrix.operands()}
    optional = dict.fromkeys((name for name in ("bias", "residual") if p.get(name)), "f32")
    more = {"index": "i32"} if layer.experts else {"norm": "f32"} if layer.normed else {}
    with Frame(spec.symbol(), {**inputs, **optional, **more, "out": activated_dtype(p) or "f32"}) as k:
        of, forms = Layer(k, spec, layer, matrix), row_forms(layer, wgmma)
        rows = T.int32(0) if layer.experts else k.scalar(int(p["rows"]))
        memory = Shared(forms.shared_bytes(layer) // 4, "uint32")
        # Many rows first: they need all registers, and values that few rows know would take some.
        for wide in reversed(forms.wgmma):
            wgmma_rows(of, rows, wide, memory)
        for form in forms.many:
            _many(of, rows, form, memory)
        for few_form in forms.few:
            few_rows(of, rows, few_form, memory)
        if not layer.experts:
            call(AWAIT)  # a group without rows
    return k.function()
