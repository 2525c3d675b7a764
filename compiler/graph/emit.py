"""Line of calls → command list: kernels, operands and arena offsets of one bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate

from llmc.compiler.adapters import pool_name
from llmc.compiler.config import CompileError
from llmc.compiler.graph.arena import ArenaPlan, plan_arena
from llmc.compiler.graph.commands import Command, CommandList, Operand, Site, round_up
from llmc.compiler.graph.cuts import cuts_of, width_of
from llmc.compiler.graph.ir_spec import verify_calls, verify_operand
from llmc.compiler.graph.line import SAMPLES, TOKENS, Line, Step
from llmc.compiler.graph.lowered import Lowered
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.adapters import pool_of, slot_of
from llmc.compiler.ops.collective import pass_on
from llmc.compiler.ops.definition import NUM_SAMPLES, NUM_TOKENS, BufferSource, GraphParams, KernelCall
from llmc.compiler.ops.fused import fused_spec
from llmc.compiler.ops.registry import get_op
from llmc.compiler.weight_request import kv_scales_name
from llmc.graphs_format import ADAPTER_TILES, ALIGNMENT, GRAPH_INPUTS, MAX_BUFFERS, SAMPLE_INDEX


def plan_line(line: Line, graph: GraphParams) -> ArenaPlan:
    """Places in the arena for all results but the last, which is the output."""
    rows = _rows(graph)
    sizes = {}
    for step in line.steps:
        if step.out != line.output:
            value = line.values[step.out]
            sizes[step.out] = (value.elements(rows) * round_up(value.bits, 8) // 8, value.dtype)
    return plan_arena([(step.reads, step.out) for step in line.steps], line.uses, sizes)


def emit(line: Line, lowered: Lowered, graph: GraphParams, first_layers: Sequence[int] = ()) -> CommandList:
    """The commands of one bucket. Raises CompileError on a line that cannot become a command list.

    first_layers: of each stage but the first.
    """
    plan = plan_line(line, graph)
    starts = list(accumulate((round_up(size, ALIGNMENT) for size in plan.sizes), initial=0))
    # Behind the planned values: scratch that the commands of one site pass on, shared by all sites.
    emitter = _Emitter(line, lowered, graph, {out: starts[place] for out, place in plan.places.items()}, starts[-1])
    cuts = {cut.step: (stage, cut.passed) for stage, cut in enumerate(cuts_of(line, lowered.params, first_layers))}
    commands: list[Command] = []
    for index, step in enumerate(line.steps):
        if index in cuts:
            commands += emitter.passes(*cuts[index])
        commands += emitter.commands(step)
    if first_layers:
        commands += emitter.passes(len(first_layers), [line.output])
    if not commands or commands[-1].operands[-1].kind != "output":
        raise CompileError("the graph's last command does not write its output")
    _check_weights(commands)
    scratch = max(emitter.scratch(kind)[1] for kind in set(line.kinds))
    return CommandList(tuple(commands), starts[-1] + round_up(scratch, ALIGNMENT))


def _rows(graph: GraphParams) -> dict[str, int]:
    return {TOKENS: graph.shape.tokens, SAMPLES: graph.shape.samples}


class _Emitter:
    """Emits commands. Layers repeat, so an op's properties are computed once per kind of site."""

    def __init__(
        self, line: Line, lowered: Lowered, graph: GraphParams, offsets: Mapping[int, int], scratch: int
    ) -> None:
        self._line, self._sites, self._graph, self._scratch = line, lowered.sites, graph, scratch
        self._checked: set[tuple[int, tuple[str, ...]]] = set()
        self.scratch = cache(self._scratch_of)
        self._kernels = cache(self._kernels_of)
        self._fused = cache(self._fused_of)
        rows = _rows(graph)
        self._values = [Operand("input" if name in GRAPH_INPUTS else "weight", name) for name in lowered.params]
        for number, value in enumerate(line.values[line.num_params :], line.num_params):
            nbytes = value.elements(rows) * (value.bits // 8)
            kind, offset = ("output", 0) if number == line.output else ("arena", offsets.get(number, 0))
            self._values.append(Operand(kind, offset=offset, nbytes=nbytes))

    def commands(self, step: Step) -> list[Command]:
        operands = tuple(self._values[number] for number in (*step.reads, step.out))
        if step.site is None:
            if len(operands) > MAX_BUFFERS:
                raise CompileError(f"{step.name} has {len(operands)} tensors, at most {MAX_BUFFERS} fit a kernel")
            packed, values = self._line.packed, zip((*step.reads, step.out), operands, strict=True)
            layouts = tuple("packed" if number in packed else operand.kind for number, operand in values)
            return [Command(self._fused(step.name, step.program, layouts), operands, -1)]
        site, kind = self._sites[step.site], self._line.kinds[step.site]
        self._check(site, kind, step)
        tensors = dict(zip((*site.tensors, "out"), operands, strict=True))
        return [
            Command(
                call.spec,
                tuple(self._operand(source, site, kind, tensors) for source in call.buffers),
                site.layer,
                call.barrier,
            )
            for call in self._kernels(kind)
        ]

    def passes(self, stage: int, numbers: Sequence[int]) -> list[Command]:
        """Hands values of a stage to the next one, where they have the same place."""
        scalars = {TOKENS: NUM_TOKENS, SAMPLES: NUM_SAMPLES}
        made = []
        for number in numbers:
            rows = scalars[str(self._line.values[number].dims[0])]
            made.append(Command(pass_on(stage, rows, width_of(self._line, number)), (self._values[number],), -1))
        return made

    def _scratch_of(self, kind: int) -> tuple[dict[str, tuple[int, int]], int]:
        site = self._sites[kind]
        return get_op(site.op).scratch(site, self._graph)

    def _kernels_of(self, kind: int) -> list[KernelCall]:
        site = self._sites[kind]
        op = get_op(site.op)
        calls = op.kernels(site, self._graph)
        verify_calls(op, {call.spec.op for call in calls})
        return calls

    def _fused_of(self, name: str, program: str, layouts: tuple[str, ...]) -> KernelSpec:
        return fused_spec(name, program, layouts, self._graph)

    def _check(self, site: Site, kind: int, step: Step) -> None:
        dtypes = tuple(self._line.values[number].dtype for number in (*step.reads, step.out))
        if (kind, dtypes) not in self._checked:
            for name, dtype in zip((*site.tensors, "out"), dtypes, strict=True):
                verify_operand(site, name, dtype, self._graph.act_dtype)
            self._checked.add((kind, dtypes))

    def _operand(self, source: str, site: Site, kind: int, tensors: Mapping[str, Operand]) -> Operand:
        if source in tensors:
            return tensors[source]
        match source:
            case BufferSource.K_POOL:
                return Operand("k_pool", layer=site.layer)
            case BufferSource.V_POOL:
                return Operand("v_pool", layer=site.layer)
            case BufferSource.KV_SCALES:
                return Operand("weight", kv_scales_name(site.layer))
            case BufferSource.SAMPLE_INDEX:
                return Operand("input", SAMPLE_INDEX)
            case BufferSource.ADAPTER_TILES:
                return Operand("input", ADAPTER_TILES)
            case BufferSource.ADAPTER_POOL:
                return self._pool(site, "weight", tensors)
            case BufferSource.STATES:
                return Operand("states", nbytes=4 * self._graph.shape.tokens * _states_width(site))
            case BufferSource.SCRATCH:
                nbytes = get_op(site.op).scratch_bytes(site, self._graph)
                return Operand("arena", offset=self._scratch, nbytes=nbytes)
        parts, _ = self.scratch(kind)
        if source in parts:
            offset, nbytes = parts[source]
            return Operand("arena", offset=self._scratch + offset, nbytes=nbytes)
        tensor, _, plane = source.partition(".")
        if tensor == BufferSource.ADAPTER_POOL:
            return self._pool(site, plane, tensors)
        return Operand("weight", f"{tensors[tensor].name}.{plane}")

    def _pool(self, site: Site, weight: str, tensors: Mapping[str, Operand]) -> Operand:
        name = pool_name(tensors[weight].name, table=bool(pool_of(site, weight).get("table")))
        return Operand("adapters", name, nbytes=slot_of(site, self._graph, weight).bytes)


def _states_width(site: Site) -> int:
    """Numbers in a row of the states buffer: an op states them, or has a tensor as wide."""
    widths = site.attributes["widths"]
    return int(site.attributes["width"] if "width" in site.attributes else widths.get("states", widths.get("x")))


def _check_weights(commands: list[Command]) -> None:
    """Raises CompileError if generic ops and llmc ops read one weight: packing leaves no plain rows."""
    readers: dict[str, set[bool]] = {}
    for command in commands:
        for operand in command.operands:
            if operand.kind == "weight":
                readers.setdefault(operand.name, set()).add(command.spec.op == "fused")
    for name, kinds in readers.items():
        if len(kinds) > 1:
            raise CompileError(f"weight {name} is read by generic ops and by llmc ops; give each a weight of its own")
