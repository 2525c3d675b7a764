"""Conditions that a trace does not tell: the server's speed relative to arrivals, and how steps are composed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scenario:
    """A condition to plan for.

    speed: factor on the arrival rate; equivalently, a machine slower by that factor.
    prefill: factor on the assumed prompt tokens per second.
    mixed: whether prompts run beside decodes.
    weight: relative to other scenarios.
    why: an explanation for users.
    """

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
    """The scenarios to plan for. pinned: pace and costs are known, so there is only one. guessed_prefill: prompt speed
    is unknown."""
    if pinned:
        return (OWN,)
    return _SPREAD + _GUESSED if guessed_prefill else _SPREAD
