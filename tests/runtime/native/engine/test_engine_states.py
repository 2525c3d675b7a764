"""Models whose layers have states in place of keys and values, in slots of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.models.sources.registry import open_source
from llmc.runtime.binding import Artifact, Engine, SamplingParams
from llmc.runtime.binding.hand_over import HandedText, blocks_of_part, least_part_bytes
from llmc.runtime.debug.replay import CommandReplay
from llmc.runtime.graph_view import commands_of
from llmc.runtime.graphs_file import read_graphs

from support.artifacts import made_once
from support.company import check_company
from support.compiled import compile_tiny
from support.engine_driver import MIXED_LADDER, assert_greedy, bits, drive, greedy, random_ids
from support.families import CASES
from support.marks import rare
from support.repeating import repeating_requests, run_twice
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native
# Layers with states of heads and a window, with a window alone, with experts, of one block, and beside attention.
CASES_WITH_STATES = ("qwen3_5_text", "lfm2", "nemotron_h", *map(rare, ("falcon_h1", "granitemoehybrid", "lfm2_moe")))


@pytest.fixture(scope="module", params=CASES_WITH_STATES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    """The folder of a model, and of its artifact."""

    def make(root: Path) -> None:
        family, fields = CASES[request.param]
        model = make_tiny_model(root / "model", family, **fields)
        options = {"buckets": f"{MIXED_LADDER},mixed=[8]x[24]", "dtype": "f32", "block_size": 16}
        compile_tiny(model, root / "out", kernel_cache, **options).close()

    return made_once(tmp_path_factory, f"states-{request.param}", make)


@pytest.fixture
def artifact(made: Path) -> Iterator[Artifact]:
    with Artifact(made / "out") as opened:
        yield opened


def test_bits_do_not_depend_on_company(artifact: Artifact) -> None:
    check_company(artifact)


def test_greedy_ids_are_those_of_transformers(made: Path, artifact: Artifact) -> None:
    """Also from the prefix cache, and of prompts that end where a block does."""
    start = random_ids(4, 64)
    prompts = [start[:48], start, random_ids(1, 5), start[:33], [*start[:32], 7], random_ids(3, 1)]
    with Engine(artifact, num_threads=2, max_tokens_per_step=20) as engine:
        for _ in range(2):
            outputs = drive(engine, [(prompt, greedy(max_tokens=20)) for prompt in prompts])
            for prompt, (output,) in zip(prompts, outputs, strict=True):
                assert_greedy(made / "model", prompt, output.ids)
        assert engine.stats.prefix_hit_tokens > 0


def test_commands_are_shown_with_layers_of_the_model(made: Path) -> None:
    """Not with those of the KV cache, of which a layer may have none, or two."""
    tables, config = read_graphs(made / "out"), open_source(made / "model").config()
    for graph in tables.graphs:
        shown = [
            (view.layer, int(buffer.name.split(".")[0].removeprefix(f"{buffer.kind}_")))
            for view in commands_of(tables, graph)
            for buffer in view.buffers
            if buffer.kind in ("k_pool", "v_pool")
        ]
        assert {kv_layer for _, kv_layer in shown} == set(range(config.num_kv_layers))
        assert all(layer == config.cached_layers[kv_layer] for layer, kv_layer in shown)
    replay = CommandReplay(made / "out", 3)
    _, values = replay.step([3, 4, 5])
    assert {value.layer for value in values if value.cached} == set(config.cached_layers)


def test_another_engine_takes_them_over(artifact: Artifact) -> None:
    prompt = random_ids(5, 90)
    request = (prompt, greedy(12, num_logprobs=2))
    with (
        Engine(artifact, num_threads=1, num_blocks=32) as first,
        Engine(artifact, num_threads=1, num_blocks=32) as second,
        Engine(artifact, num_threads=1, num_blocks=32, prefix_cache=0) as alone,
    ):
        drive(first, [(prompt, greedy(1))])
        given, taken = HandedText(first, prompt), HandedText(second, prompt)
        least = least_part_bytes(first)
        # Of the parts, the last one has the states.
        for first_block, max_bytes, num_blocks in (
            (0, least, 1),
            (1, least + first.handed_block_bytes, 2),
            (3, 2**62, 2),
        ):
            part = given.export(first_block, max_bytes)
            assert part.num_blocks == blocks_of_part(part.data) == num_blocks
            given.seal(part)
            taken.check(part.data)
            assert taken.enter(part.data) == first_block + num_blocks
            assert taken.num_cached() == (5 if first_block == 3 else 0)
        assert given.export(5).num_blocks == 0
        (found,), (wanted,) = drive(second, [request]), drive(alone, [request])
        assert found[0].num_cached == 80
        assert second.stats.num_states > second.stats.num_kept_states > 0
        assert [bits(one) for one in found] == [bits(one) for one in wanted]


@pytest.mark.parametrize("options", [{"num_blocks": 60}, {"num_blocks": 9, "num_states": 4}])
def test_guesses_change_no_bit(artifact: Artifact, options: dict[str, int]) -> None:
    requests = repeating_requests()
    plain, without = run_twice(artifact, requests, **options)
    guessing = {"speculate_tokens": 4, "speculate_always": 1, **options}
    found, stats = run_twice(artifact, requests, **guessing)
    assert found == plain
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.num_steps < without.num_steps
    assert (stats.num_preemptions > 0) == (options["num_blocks"] == 9)
    # How many guesses go along when that is measured depends on the machine: what comes out does not.
    assert run_twice(artifact, requests, **{**guessing, "speculate_always": 0})[0] == plain


def test_beams_take_their_states_along(artifact: Artifact) -> None:
    """The same beams in any company, from the cache, and where memory makes them give way."""
    params = SamplingParams(n=3, beam_width=3, max_tokens=24, ignore_eos=True)
    beams, others = [(random_ids(seed, 15 + seed), params) for seed in range(4)], [(random_ids(9, 40), greedy(30))]
    with Engine(artifact, num_threads=1, num_blocks=64, prefix_cache=0) as engine:
        alone = [[bits(one) for one in drive(engine, [beam])[0]] for beam in beams]
    for num_blocks, tokens in ((100, 7), (14, 20)):
        with Engine(artifact, num_threads=2, num_blocks=num_blocks, max_tokens_per_step=tokens) as engine:
            for _ in range(2):
                found = drive(engine, [*beams, *others])
                assert [[bits(one) for one in outputs] for outputs in found[: len(beams)]] == alone
            assert num_blocks > 14 or engine.stats.num_preemptions > 0
