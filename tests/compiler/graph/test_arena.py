"""The plan of the arena is TVM's, of any line of calls."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import tvm
from tvm import relax, tirx

from llmc.compiler.graph.arena import ArenaPlan
from llmc.compiler.graph.commands import Site
from llmc.compiler.graph.emit import plan_line
from llmc.compiler.graph.line import read_line
from llmc.compiler.graph.lowered import SITE_PREFIX, Lowered
from llmc.compiler.graph.passes import bind_bucket
from llmc.graphs_format import INPUTS

DTYPES = ("float32", "bfloat16", "int32")


def line_of_calls(seed: int, count: int) -> Lowered:
    """Each call reads two of what was made before, mostly lately."""
    rng = random.Random(seed)
    tokens, samples = tirx.Var("tokens", "int64"), tirx.Var("samples", "int64")
    rows = {"input_ids": tokens, "sample_index": samples}
    params = [relax.Var(name, relax.TensorType((rows.get(name, 4), 8), "float32")) for name in INPUTS]
    builder, values = relax.BlockBuilder(), list(params)
    with builder.function("main", params):
        with builder.dataflow():
            for number in range(count):
                reads = [values[-1], rng.choice(values[-rng.choice((2, 4, 16)) :])]
                width = rng.choice((1, 2, 3, 8, 24, 200, 5000))
                made = relax.TensorType((rng.choice((tokens, tokens, samples, 7)), width), rng.choice(DTYPES))
                values.append(builder.emit(relax.call_dps_packed(f"{SITE_PREFIX}{number}", reads, made)))
            output = builder.emit_output(values[-1])
        builder.emit_func_output(output)
    return Lowered(builder.get(), (Site("gather_rows", {}, ("x", "index")),) * count, INPUTS)


def plan_of_tvm(module: tvm.IRModule) -> tuple[tuple[int, ...], list[int]]:
    """Bytes of each storage, and the storage of each planned tensor in order."""
    storages: dict[Any, int] = {}
    sizes: list[int] = []
    places: list[int] = []
    for block in module["main"].body.blocks:
        for binding in block.bindings:
            call = binding.value
            op = str(call.op.name) if isinstance(call, relax.Call) and isinstance(call.op, tvm.ir.Op) else ""
            if op == "relax.memory.alloc_storage":
                storages[binding.var] = len(sizes)
                sizes.append(int(call.args[0].values[0]))
            elif op == "relax.memory.alloc_tensor":
                places.append(storages[call.args[0]])
    return tuple(sizes), places


@pytest.mark.parametrize("seed", range(12))
def test_places_are_those_of_tvm(seed: int) -> None:
    lowered = line_of_calls(seed, 60)
    line = read_line(lowered)
    for tokens, samples in ((16, 1), (1, 1), (2048, 8), (256, 256)):
        graph: Any = SimpleNamespace(shape=SimpleNamespace(tokens=tokens, samples=samples))
        plan = plan_line(line, graph)
        in_order = [plan.places[step.out] for step in line.steps if step.out in plan.places]
        assert (plan.sizes, in_order) == plan_of_tvm(bind_bucket(lowered.module, tokens, samples))
        assert len(plan.sizes) < len(in_order)
    assert isinstance(plan, ArenaPlan)
