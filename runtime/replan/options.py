"""The options of --replan, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from llmc.buckets.replanning.histogram import HALF_LIFE_S
from llmc.buckets.replanning.proposal import Policy
from llmc.runtime.request_error import RequestError

ReplanMode = Literal["off", "suggest", "auto"]
REPLAN_MODES: tuple[ReplanMode, ...] = get_args(ReplanMode)


def parse_mode(mode: str, miss_policy: str = "larger") -> ReplanMode:
    """Raises RequestError for an unknown one and for two who would add to one artifact, ModelPathError for `auto` where
    the compiler is not installed."""
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
    """Times in seconds. interval_s: between two proposals. half_life_s: after which a step counts half. margin: share
    of step time, or of padding, that a change must really save to stay. window_s: of a trial, in which steps run with
    the change and without it by turns; trial_s: the longest trial. least_trial_steps: of each side, fewer prove
    nothing; least_windows: of both together, for a machine changes its speed. backoff_s: before what did not pay is
    tried again; doubled each time, a day at most. most_graphs: more than the artifact has that are on at once.
    memory_bytes, cpu_s: of the compiler; memory 0: half of what the machine has free.
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
