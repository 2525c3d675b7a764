"""Planning: the cheapest ladder for a trace within limits on graphs, padding, memory and compile time.

trace ── demand.py, or a simulation: steps by (batch, seq) ──▶ candidates.py: a grid of sizes
      ── exact.py (one batch size) or grid.py (two dimensions) ──▶ ladder, lower bound, comparisons
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from .bucket import MAX_BUCKETS, REQUIRED_PHASES, Bucket, BucketError, BucketLadder
from .candidates import PhaseProblem
from .cost import CostModel, TokensCost
from .demand import Demand, ServerModel, demands
from .evidence import Blur, Evidence
from .fixed import FAMILIES
from .grid import lower_bound
from .held_out import TUNED, HeldOut, Learner, Rule
from .ladder import default_ladder
from .scoring import Outcome
from .solvers import Pairs, Solver, by_rule, cheapest, solver_of
from .trace import Trace

DEFAULT_MAX_GRAPHS = 24
_PADDING_MAX_GRAPHS = 128


@dataclass(frozen=True, slots=True)
class Resources:
    """The cost of a graph besides its replay. Defaults were measured on a 0.5 B model, CPU target.

    All graphs share one arena, sized for the largest bucket; each graph adds its commands. A compilation from an empty
    cache takes compile_once_s to start, trace the model and compile its kernels, and compile_graph_s per graph.
    """

    bytes_per_token: float = 23_300.0
    bytes_per_graph: int = 8_192
    compile_once_s: float = 19.0
    compile_graph_s: float = 0.2

    def compile_s(self, graphs: int) -> float:
        """Seconds to compile `graphs` graphs from an empty cache."""
        return self.compile_once_s + graphs * self.compile_graph_s


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a plan; None for no limit. max_graphs applies per phase, the others to all planned phases together.

    max_padding: percent of computed tokens; the plan uses the fewest graphs that satisfy it. max_memory: bytes of arena
    and graphs. max_compile_time: seconds for the whole ladder, from an empty cache.
    """

    max_graphs: int | None = None
    max_padding: float | None = None
    max_memory: int | None = None
    max_compile_time: float | None = None

    def __post_init__(self) -> None:
        if self.max_graphs is not None and not 1 <= self.max_graphs <= MAX_BUCKETS // 2:
            raise BucketError(f"max-graphs {self.max_graphs} is out of range: use 1 to {MAX_BUCKETS // 2}")
        if self.max_compile_time is not None and not 0 <= self.max_compile_time < math.inf:
            raise BucketError(f"max-compile-time {self.max_compile_time} is out of range: use seconds, 0 or more")
        if self.max_padding is not None and not 0 <= self.max_padding < 100:
            raise BucketError(f"max-padding {self.max_padding:g} % is out of range: use 0 or more and less than 100")


@dataclass(frozen=True, slots=True)
class LadderScore:
    """A ladder's score on the demand of one phase. padding: share of computed tokens that are padding, 0 … 1.

    held: share of steps that a single bucket holds. pairs: the buckets.
    """

    name: str
    graphs: int
    cost: float
    tokens: float
    padding: float
    held: float
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The planned buckets of one phase. lower_bound: no ladder with as many graphs costs less."""

    phase: str
    buckets: tuple[Bucket, ...]
    score: LadderScore
    lower_bound: float
    exact: bool
    others: tuple[LadderScore, ...]
    steps: float
    held_out: HeldOut | None = None

    @property
    def gap(self) -> float:
        """Bound on the relative distance of the cost from the optimum; 0 if exact."""
        return self.score.cost / self.lower_bound - 1 if self.lower_bound > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The complete ladder. Phases that were not planned have their default buckets.

    `mixed` is never planned, and gets only default buckets that need no larger arena than prefill.
    """

    ladder: BucketLadder
    phases: tuple[PhasePlan, ...]
    unit: str
    arena_bytes: float
    clipped: int


def plan(
    trace: Trace,
    server: ServerModel | None = None,
    limits: Limits | None = None,
    cost: CostModel | None = None,
    *,
    block_size: int = 32,
    phases: tuple[str, ...] = REQUIRED_PHASES,
    resources: Resources | None = None,
    evidence: Mapping[str, Evidence] | None = None,
) -> Plan:
    """Plans the ladder of `phases` for `trace` on `server`. Sizes are multiples of block_size, except the largest.

    evidence: demand of phases, if known better than from `demands`. The largest bucket of a phase holds everything the
    server admits: decode max_num_seqs × max_model_len, prefill one chunk. Raises BucketError if limits conflict, with
    the nearest value that does not.
    """
    server, limits = server or ServerModel(), limits or Limits()
    cost, resources = cost or TokensCost(), resources or Resources()
    if not 1 <= block_size <= server.max_model_len:
        raise BucketError(f"block-size {block_size} is out of range: use 1 to max-model-len, {server.max_model_len}")
    if not phases or any(phase not in REQUIRED_PHASES for phase in phases):
        raise BucketError(f"cannot plan the phases {', '.join(phases)}: use prefill, decode or both")
    server = _within_memory(server, limits, resources, block_size, phases)
    most = _most_graphs(server, limits, resources, phases, block_size)
    known = dict(evidence or {})
    replayed = demands(trace, server, tuple(phase for phase in phases if phase not in known))
    known |= {phase: Evidence.of(demand) for phase, demand in replayed.items()}
    planned = {phase: _plan_phase(known[phase], server, cost, most, limits, block_size) for phase in phases}
    ladder = complete({phase: one.buckets for phase, one in planned.items()}, server, block_size)
    return Plan(
        ladder=ladder,
        phases=tuple(planned[phase] for phase in REQUIRED_PHASES if phase in planned),
        unit=cost.unit,
        arena_bytes=max(bucket.max_tokens for bucket in ladder) * resources.bytes_per_token,
        clipped=int(np.count_nonzero(trace.prompt_tokens + trace.output_tokens > server.max_model_len)),
    )


def complete(planned: Mapping[str, tuple[Bucket, ...]], server: ServerModel, block_size: int) -> BucketLadder:
    """The planned phases with default buckets for the others; `mixed` gets those that need no larger arena than
    prefill."""
    default = default_ladder(server.max_num_seqs, server.max_model_len, block_size)
    prefill = planned.get("prefill", default.prefill)
    rows = max(bucket.max_tokens for bucket in prefill)
    mixed = tuple(bucket for bucket in default.mixed if bucket.max_tokens <= rows)
    return BucketLadder(prefill=prefill, decode=planned.get("decode", default.decode), mixed=mixed)


def _base(phase: str, server: ServerModel) -> Bucket:
    """The bucket that every plan of a phase includes."""
    if phase == "decode":
        return Bucket(phase, server.max_num_seqs, server.max_model_len)
    return Bucket(phase, 1, server.max_chunk)


def score(name: str, problem: PhaseProblem, buckets: Pairs) -> LadderScore:
    """Scores a ladder of any origin on the demand of one phase."""
    outcome: Outcome = problem.evaluate(buckets)
    return LadderScore(
        name=name,
        graphs=len(buckets),
        cost=outcome.cost,
        tokens=outcome.tokens,
        padding=1 - problem.demand.tokens / outcome.tokens,
        held=outcome.held,
        pairs=tuple(buckets),
    )


def _cheapest_tuned(problem: PhaseProblem, block_size: int, count: int) -> Pairs:
    return cheapest(problem, by_rule(problem, count, block_size, (TUNED,)))


def _plan_phase(
    evidence: Evidence, server: ServerModel, cost: CostModel, most: int, limits: Limits, block_size: int
) -> PhasePlan:
    def problem_of(demand: Demand) -> PhaseProblem:
        return PhaseProblem.of(demand, server, cost, block_size)

    learner = Learner(evidence, problem_of, server, most, block_size)
    demand = learner.blended()
    problem, held_out = problem_of(demand), learner.choose()
    way = Blur() if held_out is None else held_out.way
    if isinstance(way, Rule):
        solver: Solver = partial(_cheapest_tuned, learner.rule(way), block_size)
    else:
        solver = solver_of(learner.learned_from(demand, way) if way else problem, most, block_size, problem)
    if limits.max_padding is None:
        buckets = solver(most)
    else:
        buckets = _fewest(problem, solver, most, limits.max_padding, block_size)
    planned = score("planned", problem, buckets)
    # Optimal only among multiples of the block size; a ladder of other sizes may be better.
    exact = way == Blur() and len(problem.batches) == 1 and all(seq in problem.seqs for _, seq in buckets)
    bound = planned.cost
    if not exact:
        fixed = problem.scorer.step_cost
        bound = fixed + lower_bound(problem.for_bound, len(buckets) - 1, planned.cost - fixed)
    others = tuple(
        min(
            (
                score(family, problem, ladder)
                for count in {len(buckets), most}
                for ladder in by_rule(problem, count, block_size, (family,))
                if len(ladder) <= len(buckets)
            ),
            key=lambda other: other.cost,
        )
        for family in FAMILIES
    )
    phase = evidence.phase
    return PhasePlan(
        phase=phase,
        buckets=tuple(Bucket(phase, batch, seq, demand.total) for batch, seq in buckets),
        score=planned,
        lower_bound=bound,
        exact=exact,
        others=others,
        steps=evidence.steps,
        held_out=held_out,
    )


def _fewest(problem: PhaseProblem, solver: Solver, most: int, max_padding: float, block_size: int) -> Pairs:
    """The fewest graphs whose padding is within the limit: by the plan's cost, else by tokens alone."""
    by_tokens = problem.with_cost(TokensCost())
    alternatives = [solver]
    if not isinstance(problem.model, TokensCost):
        alternatives.append(solver_of(by_tokens, most, block_size))
    for candidate in alternatives:
        if _padding(problem, candidate(most)) * 100 > max_padding:
            continue
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if _padding(problem, candidate(middle)) * 100 <= max_padding:
                high = middle
            else:
                low = middle + 1
        return candidate(high)
    nearest = _padding(problem, alternatives[-1](most)) * 100
    raise BucketError(
        f"padding of at most {max_padding:g} % cannot be reached with {most} {problem.demand.phase} graphs: the best "
        f"ladder pads {_ceil(nearest):g} %; allow that, or more graphs, or a smaller block size"
    )


def _padding(problem: PhaseProblem, buckets: Pairs) -> float:
    return 1 - problem.demand.tokens / problem.evaluate(buckets).tokens


def _ceil(value: float) -> float:
    """Rounded up to two places, so that the value is feasible when passed back as a limit."""
    return math.ceil(round(value * 100, 6)) / 100


def _within_memory(
    server: ServerModel, limits: Limits, resources: Resources, block_size: int, phases: tuple[str, ...]
) -> ServerModel:
    """The server with prefill chunks that fit the memory limit."""
    if limits.max_memory is None:
        return server
    left = limits.max_memory - len(phases) * resources.bytes_per_graph
    rows = int(left / resources.bytes_per_token)
    needed = max(min(block_size, server.max_chunk), server.max_num_seqs)
    if rows < needed:
        least = needed * resources.bytes_per_token + len(phases) * resources.bytes_per_graph
        raise BucketError(
            f"max-memory of {limits.max_memory} bytes is too small: a step of {needed} tokens and one graph a phase "
            f"need {math.ceil(least)} bytes; allow that or lower max-num-seqs"
        )
    budget = server.max_prefill_tokens or server.max_model_len
    if rows >= budget:
        return server
    return replace(server, max_prefill_tokens=max(rows // block_size * block_size, min(rows, block_size)))


def _most_graphs(
    server: ServerModel, limits: Limits, resources: Resources, phases: tuple[str, ...], block_size: int
) -> int:
    """The number of graphs that each phase may have."""
    default = DEFAULT_MAX_GRAPHS if limits.max_padding is None else _PADDING_MAX_GRAPHS
    most = limits.max_graphs or default
    if limits.max_compile_time is not None:
        least = len(complete({phase: (_base(phase, server),) for phase in phases}, server, block_size))
        left = limits.max_compile_time - resources.compile_s(least - len(phases))
        # Absorb rounding that put a product just below an integer number of graphs.
        affordable = int(left / resources.compile_graph_s + 1e-9) // len(phases)
        if affordable < 1:
            raise BucketError(
                f"max-compile-time of {limits.max_compile_time:g} s is too short: from an empty cache, {least} graphs, "
                f"the fewest of this server, take about {_ceil(resources.compile_s(least)):g} s; allow that"
            )
        most = min(most, affordable)
    if limits.max_memory is not None:
        arena = max(server.max_prefill_tokens or server.max_model_len, server.max_num_seqs) * resources.bytes_per_token
        affordable = int((limits.max_memory - arena) / resources.bytes_per_graph) // len(phases)
        most = min(most, max(affordable, 1))
    return most
