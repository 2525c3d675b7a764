"""What a server may meet that a trace does not tell: how fast it is beside the arrivals, and how steps are made up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scenario:
    """speed: arrivals come so many times as fast; a machine that is so much slower in all it does meets the same steps.
    prefill: times as many tokens of prompts a second as assumed. mixed: whether prompts run beside decodes. weight:
    beside the others. why: for people."""

    name: str
    speed: float
    prefill: float
    mixed: bool
    weight: float
    why: str


OWN = Scenario("own pace", 1.0, 1.0, True, 6.0, "the trace as it is, by the costs given: most is known of it")
_SPREAD = (
    OWN,
    Scenario("no mixed steps", 1.0, 1.0, False, 1.0, "a ladder or a server without mixed steps decodes beside prompts"),
    Scenario("1/4 of the pace", 0.25, 1.0, True, 1.0, "quieter hours, or a machine four times as fast"),
    Scenario("1/16 of the pace", 1 / 16, 1.0, True, 1.0, "nights: few sequences at once, which busy hours never show"),
    Scenario("4 times the pace", 4.0, 1.0, False, 1.0, "saturated: full batches, which quiet hours never show"),
)
_GUESSED = (
    Scenario("prefill 4 times as fast", 1.0, 4.0, True, 1.0, "the rate of prefill is a guess, and decides who waits"),
    Scenario("prefill 1/4 as fast", 1.0, 0.25, False, 1.0, "the same, the other way"),
)


def scenarios(*, pinned: bool, guessed_prefill: bool) -> tuple[Scenario, ...]:
    """Those to plan for. pinned: pace and costs are known, so that there is one. guessed_prefill: nobody has said how
    fast prompts are."""
    if pinned:
        return (OWN,)
    return _SPREAD + _GUESSED if guessed_prefill else _SPREAD
