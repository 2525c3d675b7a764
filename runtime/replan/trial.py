"""Tests whether a change of buckets pays: compares similar steps, alternating with and without it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llmc.buckets.bucket import Bucket
from llmc.buckets.replanning.shapes import Limits, StepShape

_STANDARD_ERRORS = 2.0
_OCTAVE_PARTS = 4


@dataclass(frozen=True, slots=True)
class RanSteps:
    """A number of similar steps; seconds and squared seconds are sums."""

    shape: StepShape
    bucket: Bucket
    count: int
    seconds: float
    squared: float


@dataclass(slots=True)
class _Side:
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    squared: float = 0.0
    padding: float = 0.0

    def add(self, ran: RanSteps, padding: int) -> None:
        self.steps += ran.count
        self.tokens += ran.count * ran.shape.tokens
        self.seconds += ran.seconds
        self.squared += ran.squared
        self.padding += ran.count * padding

    def error(self) -> float:
        """Variance of the seconds per token."""
        mean = self.seconds / self.steps
        spread = max(0.0, self.squared / self.steps - mean * mean)
        return spread * self.steps / (self.tokens * self.tokens)


@dataclass(frozen=True, slots=True)
class Verdict:
    """pays: None while undecided. saving: share of the affected steps' time saved, ± `error`. padding_saving: of their
    padding. steps_on, steps_off: compared. reason: one sentence."""

    pays: bool | None
    saving: float
    error: float
    padding_saving: float
    steps_on: int
    steps_off: int
    reason: str

    def figures(self) -> dict[str, float]:
        """By name, for a log."""
        return {
            "saving": self.saving, "error": self.error, "padding_saving": self.padding_saving,
            "steps_on": self.steps_on, "steps_off": self.steps_off,
        }  # fmt: skip


@dataclass
class Trial:
    """before, after: buckets on without and with the change. unit: quantity to reduce. margin: share that must be
    saved."""

    before: Sequence[Bucket]
    after: Sequence[Bucket]
    limits: Limits
    unit: Literal["time", "tokens"] = "time"
    margin: float = 0.02
    least_steps: int = 100
    _sides: dict[tuple[object, ...], tuple[_Side, _Side]] = field(default_factory=dict)
    _choices: dict[StepShape, tuple[Bucket | None, Bucket | None]] = field(default_factory=dict)
    _whole_phases: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._totals = any(bucket.total for bucket in (*self.before, *self.after))

    def add(self, steps: Iterable[RanSteps], *, on: bool) -> None:
        """Adds steps that ran with or without the change."""
        for ran in steps:
            shape = ran.shape if self._totals else ran.shape.even()
            if shape not in self._choices:
                self._choices[shape] = self.limits.choose(self.before, shape), self.limits.choose(self.after, shape)
                if self._choices[shape][0] is None:
                    # Without the change it ran in parts, which are other shapes: compare the phase as a whole.
                    self._whole_phases.add(shape.phase)
            padding = self.limits.padding(ran.bucket, shape)
            before, after = self._choices[shape]
            if before != after:
                self._side(("alike", *_stratum(shape), before, after), on).add(ran, padding)
            self._side(("phase", shape.phase), on).add(ran, padding)

    def verdict(self, *, final: bool) -> Verdict:
        """The present verdict. final: no more steps will come, so undecided means it does not pay."""
        pairs = [
            (off, on)
            for key, (off, on) in self._sides.items()
            if off.tokens and on.tokens and self._counts(key)
        ]  # fmt: skip
        steps_off, steps_on = (sum(pair[side].steps for pair in pairs) for side in (0, 1))
        if min(steps_off, steps_on) < self.least_steps:
            reason = f"only {steps_on} steps with it and {steps_off} without it, {self.least_steps} are needed"
            return Verdict(False if final else None, 0.0, 0.0, 0.0, steps_on, steps_off, reason)
        saving, error = _saving(pairs)
        weights = [off.tokens + on.tokens for off, on in pairs]
        padding_off = sum(w * off.padding / off.tokens for w, (off, _) in zip(weights, pairs, strict=True))
        padding_on = sum(w * on.padding / on.tokens for w, (_, on) in zip(weights, pairs, strict=True))
        padding_saving = 1 - padding_on / padding_off if padding_off > 0 else 0.0
        pays, reason = self._judge(saving, error, padding_saving, final)
        return Verdict(pays, saving, error, padding_saving, steps_on, steps_off, reason)

    def _judge(self, saving: float, error: float, padding_saving: float, final: bool) -> tuple[bool | None, str]:
        sure = _STANDARD_ERRORS * error
        time = f"{saving:+.1%} (±{sure:.1%}) of step time saved"
        if self.unit == "tokens":
            if saving + sure < -self.margin:
                return False, f"steps are slower: {time}"
            if padding_saving < self.margin:
                return False, f"{padding_saving:+.1%} of padding saved, {self.margin:.1%} are needed"
            return True, f"{padding_saving:+.1%} of padding saved, {time}"
        if saving - sure >= self.margin:
            return True, time
        if saving + sure < self.margin:
            return False, f"{time}, {self.margin:.1%} are needed"
        if not final:
            return None, f"{time} so far"
        # Within noise, but more likely than not.
        pays = saving >= self.margin and saving > error
        return pays, time if pays else f"{time}, {self.margin:.1%} are needed, which noise neither proves nor rules out"

    def _counts(self, key: tuple[object, ...]) -> bool:
        whole = key[1] in self._whole_phases
        return whole if key[0] == "phase" else not whole

    def _side(self, key: tuple[object, ...], on: bool) -> _Side:
        return self._sides.setdefault(key, (_Side(), _Side()))[on]


def _stratum(shape: StepShape) -> tuple[object, ...]:
    """Steps of one stratum should take equal time in one bucket."""
    tokens = round(_OCTAVE_PARTS * math.log2(max(shape.tokens, 1)))
    return shape.phase, shape.sequences, tokens, max(shape.context, 1).bit_length()


def _saving(pairs: Sequence[tuple[_Side, _Side]]) -> tuple[float, float]:
    """(share of time saved by the second sides over the first, for the tokens of both; its standard error)."""
    total_off = total_on = error_off = error_on = 0.0
    for off, on in pairs:
        weight = off.tokens + on.tokens
        total_off += weight * off.seconds / off.tokens
        total_on += weight * on.seconds / on.tokens
        error_off += weight * weight * off.error()
        error_on += weight * weight * on.error()
    if total_off <= 0:
        return 0.0, 0.0
    ratio = total_on / total_off
    return 1 - ratio, math.sqrt(error_on + ratio * ratio * error_off) / total_off
