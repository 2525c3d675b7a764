"""Re-planning as a function of plain data: histogram, costs, search against brute force, and proposals."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket, BucketError
from llmc.buckets.replanning import search as searching
from llmc.buckets.replanning.candidates import candidates
from llmc.buckets.replanning.costs import learn
from llmc.buckets.replanning.histogram import CountedSteps, StepHistogram
from llmc.buckets.replanning.proposal import Ladder, Policy, Proposal, planned_uses, propose
from llmc.buckets.replanning.search import Choices, Found, SearchBudget, search
from llmc.buckets.replanning.shapes import Limits, ShapeUse, StepShape

LIMITS = Limits(max_model_len=256, max_num_seqs=8, block_size=16)
WHOLE = Bucket("decode", 8, 256)
PROMPT = Bucket("prefill", 1, 256)
BASE = (PROMPT, WHOLE)
EAGER = Policy(least_steps=0, once_s=0, graph_s=0, least_share=0)


def decode(sequences: int, context: int) -> StepShape:
    return StepShape("decode", sequences, sequences, sequences, context)


def prefill(tokens: int, sequences: int = 1) -> StepShape:
    return StepShape("prefill", sequences, tokens, sequences, -(-tokens // 16) * 16)


shapes = st.one_of(
    st.builds(decode, st.integers(1, 8), st.integers(1, 16).map(lambda blocks: 16 * blocks)),
    st.builds(prefill, st.integers(1, 256)),
    st.builds(lambda tokens: StepShape("mixed", 4, tokens, 4, 64), st.integers(4, 64)),
)
buckets = st.one_of(
    st.builds(lambda b, s: Bucket("decode", b, 16 * s), st.integers(1, 8), st.integers(1, 16)),
    st.builds(lambda b, s: Bucket("prefill", b, 16 * s), st.integers(1, 2), st.integers(1, 8)),
    st.builds(lambda s: Bucket("mixed", 8, s), st.integers(8, 64)),
)


def cost(shape: StepShape, bucket: Bucket) -> float:
    return 1.0 + bucket.max_tokens + 0.01 * LIMITS.context(bucket) + 0.001 * shape.tokens


# ---- which bucket a step takes ------------------------------------------------------------------------------------


def test_steps_go_to_the_smallest_bucket_of_their_phase_then_to_any() -> None:
    small, mixed = Bucket("decode", 2, 64), Bucket("mixed", 8, 64)
    assert LIMITS.choose((*BASE, small, mixed), decode(2, 64)) == small
    assert LIMITS.choose((*BASE, small), decode(2, 80)) == WHOLE
    assert LIMITS.choose((PROMPT, small, mixed), decode(3, 64)) == mixed
    assert LIMITS.choose((PROMPT, small), decode(1, 256)) == PROMPT
    assert LIMITS.choose((PROMPT, small), decode(3, 64)) is None
    assert LIMITS.parts((PROMPT, small), decode(3, 64)) == [(decode(2, 64), small), (decode(1, 64), small)]
    assert LIMITS.parts((small,), decode(3, 80)) == []
    assert LIMITS.padding(WHOLE, decode(2, 64)) == 8 * 256 - 2 * 64
    assert LIMITS.padding(PROMPT, prefill(100)) == 156


# ---- the histogram -----------------------------------------------------------------------------------------------


def test_old_steps_fade_and_time_with_them() -> None:
    histogram = StepHistogram(half_life_s=10)
    histogram.add([CountedSteps(decode(1, 16), WHOLE, 8, 0.8)], 0)
    histogram.add([CountedSteps(decode(2, 16), WHOLE, 1)], 10)
    first, second = histogram.uses()
    assert first.steps == 4.0
    assert first.seconds == pytest.approx(0.1)
    assert (second.steps, second.seconds) == (1.0, 0.0)
    assert histogram.observed_s == 10
    histogram.add([], 20)
    assert histogram.observed_s == 15
    histogram.add([], 1000)
    assert histogram.uses() == []


@given(st.lists(st.tuples(shapes, st.integers(1, 9)), max_size=60), st.integers(1, 8))
def test_memory_is_bounded_and_what_counts_least_goes(steps: list[tuple[StepShape, int]], most: int) -> None:
    histogram = StepHistogram(1e9, most)
    for shape, count in steps:
        histogram.add([CountedSteps(shape, WHOLE, count)], 0)
        assert len(histogram.uses()) <= most
    assert sum(use.steps for use in histogram.uses()) + histogram.forgotten == pytest.approx(sum(n for _, n in steps))


@pytest.mark.parametrize("arguments", [(0.0, 1), (math.inf, 1), (1.0, 0)])
def test_histograms_need_sound_limits(arguments: tuple[float, int]) -> None:
    with pytest.raises(ValueError, match="use"):
        StepHistogram(*arguments)


# ---- the search, against brute force ---------------------------------------------------------------------------------


def brute(
    choices: Choices, numbers: Sequence[int], price: Sequence[float], amount: Sequence[float], budget: SearchBudget
) -> float:
    """Every set of additions with every set of retirements that the budget makes necessary."""
    best = math.inf
    base = sorted(choices.base)
    for k in range(budget.added + 1):
        for added in itertools.combinations(range(len(numbers)), k):
            if sum(amount[n] for n in added) > budget.amounts[0]:
                continue
            excess = max(0, len(base) + k - budget.graphs)
            for gone in itertools.combinations(base, excess):
                stay = [n for n in base if n not in gone]
                covered = all(any(LIMITS.covers(choices.buckets[s], choices.buckets[g]) for s in stay) for g in gone)
                if covered:
                    total = choices.total({*stay, *(numbers[n] for n in added)})
                    best = min(best, total + sum(price[n] for n in added))
    return best


problems = st.tuples(
    st.lists(st.tuples(shapes, st.floats(0.5, 50)), min_size=1, max_size=8, unique_by=lambda one: one[0]),
    st.lists(buckets, max_size=6, unique=True),
    st.lists(buckets, max_size=2, unique=True),
    st.integers(0, 3), st.integers(1, 4), st.integers(0, 6), st.integers(0, 10),
)  # fmt: skip


def problem(drawn: tuple) -> tuple[Choices, list[int], list[float], list[float], SearchBudget]:  # type: ignore[type-arg]
    steps, some, more_base, added, graphs, amount, price = drawn
    base = list(dict.fromkeys((*BASE, Bucket("mixed", 8, 64), *more_base)))
    extra = [bucket for bucket in some if bucket not in base]
    every = [*base, *extra]
    choices = Choices([s for s, _ in steps], [w for _, w in steps], every, range(len(base)), LIMITS, cost)
    numbers = list(range(len(base), len(every)))
    return (choices, numbers, [0.3 * price] * len(numbers), [float(n % 3) for n in range(len(numbers))],
            SearchBudget(len(base) + graphs - 1, added, (float(amount),)))  # fmt: skip


@settings(max_examples=150)
@given(problems)
def test_few_candidates_are_searched_to_the_optimum(drawn: tuple) -> None:  # type: ignore[type-arg]
    choices, numbers, price, amount, budget = problem(drawn)
    found = search(choices, numbers, price, [(one,) for one in amount], budget)
    best = brute(choices, numbers, price, amount, budget)
    if best < math.inf:
        assert found.value == pytest.approx(best)
    check(choices, found, budget)


@settings(max_examples=60)
@given(problems)
def test_by_turns_is_never_worse_than_nothing(drawn: tuple) -> None:  # type: ignore[type-arg]
    choices, numbers, price, amount, budget = problem(drawn)
    whole = searching.EXACT_SETS
    searching.EXACT_SETS = 0
    try:
        found = search(choices, numbers, price, [(one,) for one in amount], budget)
    finally:
        searching.EXACT_SETS = whole
    check(choices, found, budget)
    nothing = brute(choices, [], [], [], replace(budget, added=0))
    if nothing < math.inf:
        assert brute(choices, numbers, price, amount, budget) <= found.value * (1 + 1e-9)
        assert found.value <= nothing * (1 + 1e-9)


def check(choices: Choices, found: Found, budget: SearchBudget) -> None:
    """Whatever is retired, each of its steps has a bucket of the base that stays."""
    stay = choices.base - set(found.retired)
    assert len(found.added) <= budget.added
    for gone in found.retired:
        assert any(LIMITS.covers(choices.buckets[n], choices.buckets[gone]) for n in stay)
    on = [choices.buckets[n] for n in {*stay, *found.added}]
    before = [choices.buckets[n] for n in choices.base]
    for shape in choices.shapes:
        assert (LIMITS.choose(before, shape) is None) or LIMITS.choose(on, shape) is not None


@given(problems)
def test_the_search_counts_the_scheduler_s_choices(drawn: tuple) -> None:  # type: ignore[type-arg]
    choices, *_ = problem(drawn)
    on = [choices.buckets[n] for n in sorted(choices.base)]
    expected = 0.0
    for shape, weight in zip(choices.shapes, choices.steps.tolist(), strict=True):
        expected += weight * sum(cost(part, bucket) for part, bucket in LIMITS.parts(on, shape))
    assert choices.total(choices.base) == pytest.approx(expected)


# ---- proposals ---------------------------------------------------------------------------------------------------


def traffic(seed: int = 0, seconds: float = 0.01) -> list[ShapeUse]:
    draw = random.Random(seed)
    uses = [ShapeUse(decode(draw.randint(1, 3), 16 * draw.randint(1, 4)), WHOLE, 40, seconds) for _ in range(12)]
    uses += [ShapeUse(prefill(draw.randint(10, 60)), PROMPT, 5, 10 * seconds) for _ in range(12)]
    return list({use.shape: use for use in uses}.values())


def test_buckets_for_the_traffic_are_proposed_with_what_they_save() -> None:
    ladder = Ladder(BASE, LIMITS, padding="computed", arena_bytes={PROMPT: 1 << 20, WHOLE: 1 << 15},
                    command_bytes={PROMPT: 9000, WHOLE: 9000})  # fmt: skip
    found = propose(traffic(), ladder, Policy(unit="tokens", max_added=2))
    assert len(found.added) == 2
    assert found.retired == ()
    assert found.padding_then < 0.5 * found.padding_now
    assert found.saving == pytest.approx(1 - found.padding_then / found.padding_now)
    assert found.compile_s == pytest.approx(19.4)
    assert all(change.bytes == 9000 and change.steps > 0 and not change.compiled for change in found.changes)
    moved = sum(change.steps * change.saved_tokens for change in found.changes)
    assert moved == pytest.approx(found.padding_now - found.padding_then)
    assert "add " in found.line()
    assert found == propose(list(reversed(traffic())), ladder, Policy(unit="tokens", max_added=2))


def test_where_padding_is_skipped_time_is_no_less_in_a_smaller_bucket() -> None:
    """Steps of 8 rows and more take what their own rows take: nothing to gain, whatever the padding."""
    uses = [ShapeUse(prefill(8 * n), PROMPT, 100, 0.001 + 1e-4 * n) for n in range(1, 9)]
    found = propose(uses, Ladder(BASE, LIMITS), replace(EAGER, least_share=0.01))
    assert found.changes == ()
    assert "saves enough" in found.line()
    tokens = propose(uses, Ladder(BASE, LIMITS), replace(EAGER, unit="tokens", max_added=1))
    assert [bucket.phase for bucket in tokens.added] == ["prefill"]


def test_steps_that_were_split_get_the_bucket_that_holds_them() -> None:
    pair = Bucket("decode", 2, 256)
    ladder = Ladder((PROMPT, pair), replace(LIMITS, max_num_seqs=4), padding="computed")
    uses = [ShapeUse(decode(3, 64), None, 200), ShapeUse(decode(2, 64), pair, 200, 0.01),
            ShapeUse(decode(1, 64), pair, 200, 0.01), ShapeUse(prefill(32), PROMPT, 10, 0.02)]  # fmt: skip
    found = propose(uses, ladder, EAGER)
    assert found.added
    assert LIMITS.choose(found.added, decode(3, 64)) is not None


def test_a_bucket_must_pay_for_its_compilation() -> None:
    ladder = Ladder(BASE, LIMITS, padding="computed")
    uses = traffic(seconds=1e-4)
    cheap = propose(uses, ladder, replace(EAGER, unit="time", max_added=1), observed_s=100)
    dear = propose(uses, ladder, replace(EAGER, unit="time", once_s=60, max_added=1, payback_s=60), observed_s=100)
    assert dear.changes == ()
    assert cheap.seconds_now is not None
    assert cheap.seconds_then is not None
    assert cheap.seconds_then <= cheap.seconds_now
    # One that is compiled and only off costs nothing.
    off = replace(ladder, off=(Bucket("decode", 4, 64),))
    back = propose(uses, off, replace(EAGER, once_s=60, payback_s=60, max_compile_s=0), observed_s=100)
    assert all(change.compiled for change in back.changes)


def test_a_full_ladder_makes_room_and_leaves_no_shape_without_a_bucket() -> None:
    unused = (Bucket("decode", 6, 256), Bucket("decode", 5, 128))
    ladder = Ladder((*BASE, *unused), LIMITS, padding="computed")
    policy = replace(EAGER, unit="tokens", max_graphs=4, max_added=1)
    found = propose(traffic(), ladder, policy)
    assert len(found.added) == len(found.retired) == 1
    assert found.retired[0] in unused
    assert found.graphs == 4
    kept = propose(traffic(), ladder, policy, keep=unused)
    assert kept.changes == ()
    blocked = propose(traffic(), ladder, policy, blocked=found.added)
    assert not set(blocked.added) & set(found.added)


def test_too_few_steps_and_steps_without_times_propose_nothing() -> None:
    ladder = Ladder(BASE, LIMITS)
    assert "too few" in propose(traffic()[:1], ladder, Policy()).why
    assert "measured" in propose([ShapeUse(decode(1, 16), WHOLE, 999)], ladder, Policy()).why
    assert propose([], ladder, EAGER).changes == ()


def test_a_proposal_is_plain_values() -> None:
    import json

    found = propose(traffic(), Ladder(BASE, LIMITS), replace(EAGER, unit="tokens"))
    data = json.loads(json.dumps(found.as_dict()))
    assert {change["action"] for change in data["changes"]} == {"add"}
    assert data["saving"] == found.saving


@settings(max_examples=40)
@given(st.lists(st.tuples(shapes, st.integers(1, 500), st.floats(1e-5, 1e-1)), max_size=30), st.booleans(),
       st.sampled_from(["time", "tokens"]))  # fmt: skip
def test_any_traffic_gives_a_sound_proposal(
    drawn: list[tuple[StepShape, int, float]], computed: bool, unit: str
) -> None:
    base = (*BASE, Bucket("mixed", 8, 64))
    uses = [
        ShapeUse(shape, bucket, steps, seconds)
        for shape, steps, seconds in drawn
        if (bucket := LIMITS.choose(base, shape)) is not None
    ]
    ladder = Ladder(base, LIMITS, padding="computed" if computed else "skipped")
    found: Proposal = propose(uses, ladder, replace(EAGER, unit=unit, max_graphs=4), observed_s=60)  # type: ignore[arg-type]
    assert all(LIMITS.takes(bucket) for bucket in found.added)
    assert max(b.max_tokens for b in (*base, *found.added)) == 256
    if unit == "tokens":
        assert found.padding_then <= found.padding_now * (1 + 1e-9)
    elif found.seconds_now is not None and found.seconds_then is not None and found.changes:
        assert found.seconds_then <= found.seconds_now * (1 + 1e-9)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"unit": "rows"}, "unit 'rows' is unknown"), ({"max_graphs": 0}, "use more than 0"),
     ({"least_share": -1}, "is negative")],
)  # fmt: skip
def test_policies_are_checked(values: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(BucketError, match=message):
        Policy(**values)


def test_candidates_are_no_larger_than_what_there_is() -> None:
    uses = [ShapeUse(decode(2, 64), WHOLE, 5), ShapeUse(prefill(100), PROMPT, 5),
            ShapeUse(StepShape("mixed", 3, 40, 3, 64), Bucket("mixed", 8, 64), 5)]  # fmt: skip
    found = candidates(uses, (*BASE, Bucket("mixed", 8, 64)), LIMITS)
    assert found == [
        Bucket("decode", 2, 64),
        Bucket("decode", 2, 256),
        Bucket("mixed", 8, 48),
        Bucket("prefill", 1, 112),
    ]
    assert candidates(uses, (), LIMITS) == []
    assert Bucket("decode", 2, 64) not in candidates(uses, BASE, LIMITS, blocked=found)


def test_times_come_from_steps_and_for_the_rest_from_a_table() -> None:
    assert learn([], None, LIMITS, padding="skipped") is None
    uses = [ShapeUse(decode(n, 64), WHOLE, 50, 0.001 * n) for n in range(1, 9)]
    times = learn(uses, None, LIMITS, padding="skipped")
    assert times is not None
    assert times.source == "steps of this server"
    assert times.seconds(decode(8, 64), WHOLE) >= times.seconds(decode(1, 64), Bucket("decode", 1, 64)) > 0


def test_times_are_learned_of_the_steps_that_are_planned_for() -> None:
    """Steps that differ only in totals, too few of each to learn from, are one shape where totals do not matter."""
    uses = [ShapeUse(replace(decode(4, 64), total=64 + 16 * n), WHOLE, 1.0, 0.001 * n) for n in range(3, 12)]
    planned = planned_uses(uses, Ladder(BASE, LIMITS), "time")
    assert [(use.shape, use.steps) for use in planned] == [(decode(4, 64), 9.0)]
    assert planned[0].seconds == pytest.approx(0.007)
    assert learn(uses, None, LIMITS, padding="skipped") is None
    assert learn(planned, None, LIMITS, padding="skipped") is not None
    assert planned_uses(uses, Ladder(BASE, LIMITS), "tokens") == uses


def test_a_total_is_at_most_that_of_equal_contexts() -> None:
    """Rounded up beyond it, it would hide padding."""
    shape = StepShape("decode", 3, 3, 3, 80, 256)
    assert shape == decode(3, 80)
    assert LIMITS.padding(Bucket("decode", 4, 80), shape) == 80
