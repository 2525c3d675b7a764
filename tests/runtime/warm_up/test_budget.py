"""The memory budget: arithmetic and choice of graphs against brute force, and budgets that cannot be."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmc.buckets.bucket import Bucket
from llmc.buckets.warm_order import warm_order
from llmc.runtime.binding import ArtifactInfo, GraphInfo
from llmc.runtime.binding.artifact import PoolSizes
from llmc.runtime.warm_up.budget import (
    Budget,
    BudgetError,
    BudgetOptions,
    base_graphs,
    budget_of,
    graph_set_bytes,
    plan_budget,
    size_order,
    size_text,
)
from llmc.runtime.warm_up.device_budget import DeviceRoom, plan_on_device
from llmc.runtime.warm_up.draft_memory import DraftMemory
from llmc.runtime.warm_up.tower_memory import tower_bytes

VOCAB, BLOCK, MAX_LEN, KV_BLOCK = 100, 16, 64, 1000


def info(weight_bytes: int = 10_000) -> ArtifactInfo:
    fields: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(ArtifactInfo)}
    fields |= {"vocab_size": VOCAB, "block_size": BLOCK, "max_model_len": MAX_LEN, "kv_block_bytes": KV_BLOCK}
    fields["max_kv_blocks"] = 2**31 - 1
    return ArtifactInfo(**fields | {"weight_bytes": weight_bytes})


def graph(phase: str, batch: int, seq: int, arena: int) -> GraphInfo:
    tokens = batch if phase == "decode" else batch * seq
    blocks = -(-seq // BLOCK) if phase == "decode" else MAX_LEN // BLOCK
    return GraphInfo(phase, batch, seq, tokens, batch, batch, blocks, 10, arena)


def ladder(arenas: dict[str, int]) -> list[GraphInfo]:
    found = []
    for name, arena in arenas.items():
        phase, _, shape = name.partition(":")
        batch, _, seq = shape.partition("x")
        found.append(graph(phase, int(batch), int(seq), arena))
    return found


graphs_of = st.tuples(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([16, 32, 64])), min_size=1, max_size=4, unique=True),
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([16, 32, 64])), min_size=1, max_size=4, unique=True),
)


def brute_bytes(graphs: list[GraphInfo]) -> int:
    if not graphs:
        return 0
    inputs = [g.max_tokens * 16 + (g.max_seqs * (g.max_blocks_per_seq + 2) + g.max_samples) * 4 for g in graphs]
    logits = max(g.max_samples for g in graphs) * VOCAB * 4
    return max(g.arena_bytes for g in graphs) + max(inputs) + logits + 128 * sum(g.num_commands for g in graphs)


def best_set(graphs: list[GraphInfo], mine: list[int], fixed: set[int], share: int, total: int) -> set[int]:
    """Of all subsets of `mine` that fit, the one that holds the earliest graphs."""

    def fits(chosen: tuple[int, ...]) -> bool:
        phase = {graphs[i].phase for i in mine}
        whole = fixed | set(chosen)
        of_phase = [graphs[i] for i in whole if graphs[i].phase in phase]
        # A set without additions is always allowed: the base is there whatever it costs its phase.
        if not set(chosen) - fixed:
            return True
        return brute_bytes(of_phase) <= share and brute_bytes([graphs[i] for i in whole]) <= total

    subsets = (c for n in range(len(mine) + 1) for c in itertools.combinations(mine, n))
    return fixed | set(max((c for c in subsets if fits(c)), key=lambda c: [i in c or i in fixed for i in mine]))


@given(graphs_of, st.integers(0, 2**32), st.floats(0.05, 1), st.floats(0, 1), st.integers(20_000, 60_000))
def test_it_is_what_brute_force_finds(
    shapes: tuple[list[tuple[int, int]], list[tuple[int, int]]],
    seed: int,
    reserved_share: float,
    ratio: float,
    available: int,
) -> None:
    graphs = [graph("prefill", b, s, 1 + (seed >> i) % 5000) for i, (b, s) in enumerate(shapes[0])]
    graphs += [graph("decode", b, s, 1 + (seed >> (i + 9)) % 5000) for i, (b, s) in enumerate(shapes[1])]
    order = sorted(range(len(graphs)), key=lambda i: (seed >> i) % 7)
    options = BudgetOptions(1.0, reserved_share, ratio)
    base = set(base_graphs(graphs, smallest=True))
    left = available - 10_000
    total = int(left * reserved_share)
    least_kv = (MAX_LEN // BLOCK + 1) * KV_BLOCK
    try:
        budget = plan_budget(info(), graphs, order, available, options)
    except BudgetError:
        needs = brute_bytes([graphs[i] for i in base])
        assert left < needs + least_kv or total < needs or left - total < least_kv
        return
    prompt, decode = ([i for i in order if graphs[i].phase == phase] for phase in ("prefill", "decode"))
    share = int(total * ratio)
    kept = best_set(graphs, prompt, base, share, total)
    kept = best_set(graphs, decode, kept, total - share, total)
    if kept.issuperset(decode):
        kept = best_set(graphs, prompt, kept, total - brute_bytes([graphs[i] for i in decode]), total)
    if kept.issuperset(prompt):
        kept = best_set(graphs, decode, kept, total - brute_bytes([graphs[i] for i in prompt]), total)
    assert set(budget.kept) == kept
    assert sorted(budget.kept + budget.dropped) == list(range(len(graphs)))
    assert budget.graph_bytes == brute_bytes([graphs[i] for i in kept]) <= total
    assert budget.kv_bytes + budget.graph_bytes + 10_000 == available
    assert base <= kept


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
def test_a_set_shares_its_arena(arenas: list[int]) -> None:
    graphs = [graph("prefill", 1, 16 * (i + 1), arena) for i, arena in enumerate(arenas)]
    assert graph_set_bytes(graphs, VOCAB) == brute_bytes(graphs)
    assert graph_set_bytes(graphs[:1], VOCAB) <= graph_set_bytes(graphs, VOCAB)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 10**6)), min_size=1, max_size=5),
    st.sampled_from([1, 20, 64, 99]),
)
def test_second_parts_of_steps_have_memory_of_their_own(shapes: list[tuple[int, int]], cut_rows: int) -> None:
    graphs = [graph("prefill", 1, 16 * rows, arena) for rows, arena in shapes]
    cut = [one for one in graphs if one.max_tokens >= cut_rows]
    commands = 128 * sum(one.num_commands for one in graphs if one not in cut)
    assert graph_set_bytes(graphs, VOCAB, cut_rows) == brute_bytes(graphs) + brute_bytes(cut) + commands
    budget = plan_budget(info(), graphs, range(len(graphs)), 10**9, BudgetOptions(1, 0.5, 1), None, cut_rows)
    assert budget.graph_bytes == graph_set_bytes(graphs, VOCAB, cut_rows)
    assert budget.kv_bytes == 10**9 - 10_000 - budget.graph_bytes
    second = size_text(budget.graph_bytes - brute_bytes(graphs))
    line = f"of that, {second} for the second parts of steps of {cut_rows} rows and more"
    assert [one for one in budget.lines if "second part" in one] == [line] * bool(cut)


LADDER = ladder({"prefill:1x16": 100, "prefill:2x64": 4000, "decode:1x64": 50, "decode:4x64": 200})


def plan(available: int = 40_000, weights: int = 10_000, **options: Any) -> Budget:
    given_ = {"utilization": 1.0, "graph_reserved": 0.5, **options}
    return plan_budget(info(weights), LADDER, range(len(LADDER)), available, BudgetOptions(**given_))


def test_a_small_share_keeps_the_base_and_says_what_it_dropped() -> None:
    budget = plan(graph_reserved=0.2, graph_prompt_ratio=0.1)
    assert budget.dropped == (1,)
    assert any("not kept: prefill:2x64" in line for line in budget.lines)
    assert plan(graph_reserved=0.5).dropped == ()


@given(st.integers(20_000, 200_000), st.integers(1, 400), st.integers(1, 40), st.integers(0, 3000))
@example(22_962, 131, 7, 1095)
def test_a_draft_has_its_part(available: int, kv_block: int, block_size: int, fixed: int) -> None:
    """Whatever its blocks are, both caches fit, and the model's could not have a block more."""
    draft = DraftMemory(fixed, 500, kv_block, block_size)
    options = BudgetOptions(1.0, 0.5)
    try:
        budget = plan_budget(info(), LADDER, range(len(LADDER)), available, options, draft)
    except BudgetError:
        # The same without a draft, or the draft is what is too much.
        return
    room = available - 10_000 - fixed - 500 - budget.graph_bytes

    def both(kv_bytes: int) -> int:
        tokens = (kv_bytes // KV_BLOCK - 1) * BLOCK
        return kv_bytes + (-(-tokens // block_size) + 1) * kv_block

    assert both(budget.kv_bytes) <= room
    assert both(budget.kv_bytes + KV_BLOCK) > room
    assert budget.kv_bytes // KV_BLOCK > MAX_LEN // BLOCK
    assert any("the draft's" in line for line in budget.lines)


@given(st.integers(22_000, 200_000), st.integers(1, 150_000))
def test_what_encodes_images_has_its_part(available: int, tower: int) -> None:
    """The rest is divided as if the model were alone with it."""
    options, order = BudgetOptions(1.0, 0.5), range(len(LADDER))
    try:
        alone = plan_budget(info(), LADDER, order, available - tower, options)
    except BudgetError:
        with pytest.raises(BudgetError):
            plan_budget(info(), LADDER, order, available, options, tower_bytes=tower)
        return
    beside = plan_budget(info(), LADDER, order, available, options, tower_bytes=tower)
    assert (beside.kept, beside.kv_bytes) == (alone.kept, alone.kv_bytes)
    assert any(f"encoding of images {size_text(tower)}" in line for line in beside.lines)


def test_a_device_has_less_room_beside_what_encodes_images() -> None:
    options, order, tower = BudgetOptions(1.0, 0.5), range(len(LADDER)), 20_000
    alone = plan_on_device(info(), LADDER, order, DeviceRoom(60_000 - tower), options)
    beside = plan_on_device(info(), LADDER, order, DeviceRoom(60_000), options, None, tower)
    assert beside.kv_bytes == alone.kv_bytes
    assert any(f"encoding of images {size_text(tower)}" in line for line in beside.lines)
    with pytest.raises(BudgetError, match=r"what encodes images \(20000\)"):
        plan_on_device(info(), LADDER, order, DeviceRoom(25_000), options, None, tower)


def test_a_tower_takes_what_its_device_allocates() -> None:
    """Weights, arena, inputs, commands, rows, patches, and a KV cache for the largest image."""
    facts = dataclasses.replace(info(7_000), vector_width=24, states_width=50)
    small, large = graph("prefill", 1, 16, 300), graph("prefill", 1, 40, 900)
    inputs, rows, patches = brute_bytes([small, large]) - VOCAB * 4, 24 * 4, 40 * 50 * 4
    assert tower_bytes(facts, [small, large]) == 7_000 + inputs + rows + patches + (3 + 1) * KV_BLOCK


def test_hidden_states_have_memory_of_their_own() -> None:
    facts, order = dataclasses.replace(info(), states_width=30), range(len(LADDER))
    tokens = max(graph.max_tokens for graph in LADDER)
    seeing = plan_budget(facts, LADDER, order, 100_000, BudgetOptions(1.0, 0.9))
    blind = plan_budget(info(), LADDER, order, 100_000, BudgetOptions(1.0, 0.9))
    assert seeing.kept == blind.kept == tuple(order)
    assert blind.kv_bytes - seeing.kv_bytes == tokens * 30 * 4


def test_what_graphs_leave_goes_to_the_cache() -> None:
    assert plan(graph_reserved=0.5).kv_bytes == plan(graph_reserved=0.6).kv_bytes


def test_an_explicit_pool_is_taken_when_it_fits() -> None:
    assert plan(kv_bytes=8000).kv_bytes == 8000


def test_no_pool_is_larger_than_kernels_can_address() -> None:
    narrow = dataclasses.replace(info(), max_kv_blocks=MAX_LEN // BLOCK + 3)
    budget = plan_budget(narrow, LADDER, range(len(LADDER)), 10**9, BudgetOptions(1, 0.5, 1))
    assert budget.kv_bytes == narrow.max_kv_blocks * KV_BLOCK


def test_states_have_a_part_of_the_cache() -> None:
    stateful = dataclasses.replace(info(), state_bytes=1500, max_states=2**31 - 1, max_num_seqs=4)

    def planned(available: int, **options: Any) -> Budget:
        return plan_budget(stateful, LADDER, range(len(LADDER)), available, BudgetOptions(1.0, 0.5, **options))

    budget = planned(60_000)
    pools = stateful.pool_sizes(kv_bytes=budget.kv_bytes)
    assert 1 < pools.num_states < 12
    assert pools.num_bytes == (pools.num_blocks + 1) * KV_BLOCK + (pools.num_states + 1) * 1500 <= budget.kv_bytes
    assert budget.lines[-1].endswith(f"sequences of {MAX_LEN}, and states of {pools.num_states} sequences")
    assert f": {pools.num_blocks} blocks of {BLOCK} tokens" in budget.lines[-1]
    # What neither pool can use stays free.
    narrow = dataclasses.replace(stateful, max_kv_blocks=8)
    assert narrow.pool_sizes(kv_bytes=10**9) == PoolSizes(7, 12, 8 * KV_BLOCK + 13 * 1500)
    # A sequence and a dummy need 5 blocks and 2 states.
    graphs = plan(60_000).graph_bytes
    least = 10_000 + graphs + 5 * KV_BLOCK + 2 * 1500
    assert plan_budget(stateful, LADDER[:1], [0], least, BudgetOptions(1.0, 1.0, 1.0)).kv_bytes >= 8000
    with pytest.raises(BudgetError, match=r"the KV cache of one sequence \(8000\) need"):
        planned(15_000)
    with pytest.raises(BudgetError, match="kv-bytes is 4999 but one KV block takes 1000 bytes, the states"):
        planned(60_000, kv_bytes=4999)


def test_states_are_those_of_the_engine_that_will_run() -> None:
    """Not of one for all the sequences that the artifact was built for."""
    stateful = dataclasses.replace(info(), state_bytes=100, max_states=2**31 - 1, max_num_seqs=4)

    def planned(available: int, model: ArtifactInfo = stateful, **options: Any) -> Budget:
        return plan_budget(model, LADDER, range(len(LADDER)), available, BudgetOptions(1.0, 0.5, **options))

    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 12),
        ({"max_num_seqs": 1}, 3),
        ({"max_num_seqs": 2}, 6),
        ({"num_states": 5}, 5),
        ({"num_states": 1, "max_num_seqs": 4}, 1),
    ]
    for options, states in cases:
        budget = planned(60_000, **options)
        pools = stateful.pool_sizes(kv_bytes=budget.kv_bytes, **options)
        assert pools.num_states == states
        assert f": {pools.num_blocks} blocks of {BLOCK} tokens" in budget.lines[-1]
        assert budget.lines[-1].endswith(f", and states of {states} sequences")
        # The least memory is for as many.
        least = 5 * KV_BLOCK + (states + 1) * 100
        with pytest.raises(BudgetError, match=rf"the KV cache of one sequence \({least}\) need"):
            planned(15_000, **options)
    with pytest.raises(BudgetError, match=r"need \d+: raise it, lower num-states 600 or free memory"):
        planned(60_000, num_states=600)
    with pytest.raises(BudgetError, match="num-states is 2147483647; use at most 2147483646"):
        planned(60_000, num_states=2**31 - 1)
    with pytest.raises(BudgetError, match="num-states is 2 but no layer of this model has a state; leave it out"):
        planned(60_000, info(), num_states=2)


def test_a_budget_that_suffices_holds_the_longest_sequence() -> None:
    """Whatever share of it states get."""
    for state_bytes in (700, 1300, 3000, 9000):
        stateful = dataclasses.replace(info(), state_bytes=state_bytes, max_states=2**31 - 1, max_num_seqs=4)
        suffices = False
        for available in range(24_000, 90_000, 100):
            try:
                budget = plan_budget(stateful, LADDER, range(len(LADDER)), available, BudgetOptions(1.0, 0.5))
            except BudgetError:
                assert not suffices
                continue
            suffices = True
            assert stateful.pool_sizes(kv_bytes=budget.kv_bytes).num_blocks * BLOCK >= MAX_LEN
        assert suffices


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_bytes": 30_000}, "kv-bytes 30000 is more than the .* lower one or raise the other"),
        ({"available": 12_000}, "weights .*10000.* raise it or free memory"),
        ({"utilization": 0.3}, "memory-utilization 0.3 of 40000 bytes is 12000"),
        ({"graph_reserved": 0.01}, "graph-reserved-memory 0.01 .* use at least 0"),
        ({"available": 24_000, "graph_reserved": 1.0, "graph_prompt_ratio": 0.8}, "lower graph-reserved-memory 1"),
        ({"utilization": 0.0}, "memory-utilization 0 is out of range"),
        ({"utilization": 1.5}, "memory-utilization 1.5 is out of range"),
        ({"graph_reserved": float("nan")}, "graph-reserved-memory nan is out of range"),
        ({"graph_prompt_ratio": -0.1}, "graph-prompt-ratio -0.1 is out of range: use 0 to 1"),
    ],
)
def test_budgets_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BudgetError, match=says):
        plan(**options)


def test_the_least_share_an_error_names_is_enough() -> None:
    with pytest.raises(BudgetError) as caught:
        plan(graph_reserved=0.01)
    share = float(str(caught.value).rpartition("at least ")[2])
    assert plan(graph_reserved=share).kept


def test_without_traffic_graphs_are_kept_in_the_order_of_a_warm_up() -> None:
    odd = ladder({f"{phase}:{b}x{s}": 1 for phase in ("prefill", "decode") for b in (1, 2, 4) for s in (16, 32, 64)})
    buckets = [Bucket(graph.phase, graph.batch, graph.seq) for graph in odd]
    assert size_order(odd) == warm_order(buckets, base_graphs(odd))[0]


@pytest.mark.parametrize(
    ("reserved", "ratio", "says"), [(0.2, None, "graph-reserved-memory 0.2"), (None, 0.5, "graph-prompt-ratio 0.5")]
)
def test_shares_of_no_budget_are_refused(reserved: float | None, ratio: float | None, says: str) -> None:
    with pytest.raises(BudgetError, match=f"{says} divides a budget: give memory-utilization"):
        budget_of(None, reserved, ratio)
    assert budget_of(None, None, None) is None
    assert budget_of(0.5, reserved, ratio, 7) == BudgetOptions(
        0.5, 0.1 if reserved is None else reserved, 0.3 if ratio is None else ratio, 7
    )


def test_base_graphs_hold_the_most_sequences_and_the_longest_context() -> None:
    odd = ladder({"prefill:1x64": 1, "prefill:4x16": 1, "decode:8x16": 1, "decode:1x64": 1, "decode:2x32": 1})
    assert base_graphs(odd) == (0, 2, 3)
    assert base_graphs(LADDER) == (1, 3)
    assert base_graphs(LADDER, smallest=True) == (0, 3)
