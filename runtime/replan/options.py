"""The validated options of --replan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from llmc.buckets.replanning.histogram import HALF_LIFE_S
from llmc.buckets.replanning.proposal import Policy
from llmc.runtime.request_error import RequestError

ReplanMode = Literal["off", "suggest", "auto"]
REPLAN_MODES: tuple[ReplanMode, ...] = get_args(ReplanMode)


def parse_mode(mode: str, miss_policy: str = "larger") -> ReplanMode:
    """Raises RequestError for an unknown mode, or two features that would change one artifact; ModelPathError for
    `auto` without the compiler."""
    found = next((known for known in REPLAN_MODES if known == mode), None)
    if found is None:
        raise RequestError(f"--replan {mode!r} is unknown: use {', '.join(REPLAN_MODES)}")
    if found == "auto":
        if miss_policy == "background":
            raise RequestError(
                "--replan auto adds what steps miss, too, so --miss-policy background has nothing to do: leave one out"
            )
        from llmc.model_artifact import require_compiler

        require_compiler("--replan auto compiles what it proposes")
    return found


@dataclass(frozen=True)
class ReplanOptions:
    """Times in seconds.

    interval_s: between proposals.
    half_life_s: after which a step counts half.
    margin: share of step time, or of padding, that a change must actually save to be kept.
    window_s: of a trial, in which steps alternate with and without the change. trial_s: longest trial.
    least_trial_steps: per side, for any conclusion. least_windows: of both sides together, because machines change
    speed.
    backoff_s: before retrying a failed change; doubles each time, up to a day.
    most_graphs: most graphs on at once, beyond the artifact's own.
    memory_bytes, cpu_s: for the compiler; memory 0 means half of the free memory.
    """

    mode: ReplanMode = "off"
    policy: Policy = field(default_factory=Policy)
    interval_s: float = 60.0
    half_life_s: float = HALF_LIFE_S
    margin: float = 0.02
    window_s: float = 2.0
    trial_s: float = 600.0
    least_trial_steps: int = 100
    least_windows: int = 6
    backoff_s: float = 600.0
    most_graphs: int = 16
    memory_bytes: int = 0
    cpu_s: int = 600

    def __post_init__(self) -> None:
        for name in ("interval_s", "half_life_s", "window_s", "trial_s", "backoff_s"):
            if not 0 < getattr(self, name) < 1e9:
                raise RequestError(f"{name} of --replan is {getattr(self, name)}: use more than 0")
        if not -1 <= self.margin < 1:
            raise RequestError(f"the margin of --replan is {self.margin}: use 0 to less than 1")
