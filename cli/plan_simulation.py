"""Planning against the scheduler itself.

Which decode steps a trace makes depends on what runs together, on mixed steps and on the time that steps take; a replay
at a fixed pace only guesses it. So the trace runs through the simulation, a ladder is planned for the steps seen there
and tried in turn, beside the ladders made by rule; the cheapest in the simulation wins, whatever it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from llmc.buckets import planner
from llmc.buckets.bucket import Bucket, BucketLadder, area
from llmc.buckets.cost import CostModel, TokensCost
from llmc.buckets.demand import Demand, ServerModel
from llmc.buckets.step_cost import StepCosts
from llmc.buckets.trace import Trace
from llmc.runtime.simulation import SimulatedLoad

from .simulation import Ladder, Server, WhatIf, asked_tokens

# Of longer traces so many stretches of so many requests are tried; each begins with an idle server.
_STRETCHES, _STRETCH = 4, 1000
# Steps hardly depend on the ladder: another round is for those that do.
_ROUNDS, _GAIN = 3, 0.002


@dataclass(frozen=True)
class Tried:
    """A ladder in the simulation. cost: of all its steps, in the unit of the plan; interval: between which ends it
    lies, None when that is not known; padding: share of the computed tokens of the planned phases that no step asked
    for, 0 … 1."""

    name: str
    ladder: BucketLadder
    cost: float
    padding: float
    steps: int
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class SimulatedPlan:
    """The plan, what was tried, the plan first, and how many requests each trial served."""

    plan: planner.Plan
    tried: tuple[Tried, ...]
    requests: int


@dataclass(frozen=True)
class _Simulation:
    """The same stretches of a trace for every ladder. in_seconds: what steps cost; else tokens."""

    parts: tuple[WhatIf, ...]
    total: int
    in_seconds: bool
    phases: tuple[str, ...]

    @classmethod
    def of(
        cls,
        trace: Trace,
        server: ServerModel,
        costs: StepCosts,
        block_size: int,
        phases: tuple[str, ...],
        *,
        in_seconds: bool,
    ) -> _Simulation:
        engine = Server(
            server.max_model_len,
            server.max_num_seqs,
            block_size,
            prefix_cache=server.prefix_cache,
            max_prefill_tokens=server.max_prefill_tokens,
        )
        stretches = [trace]
        if len(trace) > _STRETCHES * _STRETCH:
            starts = np.linspace(0, len(trace) - _STRETCH, _STRETCHES).astype(int).tolist()
            stretches = [trace.part(start, start + _STRETCH) for start in starts]
        return cls(tuple(WhatIf(one, engine, costs) for one in stretches), len(trace), in_seconds, phases)

    @property
    def requests(self) -> int:
        return sum(len(part.trace) for part in self.parts)

    def run(self, name: str, ladder: BucketLadder) -> tuple[Tried, list[tuple[Bucket, SimulatedLoad]]]:
        """A trial, and the loads of every bucket in it."""
        buckets = tuple(ladder)
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # the engine runs outside of Python's lock
            parts = list(threads.map(lambda part: part.loads(Ladder(name, buckets)), self.parts))
        loads = [(buckets[load.graph], load) for part in parts for load in part]
        cost = asked = computed = low = high = 0.0
        costs = self.parts[0].costs
        for bucket, load in loads:
            ends = costs.factors(bucket.phase)
            low, high = low + load.ns / 1e9 * ends[0], high + load.ns / 1e9 * ends[1]
            tokens = load.replays * area(bucket, self.parts[0].server.block_size)
            cost += load.ns / 1e9 if self.in_seconds else tokens
            if bucket.phase in self.phases:
                computed += tokens
                asked += asked_tokens(bucket, load)
        steps = sum(load.replays for _, load in loads)
        interval = (low, high) if self.in_seconds and costs.bounds else None
        return Tried(name, ladder, cost, 1 - asked / computed if computed else 0.0, steps, interval), loads

    def demand(self, phase: str, loads: list[tuple[Bucket, SimulatedLoad]]) -> Demand | None:
        """Steps of a phase, as many as the whole trace makes; None when there was none."""
        mine = [load for bucket, load in loads if bucket.phase == phase]
        if not mine:
            return None
        longest = self.parts[0].server.max_model_len
        rows = [(load.num_seqs, min(load.length, longest), load.replays, load.asked) for load in mine]
        columns = np.array(rows, np.int64).T
        weight, asked = columns[2:] * (self.total / self.requests)
        return Demand(phase, columns[0], columns[1], weight, asked)


def plan(
    trace: Trace,
    server: ServerModel,
    limits: planner.Limits,
    costs: StepCosts,
    *,
    by_tokens: bool,
    block_size: int,
    phases: tuple[str, ...],
    resources: planner.Resources,
) -> SimulatedPlan:
    """The plan for the steps that the scheduler makes of the trace, never dearer there than the ladders beside it.

    Prefill of one prompt a step needs no simulation: every prompt is a step. costs: what steps take, for the plan and
    for the clock of the simulation; by_tokens: for the clock alone, tokens are what the plan saves. Raises BucketError.
    """
    cost: CostModel = TokensCost() if by_tokens else costs

    def planned(asked: Mapping[str, Demand]) -> planner.Plan:
        return planner.plan(
            trace, server, limits, cost, block_size=block_size, phases=phases, resources=resources, asked=asked
        )

    open_phases = tuple(phase for phase in phases if phase == "decode" or server.max_prefill_batch > 1)
    if not open_phases or server.max_model_len < 2:
        return SimulatedPlan(planned({}), (), 0)
    simulation = _Simulation.of(trace, server, costs, block_size, phases, in_seconds=not by_tokens)
    found: list[tuple[Tried, planner.Plan]] = []
    loads = simulation.run("", planner.complete({}, server, block_size))[1]
    while len(found) < _ROUNDS:
        asked = {phase: demand for phase in open_phases if (demand := simulation.demand(phase, loads)) is not None}
        one = planned(asked)
        if any(one.ladder == other.ladder for _, other in found):
            break
        tried, loads = simulation.run("planned", one.ladder)
        found.append((tried, one))
        if len(found) > 1 and tried.cost > (1 - _GAIN) * found[-2][0].cost:
            break
    least, best = min(found, key=lambda pair: pair[0].cost)
    by_rule = _by_rule(best, server, block_size)
    trials = {ladder: simulation.run(name, ladder)[0] for name, ladder in by_rule.items()}
    others = [replace(trials[ladder], name=name) for name, ladder in by_rule.items()]
    winner = min([least, *others], key=lambda one: one.cost)
    if winner is not least and limits.max_padding is None:
        best = replace(best, ladder=winner.ladder)
        least = replace(winner, name=f"planned, as {winner.name}")
    return SimulatedPlan(best, (least, *others), simulation.requests)


def _by_rule(planned: planner.Plan, server: ServerModel, block_size: int) -> dict[str, BucketLadder]:
    """The ladders that the plan is compared with, all planned phases by the same rule."""
    names = [other.name for other in planned.phases[0].others]
    return {
        name: planner.complete(
            {
                phase.phase: tuple(Bucket(phase.phase, *pair) for other in phase.others if other.name == name
                                   for pair in other.pairs)
                for phase in planned.phases
            },
            server,
            block_size,
        )
        for name in names
    }  # fmt: skip
