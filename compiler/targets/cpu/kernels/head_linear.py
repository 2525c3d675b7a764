"""head_linear: a linear layer per head. Each head's matrix is in panels, like those of other linear layers.

Each element is one chain of float32 multiply-adds over ascending K, for any number of rows.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import vector
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", "weight", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    heads, columns, inner, stride = int(p["heads"]), int(p["n"]), int(p["k"]), int(p["stride"])
    dtype, gives, tile, panel = str(p["weight_dtype"]), str(p["gives"]), int(p["row_tile"]), target.panel_columns
    lanes, of_head = b.lanes_of(dtype), columns // heads
    if columns % heads or inner > stride or inner % lanes or (gives and of_head % b.lanes_of(gives)):
        raise KernelSpecError(f"head_linear: heads, n, k or stride do not fit: {p}")
    panels, words, vectors = b.ceil_div(of_head, panel), inner // lanes, panel // b.WIDTH
    # The last panel of a head has only this many real columns.
    counts = [min(b.WIDTH, of_head - (panels - 1) * panel - v * b.WIDTH) for v in range(vectors)]
    puts = tuple((gives, tile, count) for count in {b.WIDTH, *counts} if count > 0) if gives else ()
    types = [("x", "float32"), ("weight", b.word_dtype(dtype)), ("out", b.word_dtype(gives or "f32"))]
    out_words = b.ceil_div(columns, b.lanes_of(gives or "f32"))
    kernel = b.Kernel(spec.symbol(), types, vector.helpers(target.mcpu, puts=puts))
    with kernel as k:
        rows = k.scalar(int(p["rows"]))
        tiles = b.let(T.truncdiv(rows + (tile - 1), tile))
        with k.share(T.int32(heads * panels)) as unit:
            head, number = b.let(T.truncdiv(unit, panels)), b.let(T.truncmod(unit, panels))
            first = b.let(unit * (words * panel))
            column = b.let(head * of_head + number * panel)

            def write(row: b.Expr, acc: list[b.Expr], counts: list[int]) -> None:
                base = b.packed_position(row, tile, out_words) if gives else row * columns
                base = b.let(base)
                for v, count in enumerate(counts):
                    if count <= 0:
                        continue
                    if gives:
                        b.put(k["out"], acc[v], base, column + v * b.WIDTH, gives, tile, count)
                    else:
                        b.store_vector(k["out"], acc[v], base + column + v * b.WIDTH, count)

            # Rows past the last valid one fill its tile; buffers have room for them.
            with T.serial(tiles) as at:
                row0 = b.let(at * tile)
                source = b.let(row0 * (heads * stride) + head * stride)
                acc = b.Vectors(tile * vectors)
                for i in range(tile * vectors):
                    acc[i] = b.splat(0.0)
                with T.serial(words) as word:
                    place = first + word * panel
                    raw = [k["weight"][T.ramp(place + v * b.WIDTH, 1, b.WIDTH)] for v in range(vectors)]
                    for half in range(lanes):
                        values = b.Vectors(vectors)
                        for v in range(vectors):
                            values[v] = raw[v] if lanes == 1 else b.halves_of(dtype, raw[v], half)
                        for i in range(tile):
                            x = b.splat(k["x"][source + (i * heads * stride + word * lanes + half)])
                            for v in range(vectors):
                                acc[i * vectors + v] = b.call("fma", x, values[v], acc[i * vectors + v])
                for i in range(tile):
                    row, made = b.let(row0 + i), [acc[i * vectors + v] for v in range(vectors)]
                    if counts == [b.WIDTH] * vectors:
                        write(row, made, counts)
                        continue
                    with T.If(number < panels - 1):
                        with T.Then():
                            write(row, made, [b.WIDTH] * vectors)
                        with T.Else():
                            write(row, made, counts)
    return kernel.function()
