"""Plans a ladder against the scheduler itself.

The decode steps of a trace depend on which requests run together, on mixed steps, and on the time of steps. A replay at
a fixed pace only guesses them. So the trace runs through the simulation in several scenarios, and a ladder is planned
for the steps seen there. That ladder is tried in the same way, beside ladders made by rule. The cheapest one wins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from llmc.buckets import planner
from llmc.buckets.bucket import Bucket, BucketLadder, area
from llmc.buckets.contexts import Contexts
from llmc.buckets.cost import CostModel, TokensCost
from llmc.buckets.demand import Demand, ServerModel, clip, demands
from llmc.buckets.evidence import Case, Evidence, scaled
from llmc.buckets.scenarios import OWN, Scenario
from llmc.buckets.step_cost import AssumedCost, StepCosts
from llmc.buckets.trace import Trace
from llmc.runtime.simulation.engine import SimulatedLoad
from llmc.runtime.simulation.forms import FormChoice, FormUse, in_totals, mixtures, with_one_total
from llmc.runtime.simulation.what_if import Ladder, Server, WhatIf, asked_tokens

# Longer traces are sampled: that many stretches of that many requests. Each begins with an idle server, and a backlog
# that grows all day needs a long one to show.
_STRETCHES, _STRETCH = 4, 5000
# Requests of each stretch in scenarios other than the own one, and for comparing ladders there.
_SIDE, _TRIAL = 500, 300
# The same for comparing ladders at the own pace.
_OWN_TRIAL = 1000
# With fewer requests, one half does not predict the other.
_LEAST_HELD_OUT = 400
# A phase with a smaller share of the steps, or with fewer steps, is chance.
_LEAST_SHARE, _LEAST_STEPS = 0.01, 1000

Loads = list[tuple[Bucket, SimulatedLoad]]


@dataclass(frozen=True)
class Tried:
    """A ladder in the simulation.

    cost: of all its steps in the own scenario, in the unit of the plan. interval: bounds of the cost, None if unknown.
    padding: share of the computed tokens of the planned phases that no step requested, 0 … 1. score: cost relative to
    the default ladder; weighted mean over all scenarios.
    """

    name: str
    ladder: BucketLadder
    cost: float
    padding: float
    steps: int
    score: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class SimulatedPlan:
    """The plan, the tried ladders (the plan first), and the number of requests each trial served in the own scenario.

    scenarios: those that the open phases, whose steps depend on them, were planned for. warnings: sentences on the
    limits of the plan. forms: of decode buckets, at the own pace, if decode was planned. decode: steps of the own
    scenario that decode was planned for, in the form of the planned buckets.
    """

    plan: planner.Plan
    tried: tuple[Tried, ...]
    requests: int
    scenarios: tuple[Scenario, ...] = (OWN,)
    open_phases: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    forms: FormChoice | None = None
    decode: Demand | None = None


@dataclass(frozen=True)
class _Simulation:
    """The same stretches of a trace for every ladder, by scenario: runs record steps, trials compare ladders.

    in_seconds: unit of cost, else tokens. held_out: whether the stretches are halves of the trace, or halves of each
    half.
    """

    runs: Mapping[Scenario, tuple[WhatIf, ...]]
    trials: Mapping[Scenario, tuple[WhatIf, ...]]
    total: int
    in_seconds: bool
    phases: tuple[str, ...]
    held_out: bool

    @classmethod
    def of(
        cls,
        trace: Trace,
        server: ServerModel,
        costs: StepCosts,
        block_size: int,
        phases: tuple[str, ...],
        scenarios: Sequence[Scenario],
        *,
        in_seconds: bool,
    ) -> _Simulation:
        longest = int(np.minimum(trace.prompt_tokens + np.maximum(trace.output_tokens, 1), server.max_model_len).max())
        # Without a prefix cache, blocks beyond those of the longest requests together bring nothing.
        blocks = -(-longest // block_size) * server.max_num_seqs + 2
        engine = Server(
            server.max_model_len,
            server.max_num_seqs,
            block_size,
            num_blocks=0 if server.prefix_cache else max(blocks, -(-server.max_model_len // block_size) + 1),
            prefix_cache=server.prefix_cache,
            max_prefill_tokens=server.max_prefill_tokens,
        )
        held_out = len(trace) >= _LEAST_HELD_OUT
        stretches = [trace]
        if len(trace) > _STRETCHES * _STRETCH:
            starts = np.linspace(0, len(trace) - _STRETCH, _STRETCHES).astype(int).tolist()
            stretches = [trace.part(start, start + _STRETCH) for start in starts]
        elif held_out:
            stretches = halves(trace)

        def costs_in(scenario: Scenario) -> StepCosts:
            if scenario.prefill == 1:
                return costs
            assumed = AssumedCost(server.prefill_tokens_per_s * scenario.prefill, server.decode_step_s)
            return StepCosts.of_model(assumed, "assumed")

        own, *others = scenarios
        runs = {own: tuple(WhatIf(part, engine, costs, speed=own.speed) for part in stretches)}
        trials = {own: tuple(WhatIf(part.first(_OWN_TRIAL), engine, costs, speed=own.speed) for part in stretches)}
        shorter = [part for half in stretches for part in _spread(half, _STRETCHES // len(stretches))]
        for one in others:
            known = costs_in(one)
            runs[one] = tuple(WhatIf(part, engine, known, speed=one.speed) for part in shorter)
            trials[one] = (WhatIf(stretches[0].first(_TRIAL), engine, known, speed=one.speed),)
        return cls(runs, trials, len(trace), in_seconds, phases, held_out)

    @property
    def own(self) -> Scenario:
        """The trace's own scenario, the first one."""
        return next(iter(self.runs))

    @property
    def requests(self) -> int:
        return sum(len(part.trace) for part in self.trials[self.own])

    def run(self, ladder: BucketLadder, runs: Mapping[Scenario, tuple[WhatIf, ...]]) -> dict[Scenario, list[Loads]]:
        """Loads of every bucket, by scenario and stretch."""
        jobs = [(scenario, part) for scenario, parts in runs.items() for part in parts]

        def one(job: tuple[Scenario, WhatIf]) -> Loads:
            scenario, part = job
            buckets = tuple(bucket for bucket in ladder if scenario.mixed or bucket.phase != "mixed")
            return [(buckets[load.graph], load) for load in part.loads(Ladder("", buckets))]

        with ThreadPoolExecutor(os.cpu_count()) as threads:  # the engine runs without Python's lock
            results = list(threads.map(one, jobs))
        found: dict[Scenario, list[Loads]] = {scenario: [] for scenario in runs}
        for (scenario, _), loads in zip(jobs, results, strict=True):
            found[scenario].append(loads)
        return found

    def cost(self, stretches: Sequence[Loads]) -> float:
        """Cost of all steps, in the unit of the plan."""
        return sum(
            load.ns / 1e9 if self.in_seconds else load.replays * area(bucket, self.block_size)
            for loads in stretches
            for bucket, load in loads
        )

    def tried(self, name: str, ladder: BucketLadder, reference: Mapping[Scenario, float]) -> Tried:
        """A trial. reference: cost of the reference ladder by scenario."""
        found = self.run(ladder, self.trials)
        own = [pair for loads in found[self.own] for pair in loads]
        planned = [(bucket, load) for bucket, load in own if bucket.phase in self.phases]
        computed = sum(load.replays * area(bucket, self.block_size) for bucket, load in planned)
        asked = sum(asked_tokens(bucket, load) for bucket, load in planned)
        shares = [
            (scenario.weight, self.cost(loads) / max(reference[scenario], 1e-30)) for scenario, loads in found.items()
        ]
        return Tried(
            name,
            ladder,
            self.cost(found[self.own]),
            1 - asked / computed if computed else 0.0,
            sum(load.replays for _, load in own),
            sum(weight * share for weight, share in shares) / sum(weight for weight, _ in shares),
            self._interval(own),
        )

    def _interval(self, loads: Loads) -> tuple[float, float] | None:
        """Bounds of the cost of own loads in seconds, if measurements give them."""
        costs = self.runs[self.own][0].costs
        if not self.in_seconds or not costs.bounds:
            return None
        ends = [(load.ns / 1e9, costs.factors(bucket.phase)) for bucket, load in loads]
        return sum(cost * factors[0] for cost, factors in ends), sum(cost * factors[1] for cost, factors in ends)

    def evidence(self, phase: str, found: Mapping[Scenario, list[Loads]]) -> Evidence | None:
        """Demand of a phase, scaled to the steps of the whole trace; None if there was none."""

        def scale(scenario: Scenario) -> float:
            return self.total / sum(len(part.trace) for part in self.runs[scenario])

        cases = tuple(
            Case(
                one.name,
                one.weight,
                tuple(self._demand(phase, loads, scale(one)) for loads in self._by_half(found[one])),
                one is self.own,
            )
            for one in self.runs
        )
        if all(case.demand() is None for case in cases):
            return None
        return Evidence(phase, cases, ((0,), (1,)) if self.held_out else ())

    def _by_half(self, stretches: list[Loads]) -> list[Loads]:
        """Loads of each half of the trace, or all of them if nothing is held out."""
        middle = len(stretches) // 2 if self.held_out else len(stretches)
        return [[pair for loads in some for pair in loads] for some in (stretches[:middle], stretches[middle:]) if some]

    def warnings(self, phase: str, found: Mapping[Scenario, list[Loads]]) -> list[str]:
        """Warning that a phase has too few steps in the own scenario."""
        steps = [(bucket.phase == phase, load.replays) for loads in found[self.own] for bucket, load in loads]
        mine, total = sum(count for is_mine, count in steps if is_mine), sum(count for _, count in steps)
        if mine >= _LEAST_STEPS and mine >= _LEAST_SHARE * total:
            return []
        rest = (
            "the other scenarios say more" if len(self.runs) > 1 else "plan for all scenarios, or give a longer trace"
        )
        return [
            f"at its own pace the trace makes {mine:,} {phase} steps, {mine / max(total, 1):.2%} of those simulated, "
            f"too few to plan by: {rest}"
        ]

    @property
    def block_size(self) -> int:
        return self.runs[self.own][0].server.block_size

    def _demand(self, phase: str, loads: Loads, scale: float) -> Demand | None:
        mine = [load for bucket, load in loads if bucket.phase == phase]
        if not mine:
            return None
        longest = self.runs[self.own][0].server.max_model_len
        total = any(bucket.total for bucket, _ in loads if bucket.phase == phase)
        rows = [
            (load.num_seqs, load.length, load.replays, load.contexts)
            if total
            else (load.num_seqs, min(load.length, longest), load.replays, load.num_seqs * load.longest)
            for load in mine
        ]
        columns = np.array(rows, np.int64).T
        weight, asked = columns[2:].astype(np.float64)
        return scaled(Demand(phase, columns[0], columns[1], weight, asked, total), scale)

    def own_demand(self, ladder: BucketLadder) -> Demand | None:
        """Demand of decode in the own scenario."""
        loads = self.run(ladder, {self.own: self.runs[self.own]})[self.own]
        return self._demand("decode", [pair for some in loads for pair in some], 1.0)

    def form_use(self, ladder: BucketLadder) -> FormUse:
        """Use of the ladder's decode buckets in the trials of the own scenario."""
        found = self.run(ladder, {self.own: self.trials[self.own]})[self.own]
        loads = [pair for some in found for pair in some]
        return FormUse.of(ladder, loads, self.block_size, in_seconds=self.in_seconds)


def halves(trace: Trace) -> list[Trace]:
    """The first half of the requests, and the second."""
    middle = len(trace) // 2
    return [trace.part(0, middle), trace.part(middle, len(trace))]


def _spread(trace: Trace, count: int) -> list[Trace]:
    """`count` stretches spread over a trace; all of it if the trace is not longer."""
    if len(trace) <= count * _SIDE:
        return [trace]
    starts = np.linspace(0, len(trace) - _SIDE, count).astype(int).tolist()
    return [trace.part(start, start + _SIDE) for start in starts]


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
    scenarios: tuple[Scenario, ...] = (OWN,),
    contexts: Contexts = Contexts.longest,
) -> SimulatedPlan:
    """Plans for the steps that the scheduler makes of the trace. The plan never costs more there than the ladders it is
    compared with.

    Prefill of one prompt a step needs no simulation: every prompt is a step. costs: of steps, for the plan and for the
    clock of the simulation. by_tokens: use costs only for the clock; the plan minimizes tokens. scenarios: those to
    plan for, the own one first. contexts: what decode buckets bound. Raises BucketError.
    """
    cost: CostModel = TokensCost() if by_tokens else costs

    def planned(evidence: Mapping[str, Evidence]) -> planner.Plan:
        return planner.plan(
            trace, server, limits, cost, block_size=block_size, phases=phases, resources=resources, evidence=evidence
        )

    evidence: dict[str, Evidence] = {}
    if "prefill" in phases and server.max_prefill_batch == 1:
        evidence["prefill"] = _prompts(trace, server)
    open_phases = tuple(phase for phase in phases if phase not in evidence)
    if not open_phases or server.max_model_len < 2:
        return SimulatedPlan(planned(evidence), (), 0)
    simulation = _Simulation.of(trace, server, costs, block_size, phases, scenarios, in_seconds=not by_tokens)
    default = planner.complete({}, server, block_size)
    whole = with_one_total(default, server, block_size)
    forms = None
    if "decode" in phases:
        of_decode = partial(
            planner.plan, trace, server, replace(limits, max_padding=None), cost, block_size=block_size,
            phases=("decode",), resources=resources,
        )  # fmt: skip
        forms = _forms(simulation, (default, whole), of_decode)
    suits = forms.suits if contexts is Contexts.auto and forms is not None else contexts
    # Steps of a ladder of both forms are planned for by the better form alone, beside which it is tried.
    use_totals = suits is Contexts.total or (
        suits is Contexts.both and forms is not None and forms.total.cost < forms.longest.cost
    )
    found = simulation.run(whole if use_totals else default, simulation.runs)
    warnings = []
    for phase in open_phases:
        seen = simulation.evidence(phase, found)
        if seen is not None:
            evidence[phase] = seen
            warnings += simulation.warnings(phase, found)
    best = planned(evidence)
    decode = _own(evidence.get("decode"))
    reference = {one: simulation.cost(loads) for one, loads in simulation.run(default, simulation.trials).items()}
    mine = simulation.tried("planned", best.ladder, reference)
    by_rule = _by_rule(best, server, block_size)
    trials = {ladder: simulation.tried(name, ladder, reference) for name, ladder in by_rule.items()}
    others = [replace(trials[ladder], name=name) for name, ladder in by_rule.items()]
    winner = min([mine, *others], key=lambda one: one.score)
    # Several scenarios: the plan was chosen by steps it had not seen, so a ladder that is cheaper here is so by chance.
    if winner is not mine and limits.max_padding is None and len(scenarios) == 1:
        best = replace(best, ladder=winner.ladder)
        mine = replace(winner, name=f"planned, as {winner.name}")
    if suits is Contexts.both and forms is not None and forms.decode:
        ladder = replace(best.ladder, decode=forms.decode)
        mixed = simulation.tried("planned, both forms", ladder, reference)
        if contexts is Contexts.both or mixed.score < mine.score:
            best, mine, others = replace(best, ladder=ladder), mixed, [mine, *others]
    return SimulatedPlan(
        best, (mine, *others), simulation.requests, tuple(scenarios), open_phases, tuple(warnings), forms, decode
    )


def _forms(
    simulation: _Simulation, ladders: tuple[BucketLadder, BucketLadder], planned: Callable[..., planner.Plan]
) -> FormChoice | None:
    """Both forms of decode buckets, planned for the steps of the own scenario and tried on them. ladders: one of each
    form, used to record the steps. None if nothing decodes."""
    made = []
    for ladder in ladders:
        demand = simulation.own_demand(ladder)
        if demand is None:
            return None
        decode = planned(evidence={"decode": Evidence.of(demand)}).ladder.decode
        made.append(replace(ladder, decode=decode))
    longest, total = made
    # Totals have more sizes to choose from, so that their search may miss what that of the other form finds.
    totals = [simulation.form_use(one) for one in (total, in_totals(longest, simulation.block_size))]
    mixed = [(simulation.form_use(one), one.decode) for one in mixtures(longest, total)]
    both, decode = min(mixed, key=lambda one: one[0].cost, default=(None, ()))
    return FormChoice(simulation.form_use(longest), min(totals, key=lambda use: use.cost), both, decode)


def _own(evidence: Evidence | None) -> Demand | None:
    """Demand of the own scenario."""
    cases = () if evidence is None else evidence.cases
    return next((demand for case in cases if case.own and (demand := case.demand()) is not None), None)


def _prompts(trace: Trace, server: ServerModel) -> Evidence:
    """Demand of prefill with one prompt per step, by halves of the trace if it has enough requests."""
    if len(trace) < _LEAST_HELD_OUT:
        return Evidence.of(demands(trace, server, ("prefill",))["prefill"])
    # Cache hits are computed on the whole trace: a half alone would miss those from the other half.
    computed, server = replace(trace, prompt_tokens=clip(trace, server)[0]), replace(server, prefix_cache=False)
    parts = tuple(demands(half, server, ("prefill",))["prefill"] for half in halves(computed))
    return Evidence("prefill", (Case(OWN.name, OWN.weight, parts, own=True),), ((0,), (1,)))


def _by_rule(planned: planner.Plan, server: ServerModel, block_size: int) -> dict[str, BucketLadder]:
    """Ladders that the plan is compared with; each makes all planned phases by the same rule."""
    names = [other.name for other in planned.phases[0].others]
    return {
        name: planner.complete(
            {
                phase.phase: tuple(Bucket(phase.phase, *pair, phase.buckets[0].total) for other in phase.others
                                   if other.name == name for pair in other.pairs)
                for phase in planned.phases
            },
            server,
            block_size,
        )
        for name in names
    }  # fmt: skip
