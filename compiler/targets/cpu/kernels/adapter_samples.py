"""adapter_samples: makes tiles of sampled rows of tiles of tokens, in one task: a step has few tiles."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.target import Target


def buffers(spec: KernelSpec) -> tuple[str, ...]:
    return ("tiles", "index", "out")


def build(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    p = spec.as_dict()
    size, most = int(p["tile_rows"]), int(p["samples"])
    kernel = b.Kernel.of(spec.symbol(), [(name, "int32") for name in buffers(spec)], target)
    with kernel as k, b.when(k.task == 0):
        samples = k.scalar(int(p["rows"]))
        made, rows, place = (T.alloc_buffer((1,), "int32", scope="local") for _ in range(3))
        b.store(made, T.int32(0), 0)
        with T.serial(b.let(k["tiles"][0])) as tile:
            source, to = b.let(tile * (2 + size) + 1), b.let(made[0] * (2 + size) + 1)
            b.store(rows, T.int32(0), 0)
            with T.serial(b.let(k["tiles"][source + 1])) as i:
                row = b.let(k["tiles"][source + 2 + i])
                _find(k, row, samples, most, place)
                with b.when(place[0] < samples), b.when(k["index"][place[0]] == row):
                    # The last row fills the rest of the tile.
                    with T.serial(b.let(rows[0]), size) as filled:
                        b.store(k["out"], place[0], to + 2 + filled)
                    b.store(rows, rows[0] + 1, 0)
            with b.when(rows[0] > 0):
                b.store(k["out"], k["tiles"][source], to)
                b.store(k["out"], rows[0], to + 1)
                b.store(made, made[0] + 1, 0)
        b.store(k["out"], made[0], 0)
    return kernel.function()


def _find(k: b.Kernel, row: b.Expr, samples: b.Expr, most: int, place: b.Expr) -> None:
    """Puts the last sample whose row is not behind `row` in `place`; the first one if all are."""
    b.store(place, T.int32(0), 0)
    for reach in (1 << i for i in reversed(range(most.bit_length()))):
        further = b.let(place[0] + reach)
        with b.when(further < samples), b.when(k["index"][further] <= row):
            b.store(place, further, 0)
