"""Guesses for models whose layers have states, by a head and by a draft: they change no bit of any result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.config import CompileConfig
from llmc.compiler.drafting_heads import compile_with_head
from llmc.runtime.binding import Artifact, Engine

from support.compiled import compile_tiny
from support.eagle3_heads import make_eagle3
from support.engine_driver import MIXED_LADDER, bits, drive
from support.families import CASES
from support.head_runs import mixed_requests
from support.opencl import needs_opencl, program_cache
from support.repeating import repeating_requests, run_twice
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native
OPTIONS: dict[str, Any] = {"buckets": MIXED_LADDER, "dtype": "f32", "block_size": 16}
LIKED = {token: 6.0 for token in (3, 20, 71, 130)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, fields = CASES["qwen3_5_text"]
    return make_tiny_model(tmp_path_factory.mktemp("states") / "model", family, **fields)


def test_guesses_of_a_head_change_no_bit(model: Path, kernel_cache: Path) -> None:
    family, fields = CASES["llama"]
    sizes = {name: json.loads((model / "config.json").read_text())[name] for name in ("hidden_size", "vocab_size")}
    like = make_tiny_model(model.parent / "like", family, **{**fields, **sizes})
    head = make_eagle3(model.parent / "head", like, eagle_aux_hidden_state_layer_ids=(0, 1, 3))
    config = CompileConfig(model, model.parent / "out", cache_dir=kernel_cache, jobs=1, tokenizer="none", **OPTIONS)
    _, report = compile_with_head(config, head)
    found = []
    with (
        compile_tiny(model, model.parent / "plain", kernel_cache, **OPTIONS) as plain,
        Artifact(config.output) as leaving,
        Artifact(report.artifact) as guessing,
    ):
        guesses: dict[str, Any] = {"draft": guessing, "speculate_tokens": 3, "speculate_always": 1}
        for artifact, more in ((plain, {}), (leaving, guesses)):
            with Engine(artifact, num_threads=1, max_num_seqs=4, num_blocks=9, **more) as engine:
                found.append([[bits(o) for o in of] for of in drive(engine, mixed_requests(LIKED))])
                if more:
                    assert engine.stats.num_preemptions > 0
                    assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens
    assert found[0] == found[1]


@needs_opencl
def test_guesses_change_no_bit_on_opencl(
    model: Path, kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nor where sequences give way to others, and their states and blocks go to the host's memory."""
    cache = program_cache(tmp_path_factory)
    built = compile_tiny(model, model.parent / "opencl", kernel_cache, target="opencl", **OPTIONS)
    with built as artifact:
        requests, options = repeating_requests(), {"num_threads": 0, "program_cache": cache}
        plain, without = run_twice(artifact, requests, num_blocks=60, **options)
        for num_blocks in (60, 9):
            guessing = {"speculate_tokens": 4, "speculate_always": 1, "num_blocks": num_blocks, "swap_bytes": 1 << 22}
            found, stats = run_twice(artifact, requests, **guessing, **options)
            assert found == plain
            assert 0 < stats.accepted_tokens < stats.drafted_tokens
            assert (stats.num_preemptions > 0) == (num_blocks == 9)
            assert num_blocks == 9 or stats.num_steps < without.num_steps
