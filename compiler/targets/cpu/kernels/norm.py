"""rms_norm: x * 1/sqrt(mean(x²) + eps) * weight, row by row, written as a packed activation, float or int8."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import vector
from llmc.compiler.targets.cpu.kernels.quantize_rows import RowQuantizer
from llmc.compiler.targets.cpu.target import Target

_CHAINS = 4  # independent sums of squares, merged in one order


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", "weight", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, row_tile, act, eps = int(p["dim"]), int(p["row_tile"]), str(p["act_dtype"]), float(p["eps"])
    full, tail = dim // b.WIDTH, dim % b.WIDTH
    quantizer = RowQuantizer(dim, spec) if act == "i8" else None
    if quantizer is None:
        words = b.ceil_div(dim, b.lanes_of(act))
        helpers = vector.helpers(target.mcpu, puts=((act, row_tile, 16), (act, row_tile, max(tail, 1))))
    else:
        helpers = vector.helpers(target.mcpu) + quantizer.helpers()
    packed = "int32" if quantizer is not None else b.word_dtype(act)
    kernel = b.Kernel(spec.symbol(), [("x", "float32"), ("weight", "float32"), ("out", packed)], helpers)
    with kernel as k:
        x, weight, out = k["x"], k["weight"], k["out"]
        rows = k.scalar(int(p["rows"]))
        tiles = b.let(T.truncdiv(rows + (row_tile - 1), row_tile))
        # Rows of a tile share output cache lines, which two cores would take from each other.
        with (
            k.share(tiles) as tile,
            T.serial(b.let(tile * row_tile), b.let(T.min((tile + 1) * row_tile, rows))) as row,
        ):
            sums = b.Vectors(_CHAINS)
            for chain in range(_CHAINS):
                sums[chain] = b.splat(0.0)

            def square(chain: int, index: b.Expr, count: int) -> None:
                v = b.load_vector(x, row * dim + index, count)
                sums[chain] = b.call("fma", v, v, sums[chain])

            with T.serial(full // _CHAINS) as step:
                for chain in range(_CHAINS):
                    square(chain, (step * _CHAINS + chain) * b.WIDTH, b.WIDTH)
            for piece in range(full // _CHAINS * _CHAINS, full):
                square(piece % _CHAINS, piece * b.WIDTH, b.WIDTH)
            if tail:
                square(full % _CHAINS, full * b.WIDTH, tail)
            low, high = b.call("add", sums[0], sums[1]), b.call("add", sums[2], sums[3])
            total = b.call("sum_lanes", b.call("add", low, high))
            mean = b.call("div", total, b.splat(float(dim)))
            scale = b.Vectors(1)
            scale[0] = b.call("div", b.splat(1.0), b.call("sqrt", b.call("add", mean, b.splat(eps))))
            if quantizer is None:
                base = b.packed_position(row, row_tile, words)
            else:
                quantizer.begin()

            def emit(index: b.Expr, count: int) -> None:
                v = b.call("mul", b.load_vector(x, row * dim + index, count), scale[0])
                v = b.call("mul", v, b.load_vector(weight, index, count))
                if quantizer is None:
                    b.put(out, v, base, index, act, row_tile, count)
                else:
                    quantizer.keep(v, index)

            with T.serial(full) as step:
                emit(step * b.WIDTH, b.WIDTH)
            if tail:
                emit(full * b.WIDTH, tail)
            if quantizer is not None:
                quantizer.write(out, row)
    return kernel.function()
