"""linear and linear_quant: y = x · wᵀ (+ bias) (+ residual), with float or quantized weights.

Each output element has one chain of operations per group of numbers along K, ascending: fma, dot products, or exact
integers. Groups are merged by one ascending chain of fma: y = (Σ scale · Σ (number − zero) · x) · (scale of the row) +
bias + residual. K is walked in blocks. Sums are stored and reloaded between blocks, which keeps the chain; for AMX see
`micro.amx`. With an activation f, y = f(x · wᵀ + bias); a gated layer has a weight of two parts, gate and up, and
y = f(x · gateᵀ) · (x · upᵀ).
"""

from __future__ import annotations

from contextlib import nullcontext

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.ir import vector
from llmc.compiler.targets.cpu.kernels.linear import plan as plans
from llmc.compiler.targets.cpu.kernels.linear.blocked import GroupsOfPanels, PanelByPanel
from llmc.compiler.targets.cpu.kernels.linear.fetch import Fetches
from llmc.compiler.targets.cpu.kernels.linear.micro.amx import ROWS
from llmc.compiler.targets.cpu.kernels.linear.plan import Loops, Plan
from llmc.compiler.targets.cpu.kernels.linear.problem import Problem
from llmc.compiler.targets.cpu.kernels.linear.register_tiles import RegisterTiles
from llmc.compiler.targets.cpu.kernels.linear.schedule import Schedule
from llmc.compiler.targets.cpu.kernels.linear.spec import buffers, problem_of
from llmc.compiler.targets.cpu.kernels.linear.stream import StreamedBlocks, side_by_side
from llmc.compiler.targets.cpu.kernels.linear.sums import Sums
from llmc.compiler.targets.cpu.kernels.linear.vector_tiles import VectorTiles, merges_in_memory
from llmc.compiler.targets.cpu.target import Target

__all__ = ["buffers", "build", "default_schedule", "part"]


def build(spec: KernelSpec, target: Target, schedule: Schedule | None = None) -> tirx.PrimFunc:
    p = problem_of(spec, target)
    return _Linear(p, plans.plan(p, schedule)).function()


def part(spec: KernelSpec, target: Target, symbol: str, schedule: Schedule | None = None) -> tirx.PrimFunc:
    """The kernel as a function named `symbol`, which another kernel calls for a range of tasks (`builder.Kernel`).

    Its rows are some of a graph's, so they seldom fill whole row tiles.
    """
    p = problem_of(spec, target)
    return _Linear(p, plans.plan(p, schedule, uneven=True)).function(symbol)


def default_schedule(spec: KernelSpec, target: Target) -> Schedule | None:
    """The schedule that suits most machines of a target; None if tile registers leave no choice."""
    return plans.default_schedule(problem_of(spec, target))


class _Linear:
    def __init__(self, p: Problem, plan: Plan) -> None:
        self.p, self.plan = p, plan

    def function(self, part: str = "") -> tirx.PrimFunc:
        """part: symbol of the kernel as part of another kernel; empty: a kernel of its own."""
        p, plan = self.p, self.plan
        helpers = vector.helpers(p.target.mcpu, puts=p.activation.puts() if p.activation else ())
        helpers += plan.reader.helpers(p.target) + plan.micro.helpers()
        helpers += p.activation.helpers() if p.activation else ""
        helpers += plan.registers.helpers(p) if plan.registers else ""
        kernel = b.Kernel(part or p.spec.symbol(), p.buffer_dtypes(), helpers, ranged=bool(part))
        with kernel as k:
            self.k, self.num_rows = k, k.scalar(p.rows)
            plan.reader.bind(k)
            plan.micro.bind(k)
            self.fetches = Fetches(p, k, plan.reader, plan.ahead_bytes)
            self._memory()
            self._all_rows(b.let(T.truncdiv(self.num_rows + (p.tile - 1), p.tile)))
        return kernel.function()

    def _memory(self) -> None:
        """Reserves the stack memory that the loops share: unpacked blocks, sums, and rows in the form for tile
        registers."""
        p, plan = self.p, self.plan
        self.wide = self.registers = sums = registers = None
        blocks = (plan.chunk_tiles, plan.many) if plan.widens else None
        plan.micro.hold(plan.copied_tiles, plan.reader.middle, blocks)
        waits = plan.chunked and (max(plan.few.count, plan.many.count) > 1 or merges_in_memory(p, plan.many))
        if plan.registers and not p.quantized:
            registers = plan.registers(p, self.k["x"], plan.chunk_tiles)
        if p.quantized and plan.chunked and plan.many.unpacked:
            self.wide = b.Scratch(plan.many.lines * p.columns * plan.reader.units, plan.reader.dtype)
        if (p.quantized or registers) and (p.activated or waits):
            places = p.parts * (plan.side_by_side if p.activated else 1)
            tiles = plan.copied_tiles if p.paired else plan.chunk_tiles if plan.chunked else 1
            sums = Sums(places, tiles, p.tile, p.columns)
        elif plan.registers:
            sums = Sums(1, ROWS // p.tile, p.tile, p.columns)
        self.tiles = VectorTiles(p, self.k, self.num_rows, plan.reader, plan.micro, sums, self.wide)
        if plan.registers and sums:
            registers = registers or plan.registers(p, self.k["x"], plan.chunk_tiles)
            self.registers = RegisterTiles(
                registers, self.tiles, plan.many, sums, whole_chunk=bool(p.activated or waits)
            )

    def _all_rows(self, row_tiles: b.Expr) -> None:
        above = 0
        for most, loops in self.plan.loops:
            if most is None:
                condition = row_tiles > above if above else None
            else:
                condition = T.And(row_tiles > above, row_tiles <= most) if above else row_tiles == most
            with nullcontext() if condition is None else b.when(condition):
                self._loops(loops, row_tiles)
            above = most or 0

    def _loops(self, loops: Loops, row_tiles: b.Expr) -> None:
        p, plan = self.p, self.plan
        match loops:
            case Loops.SIDE_BY_SIDE:
                side_by_side(self.tiles, row_tiles, plan.side_by_side, self.fetches)
            case Loops.STREAMED_BLOCKS:
                StreamedBlocks(p, self.k, self.num_rows, plan, self.fetches).run(row_tiles)
            case Loops.PANELS_OF_FEW | Loops.PANELS:
                walk = plan.few if loops is Loops.PANELS_OF_FEW else plan.many
                PanelByPanel(self.tiles, plan, self.fetches, self.registers).run(row_tiles, walk)
            case Loops.GROUPS_OF_PANELS:
                GroupsOfPanels(self.k, self.num_rows, plan, self.fetches, self.wide).run(row_tiles)
