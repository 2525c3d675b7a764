"""expert_activate: f(gate) · up, f(up) without a gate, or a gate with a limit, of the rows of experts, as packed
activations in each expert's row tile."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.expert_index import ExpertIndex, row_tiles
from llmc.compiler.targets.cpu.kernels.ir import gates, vector
from llmc.compiler.targets.cpu.kernels.ir.activations import ACTIVATIONS
from llmc.compiler.targets.cpu.target import Target

_BLOCK = 256  # columns per unit of work, so that one row occupies several tasks


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("x", "chosen", "index", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    dim, act, top_k, experts = int(p["dim"]), str(p["act_dtype"]), int(p["top_k"]), int(p["experts"])
    words, blocks, tail = b.ceil_div(dim, b.lanes_of(act)), b.ceil_div(dim, _BLOCK), dim % b.WIDTH
    activation, tiles = str(p["activation"]), row_tiles(int(p["row_tile"]))
    puts = tuple((act, tile, n) for tile in tiles for n in (b.WIDTH, tail) if n)
    parts = 2 if p["gated"] else 1
    limit, gain = float(p.get("gate_limit", 0.0)), float(p.get("gate_gain", 1.0))
    helpers = vector.helpers(target.mcpu, puts=puts)
    helpers += gates.limited(limit, gain) if limit else ACTIVATIONS[activation]()
    dtypes = {"x": "float32", "out": b.word_dtype(act)}
    kernel = b.Kernel(spec.symbol(), [(name, dtypes.get(name, "int32")) for name in buffers(spec)], helpers)
    with kernel as k, k.share(b.let(k.scalar(int(p["rows"])) * (top_k * blocks))) as unit:
        index = ExpertIndex(k["index"], experts)
        pair, first = b.let(T.truncdiv(unit, blocks)), b.let(T.truncmod(unit, blocks) * _BLOCK)
        end = b.let(T.min(first + _BLOCK, dim))
        number = b.let(index[index.number_at(k["chosen"][T.truncdiv(pair, top_k) * top_k + pair])])
        start, of_expert = b.let(index[index.first_at(number)]), b.let(index[index.tile_at(number)])
        row = b.let(index[index.row_at(pair)])
        of_tile = b.let(T.truncmod(row - start, of_expert))
        base = b.let((row - of_tile) * words + of_tile)

        def emit(column: b.Expr, count: int, tile: int) -> None:
            at = b.let(row * (parts * dim) + column)
            first, *up = (b.load_vector(k["x"], at + part * dim, count) for part in range(parts))
            value = b.call("limited_gate", first, *up) if limit else b.call(activation, first)
            if up and not limit:
                value = b.call("mul", value, *up)
            b.put(k["out"], value, base, column, act, tile, count)

        for tile in tiles:
            with b.when(of_expert == tile):
                with T.serial(T.truncdiv(end - first, b.WIDTH)) as v:
                    emit(b.let(first + v * b.WIDTH), b.WIDTH, tile)
                if tail:
                    with b.when(end == dim):
                        emit(b.let(T.int32(dim - tail)), tail, tile)
    return kernel.function()
