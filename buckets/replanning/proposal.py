"""Proposes buckets to add and to retire, with predicted savings and costs. A pure function of plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llmc.buckets.bucket import Bucket, BucketError

from .candidates import candidates
from .costs import StepTimes, learn
from .search import Choices, SearchBudget, search
from .shapes import Limits, ShapeUse, StepShape

MAX_SHAPES = 384
"""Only the most frequent shapes, up to this number, are planned for."""
Unit = Literal["time", "tokens"]
UNITS: tuple[Unit, ...] = ("time", "tokens")


@dataclass(frozen=True, slots=True)
class Ladder:
    """The present ladder.

    on: buckets that steps may use. off: compiled, but not in use. padding: "skipped" or "computed". arena_bytes,
    command_bytes: of a graph, by bucket.
    """

    on: tuple[Bucket, ...]
    limits: Limits
    off: tuple[Bucket, ...] = ()
    padding: str = "skipped"
    arena_bytes: Mapping[Bucket, int] = field(default_factory=dict)
    command_bytes: Mapping[Bucket, int] = field(default_factory=dict)
    tiles: Mapping[Bucket, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits of a proposal, and when it pays.

    unit: the quantity to reduce. max_graphs: buckets on afterwards. max_added: new buckets per proposal. max_compile_s,
    max_bytes: compile time and memory of the new buckets. least_share: share of all cost that each bucket must save.
    payback_s: time within which savings must repay compilation, if the unit is time. once_s, graph_s: compile seconds,
    once and per bucket. least_steps: minimum number of steps for any proposal.
    """

    unit: Unit = "time"
    max_graphs: int = 4096
    max_added: int = 4
    max_compile_s: float = 600.0
    max_bytes: int = 1 << 30
    least_share: float = 0.01
    payback_s: float = 3600.0
    once_s: float = 19.0
    graph_s: float = 0.2
    least_steps: float = 200.0

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise BucketError(f"unit {self.unit!r} is unknown: use {' or '.join(UNITS)}")
        for name in ("max_graphs", "max_added", "payback_s"):
            if getattr(self, name) <= 0:
                raise BucketError(f"{name} {getattr(self, name)} is out of range: use more than 0")
        for name in ("max_compile_s", "max_bytes", "least_share", "once_s", "graph_s", "least_steps"):
            if getattr(self, name) < 0:
                raise BucketError(f"{name} {getattr(self, name)} is negative: use 0 or more")


@dataclass(frozen=True, slots=True)
class Change:
    """One bucket to add or retire.

    steps: number of steps that change their bucket. saved_s, saved_tokens: seconds and padding tokens saved by a mean
    step of those; None if no times are known.
    compile_s, bytes: its cost. compiled: it exists already and is only off.
    """

    bucket: Bucket
    action: Literal["add", "retire"]
    steps: float
    saved_s: float | None
    saved_tokens: float
    compile_s: float = 0.0
    bytes: int = 0
    compiled: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "bucket": str(self.bucket), "action": self.action, "steps": round(self.steps, 1),
            "saved_s_per_step": self.saved_s, "saved_tokens_per_step": self.saved_tokens,
            "compile_s": self.compile_s, "bytes": self.bytes, "compiled": self.compiled,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Proposal:
    """changes: empty if nothing pays; `why` then says so. seconds_*, padding_*: of all steps, now and afterwards;
    seconds are None if no times are known. source: what times were learned from."""

    changes: tuple[Change, ...]
    why: str
    steps: float
    observed_s: float
    unit: Unit
    source: str
    padding_now: float
    padding_then: float
    seconds_now: float | None
    seconds_then: float | None
    compile_s: float = 0.0
    shapes: int = 0
    graphs: int = 0
    before: tuple[Bucket, ...] = ()
    """The buckets that are on now."""

    @property
    def added(self) -> tuple[Bucket, ...]:
        return tuple(change.bucket for change in self.changes if change.action == "add")

    @property
    def retired(self) -> tuple[Bucket, ...]:
        return tuple(change.bucket for change in self.changes if change.action == "retire")

    @property
    def saving(self) -> float:
        """Share of all cost that is saved, 0 … 1."""
        now, then = (
            (self.padding_now, self.padding_then)
            if self.unit == "tokens" or self.seconds_now is None or self.seconds_then is None
            else (self.seconds_now, self.seconds_then)
        )
        return (now - then) / now if now > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        fields = ("why", "steps", "observed_s", "unit", "source", "padding_now", "padding_then", "seconds_now",
                  "seconds_then", "saving", "compile_s", "shapes", "graphs")  # fmt: skip
        return {"changes": [change.as_dict() for change in self.changes], **{n: getattr(self, n) for n in fields}}

    def line(self) -> str:
        """One sentence for a log."""
        if not self.changes:
            return f"nothing to change: {self.why}"
        what = [
            f"{word} {', '.join(map(str, buckets))}"
            for word, buckets in (("add", self.added), ("retire", self.retired))
            if buckets
        ]
        kind = "padding" if self.unit == "tokens" else "step time"
        return f"{' and '.join(what)}: {self.saving:.1%} less {kind} over {self.steps:,.0f} steps, {self.why}"


def propose(
    uses: Sequence[ShapeUse], ladder: Ladder, policy: Policy, *, times: StepTimes | None = None,
    observed_s: float = 0.0, blocked: Sequence[Bucket] = (), keep: Sequence[Bucket] = (),
) -> Proposal:  # fmt: skip
    """Proposes changes for these steps. times: None learns them from the steps. blocked: never added. keep: never
    retired. Deterministic.

    Decode buckets for a total of contexts are proposed where they may pay (`totals_pay`) or the ladder has some.
    """
    totals = totals_pay(ladder, policy.unit)
    uses = planned_uses(uses, ladder, policy.unit)
    steps = sum(use.steps for use in uses)
    times = times or learn(_most(uses), None, ladder.limits, padding=ladder.padding, tiles=ladder.tiles)
    plan = _Plan(ladder, policy, _most(uses), times, observed_s, totals=totals)
    if steps < policy.least_steps:
        return plan.nothing(f"{steps:,.0f} steps are too few to plan for, {policy.least_steps:,.0f} are needed", steps)
    if policy.unit == "time" and times is None:
        return plan.nothing("no step has been measured", steps)
    return plan.found(steps, blocked, keep)


def totals_pay(ladder: Ladder, unit: Unit) -> bool:
    """Whether totals of contexts matter: the ladder has buckets for them, or its padding costs something.

    Where padding is skipped, a step takes the same time in a bucket of either form.
    """
    there = any(bucket.total for bucket in (*ladder.on, *ladder.off))
    return there or unit == "tokens" or ladder.padding == "computed"


def planned_uses(uses: Sequence[ShapeUse], ladder: Ladder, unit: Unit) -> Sequence[ShapeUse]:
    """The uses that a plan is for: where totals do not matter, all contexts count as long as the longest.

    Times learned from other uses would not be those of the planned steps.
    """
    return uses if totals_pay(ladder, unit) else _even(uses)


def _even(uses: Sequence[ShapeUse]) -> list[ShapeUse]:
    """The uses with all contexts as long as the longest; shapes that become equal are merged."""
    merged: dict[tuple[StepShape, Bucket | None], list[float]] = {}
    for use in uses:
        sums = merged.setdefault((use.shape.even(), use.bucket), [0.0, 0.0, 0.0])
        sums[0] += use.steps
        if use.seconds > 0:
            sums[1] += use.steps
            sums[2] += use.steps * use.seconds
    return [
        ShapeUse(shape, bucket, steps, seconds / measured if measured else 0.0)
        for (shape, bucket), (steps, measured, seconds) in merged.items()
    ]


def _most(uses: Sequence[ShapeUse]) -> list[ShapeUse]:
    kept = sorted(uses, key=lambda use: (-use.steps, use.shape, str(use.bucket)))[:MAX_SHAPES]
    return sorted(kept, key=lambda use: (use.shape, str(use.bucket)))


class _Plan:
    def __init__(
        self, ladder: Ladder, policy: Policy, uses: Sequence[ShapeUse], times: StepTimes | None, observed_s: float,
        *, totals: bool,
    ) -> None:  # fmt: skip
        self._ladder, self._policy, self._uses, self._times = ladder, policy, uses, times
        self._observed_s, self._totals = observed_s, totals
        self._weight: dict[StepShape, float] = {}
        for use in uses:
            self._weight[use.shape] = self._weight.get(use.shape, 0.0) + use.steps
        measured: dict[StepShape, list[float]] = {}
        for use in uses:
            if use.bucket is not None and use.seconds > 0:
                sums = measured.setdefault(use.shape, [0.0, 0.0])
                # Also predict the bucket that ran them: the ratio tells the prediction's error.
                sums[0] += use.steps * use.seconds
                sums[1] += use.steps * (times.seconds(use.shape, use.bucket) if times is not None else 0.0)
        self._ratio = {shape: real / law for shape, (real, law) in measured.items() if law > 0}

    def nothing(self, why: str, steps: float) -> Proposal:
        choices = self._choices(self._ladder.on, self._tokens)
        return self._proposal(choices, frozenset(), frozenset(), why, steps)

    def found(self, steps: float, blocked: Sequence[Bucket], keep: Sequence[Bucket]) -> Proposal:
        ladder, policy = self._ladder, self._policy
        no = set(blocked)
        there = (*ladder.on, *ladder.off)
        fresh = candidates(self._uses, there, ladder.limits, blocked, totals=self._totals)
        idle = [bucket for bucket in ladder.off if bucket not in no]
        buckets = (*ladder.on, *sorted({*fresh, *idle}))
        choices = self._choices(buckets, self._tokens if policy.unit == "tokens" else self._seconds)
        numbers = list(range(len(ladder.on), len(buckets)))
        now = choices.total(choices.base)
        compile_s = [0.0 if buckets[n] in ladder.off else policy.graph_s for n in numbers]
        once = policy.once_s if policy.graph_s <= policy.max_compile_s else 0.0
        # Compilation counts as far as payback_s of such traffic does not repay it.
        worth = self._observed_s / policy.payback_s if policy.unit == "time" and self._observed_s > 0 else 0.0
        prices = [
            policy.least_share * now + worth * (0.0 if buckets[n] in ladder.off else once + policy.graph_s)
            for n in numbers
        ]
        amounts = [(seconds, float(self._bytes(buckets[n]))) for n, seconds in zip(numbers, compile_s, strict=True)]
        budget = SearchBudget(
            policy.max_graphs, policy.max_added, (max(0.0, policy.max_compile_s - once), float(policy.max_bytes))
        )
        fixed = [n for n in choices.base if buckets[n] in set(keep)]
        best = search(choices, numbers, prices, amounts, budget, fixed)
        if not best.added and not best.retired:
            return self._proposal(choices, frozenset(), frozenset(), "no bucket within the budget saves enough", steps)
        why = f"by {self._times.source}" if self._times is not None else "by tokens"
        return self._proposal(choices, frozenset(best.added), frozenset(best.retired), why, steps)

    def _choices(self, buckets: Sequence[Bucket], cost: Any) -> Choices:
        shapes = sorted(self._weight)
        weights = [self._weight[shape] for shape in shapes]
        return Choices(shapes, weights, buckets, range(len(self._ladder.on)), self._ladder.limits, cost)

    def _tokens(self, shape: StepShape, bucket: Bucket) -> float:
        return float(self._ladder.limits.padding(bucket, shape))

    def _seconds(self, shape: StepShape, bucket: Bucket) -> float:
        assert self._times is not None
        return self._times.seconds(shape, bucket) * self._ratio.get(shape, 1.0)

    def _bytes(self, bucket: Bucket) -> int:
        """Additional memory of a graph: its commands, and the growth of the largest arena."""
        arenas, commands = self._ladder.arena_bytes, self._ladder.command_bytes
        if bucket in commands or not commands:
            return 0
        most = max(arenas.values(), default=0)
        rows = max((b.max_tokens for b in arenas), default=0)
        more = most * bucket.max_tokens // rows - most if rows and bucket.max_tokens > rows else 0
        return more + max(commands.values())

    def _proposal(
        self, choices: Choices, added: frozenset[int], retired: frozenset[int], why: str, steps: float
    ) -> Proposal:
        policy, base = self._policy, choices.base
        shapes, weights = choices.shapes, choices.steps
        on = (base - retired) | added
        tokens = self._choices(choices.buckets, self._tokens)
        seconds = self._choices(choices.buckets, self._seconds) if self._times is not None else None
        (padding_now, owner_now), (padding_then, owner_then) = tokens.each(base), tokens.each(on)
        time_now, time_then = (seconds.each(one)[0] if seconds is not None else None for one in (base, on))
        changes = []
        for n in sorted(added | retired, key=lambda n: (n in retired, choices.buckets[n])):
            mine = (owner_then == n) if n in added else (owner_now == n)
            moved = float(weights[mine].sum())
            bucket, new = choices.buckets[n], n in added and choices.buckets[n] not in self._ladder.off

            def mean(now: Any, then: Any, mine: Any = mine, moved: float = moved) -> float:
                return float(((now - then) * weights)[mine].sum() / moved) if moved else 0.0

            changes.append(
                Change(
                    bucket,
                    "add" if n in added else "retire",
                    moved,
                    None if time_now is None or time_then is None else mean(time_now, time_then),
                    mean(padding_now, padding_then),
                    policy.graph_s if new else 0.0,
                    self._bytes(bucket) if n in added else 0,
                    n in added and not new,
                )
            )
        fresh = sum(not change.compiled and change.action == "add" for change in changes)
        return Proposal(
            tuple(changes), why, steps, self._observed_s, policy.unit,
            self._times.source if self._times is not None else "no measured steps",
            float(padding_now @ weights), float(padding_then @ weights),
            None if time_now is None else float(time_now @ weights),
            None if time_then is None else float(time_then @ weights),
            policy.once_s + fresh * policy.graph_s if fresh else 0.0,
            len(shapes), len(on), self._ladder.on,
        )  # fmt: skip
