"""Whether a change paid, told from steps with it and without it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from llmc.buckets.bucket import Bucket
from llmc.buckets.replanning.shapes import Limits, StepShape
from llmc.runtime.replan.trial import RanSteps, Trial

LIMITS = Limits(256, 8, 16)
LARGE, SMALL, PAIR = Bucket("decode", 8, 256), Bucket("decode", 2, 256), Bucket("decode", 2, 256)
PROMPT = Bucket("prefill", 1, 256)


def decode(sequences: int, context: int = 64) -> StepShape:
    return StepShape("decode", sequences, sequences, sequences, context)


def steps(shape: StepShape, bucket: Bucket, seconds: float, count: int = 200, spread: float = 0.0) -> RanSteps:
    squared = count * seconds * seconds * (1 + spread * spread)
    return RanSteps(shape, bucket, count, count * seconds, squared)


def trial(**options: object) -> Trial:
    return Trial((PROMPT, LARGE), (PROMPT, LARGE, SMALL), LIMITS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("with_it", "spread", "final", "pays"),
    [(0.008, 0.1, False, True), (0.0099, 0.01, False, False), (0.0103, 0.01, False, False),
     (0.0096, 0.6, False, None), (0.0096, 0.6, True, False), (0.0096, 0.4, True, True)],
)  # fmt: skip
def test_a_change_stays_when_it_saves_the_margin(with_it: float, spread: float, final: bool, pays: bool | None) -> None:
    one = trial(margin=0.02)
    for _ in range(2):
        one.add([steps(decode(2), LARGE, 0.010, spread=spread)], on=False)
        one.add([steps(decode(2), SMALL, with_it, spread=spread)], on=True)
    verdict = one.verdict(final=final)
    assert verdict.pays is pays
    assert verdict.saving == pytest.approx(1 - with_it / 0.010)
    assert (verdict.steps_on, verdict.steps_off) == (400, 400)
    assert "%" in verdict.reason


def test_steps_that_the_change_leaves_alone_do_not_count() -> None:
    one = trial()
    one.add([steps(decode(2), LARGE, 0.010), steps(decode(5), LARGE, 0.010)], on=False)
    one.add([steps(decode(2), SMALL, 0.009), steps(decode(5), LARGE, 0.1)], on=True)
    assert one.verdict(final=False).saving == pytest.approx(0.1)
    # Only shapes that came on both sides are compared.
    one.add([steps(decode(1), SMALL, 1.0)], on=True)
    assert one.verdict(final=False).saving == pytest.approx(0.1)


def test_more_of_the_cheap_steps_is_no_saving() -> None:
    one = trial()
    one.add([steps(decode(2), LARGE, 0.010, 900), steps(decode(1), LARGE, 0.005, 100)], on=False)
    one.add([steps(decode(2), SMALL, 0.010, 100), steps(decode(1), SMALL, 0.005, 900)], on=True)
    assert one.verdict(final=False).saving == pytest.approx(0)


def test_few_steps_prove_nothing() -> None:
    one = trial()
    one.add([steps(decode(2), LARGE, 0.010)], on=False)
    assert one.verdict(final=False).pays is None
    assert one.verdict(final=True).pays is False
    assert "only 0 steps with it" in one.verdict(final=True).reason
    assert trial().verdict(final=True).pays is False


def test_steps_that_were_split_are_compared_by_the_token() -> None:
    three = Bucket("decode", 4, 256)
    one = Trial((PROMPT, PAIR), (PROMPT, PAIR, three), Limits(256, 4, 16))
    one.add([steps(decode(2), PAIR, 0.010), steps(decode(1), PAIR, 0.010)], on=False)
    one.add([steps(decode(3), three, 0.012)], on=True)
    verdict = one.verdict(final=False)
    assert verdict.pays is True
    assert verdict.saving == pytest.approx(1 - 0.012 / 0.020)


@pytest.mark.parametrize(
    ("seconds", "pays", "word"),
    [(0.010, True, "of padding saved"), (0.012, False, "slower"), (0.0101, True, "padding")],
)
def test_by_tokens_padding_counts_and_time_must_not_suffer(seconds: float, pays: bool, word: str) -> None:
    one = trial(unit="tokens", margin=0.02)
    one.add([steps(decode(2), LARGE, 0.010)], on=False)
    one.add([steps(decode(2), SMALL, seconds)], on=True)
    verdict = one.verdict(final=False)
    assert verdict.pays is pays
    assert word in verdict.reason
    assert verdict.padding_saving == pytest.approx(1 - (2 * 256 - 128) / (8 * 256 - 128))


@pytest.mark.parametrize("saving", [-0.05, 0.0, 0.1])
def test_noise_is_not_taken_for_a_saving(saving: float) -> None:
    """Machines change their speed by turns, for both sides alike."""
    draw = random.Random(3)
    noisy: Callable[[float], float] = lambda mean: mean * draw.lognormvariate(0, 0.3)  # noqa: E731
    one = trial(margin=0.02)
    for _ in range(40):
        speed = draw.choice([1.0, 1.6])
        for on, bucket, mean in ((False, LARGE, 0.010), (True, SMALL, 0.010 * (1 - saving))):
            for _ in range(40):
                seconds = noisy(speed * mean)
                one.add([RanSteps(decode(2), bucket, 1, seconds, seconds * seconds)], on=on)
    assert one.verdict(final=True).pays is (saving > 0.02)
