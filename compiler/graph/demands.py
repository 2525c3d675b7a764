"""What command lists need: weights in their stored form, and kernels with their row counts. Imports no tvm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from llmc.compiler.graph.commands import Command, CommandList, GraphShape
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.collective import is_collective
from llmc.compiler.ops.definition import NUM_SAMPLES, NUM_TOKENS
from llmc.compiler.ops.experts import EXPERT_LINEAR
from llmc.compiler.ops.latent import HEAD_LINEAR_KERNELS
from llmc.compiler.ops.normed import PREFIX as NORMED
from llmc.compiler.weight_request import WeightRequest
from llmc.graphs_format import COLLECTIVES, PASS_ON
from llmc.quantize import Recipe

_PACKED = ("linear", "normed_linear", EXPERT_LINEAR, *HEAD_LINEAR_KERNELS)
"""Kernels that read a matrix in the packed layout of linear layers."""


def weight_requests(
    shapes: Mapping[str, tuple[int, ...]], graphs: Iterable[CommandList], act_dtype: str, recipe: Recipe
) -> list[WeightRequest]:
    """The weights that commands read.

    Matrices of linear layers are packed, in the activation dtype or quantized; all other weights are f32.
    """
    used: dict[str, KernelSpec] = {}
    norms = set[str]()  # that layers read: without the layer's parts
    for commands in graphs:
        for command in commands.commands:
            if command.spec.op.startswith(NORMED):
                norms.add(command.operands[-2].name)
            for operand in command.operands:
                # A part of a quantized weight, such as its scales, is stored with that weight.
                if operand.kind == "weight" and operand.name in shapes:
                    used.setdefault(operand.name, command.spec)
                    if command.spec.op in _PACKED and operand.name not in norms:
                        used[operand.name] = command.spec
    requests = []
    for name, spec in used.items():
        shape, params = shapes[name], spec.as_dict()
        parts = int(params.get("experts", params.get("heads", 1))) * (2 if params.get("gated") else 1)
        parts = 1 if name in norms else parts
        if name in recipe.schemes:
            orders = int(params.get("experts", 1)) if name in recipe.permuted else 0
            format = recipe.schemes[name].weight
            requests.append(WeightRequest(name, shape, "u8", True, format, parts, orders))
            continue
        matrix, packed = len(shape) == 2 and spec.op in (*_PACKED, "embedding"), spec.op in _PACKED
        requests.append(WeightRequest(name, shape, act_dtype if matrix else "f32", matrix and packed, parts=parts))
    return requests


def kernels_of(graphs: Iterable[CommandList]) -> set[KernelSpec]:
    """Specs of all kernels that commands call, collectives excluded."""
    return {c.spec for graph in graphs for c in graph.commands if not is_collective(c.spec)}


def collectives_of(graphs: Iterable[CommandList]) -> list[KernelSpec]:
    """Collectives of the ranks, in order of first use."""
    return list(dict.fromkeys(c.spec for graph in graphs for c in graph.commands if is_collective(c.spec)))


def pooled_weights(graphs: Iterable[CommandList]) -> list[str]:
    """Names of pools of adapters, in order of first use."""
    found = (o.name for graph in graphs for c in graph.commands for o in c.operands if o.kind == "adapters")
    return list(dict.fromkeys(found))


def most_rows(graphs: Iterable[tuple[GraphShape, CommandList]]) -> dict[KernelSpec, int]:
    """The most token or sample rows that any graph calls each kernel with; kernels without rows are left out."""
    most: dict[KernelSpec, int] = {}
    for shape, commands in graphs:
        by_scalar = {NUM_TOKENS: shape.tokens, NUM_SAMPLES: shape.samples}
        for spec in kernels_of([commands]):
            rows = by_scalar.get(int(spec.as_dict().get("rows", -1)))
            if rows is not None:
                most[spec] = max(most.get(spec, 0), rows)
    return most


def of_stages(commands: CommandList) -> list[CommandList]:
    """The commands of each stage, without those that pass on its results."""
    stages: list[list[Command]] = [[]]
    for command in commands.commands:
        if command.spec.op != COLLECTIVES[PASS_ON]:
            stages[-1].append(command)
        elif stages[-1]:
            stages.append([])
    return [replace(commands, commands=tuple(stage)) for stage in stages if stage]
