"""Compiled graphs against transformers on the same weights: in every bucket of a small ladder, padded ones included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.compiler.targets.cpu.target import Target
from llmc.runtime.binding import Artifact, Engine, Replayer, SamplingParams

from support.compiled import (
    Pages,
    check_every_bucket,
    compared,
    compile_tiny,
    random_tokens,
    relative_error,
    replay,
)
from support.engine_driver import bits, drive
from support.kernel_harness import targets_here
from support.marks import mostly_highest
from support.parity import FAMILIES, LADDER, check_bits, reference_logits
from support.tiny_models import make_tiny_model
from support.verified import Claim, verifies

pytestmark = pytest.mark.native


@pytest.fixture(scope="module", params=list(FAMILIES))
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> tuple[Path, Artifact]:
    family, overrides = FAMILIES[request.param]
    root = tmp_path_factory.mktemp(request.param)
    model = make_tiny_model(root / "model", family, **overrides)
    artifact = compile_tiny(model, root / "artifact", kernel_cache, buckets=LADDER, dtype="f32")
    return model, artifact


@verifies(lambda compiled: [Claim(FAMILIES[compiled][0])])
def test_every_bucket_matches_transformers(compiled: tuple[Path, Artifact]) -> None:
    model, artifact = compiled
    assert len(artifact.graphs()) == 14
    tokens = random_tokens(artifact.info.vocab_size, 48)
    check_every_bucket(artifact, tokens, reference_logits(model, tokens))


def test_bits_do_not_depend_on_batch_chunks_or_threads(compiled: tuple[Path, Artifact]) -> None:
    check_bits(compiled[1])


def test_guesses_change_no_bit(compiled: tuple[Path, Artifact]) -> None:
    """Texts that repeat themselves, checked in decode graphs with several rows of a sequence."""
    artifact = compiled[1]
    prompts = [random_tokens(artifact.info.vocab_size, 9 + seed, seed) * 2 for seed in range(3)]
    liked = dict.fromkeys(random_tokens(artifact.info.vocab_size, 2), 20.0)
    common: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "logit_bias": liked, "num_logprobs": 2}
    told = []
    for guesses in (0, 3):
        requests = [
            (prompt, SamplingParams(temperature=0.8 * (i % 2), seed=i, n=1 + i // 2, **common))
            for i, prompt in enumerate(prompts)
        ]
        with Engine(artifact, num_threads=1, speculate_tokens=guesses, speculate_always=1) as engine:
            told.append([[bits(output) for output in outputs] for outputs in drive(engine, requests)])
            assert (engine.stats.accepted_tokens > 0) == (guesses > 0)
    assert told[0] == told[1]


# bf16 keeps 8 bits of mantissa and float16 11: weights and activations each round by up to 2^-9 or 2^-12 of the sum of
# two neighbours, through a few layers.
@verifies(lambda family, dtype: [Claim(FAMILIES.get(family, (family, {}))[0], dtype=dtype)])
@mostly_highest(
    "dtype, bound, family",
    targets_here("cooperlake", "x86-64-v4", "x86-64-v3"),
    [("bf16", 3e-2, "qwen2")],
    [("f16", 4e-3, "qwen2-tied")],
    [("f16", 4e-3, "qwen2")],
)
def test_16_bits(dtype: str, bound: float, family: str, target: Target, tmp_path: Path, kernel_cache: Path) -> None:
    kind, overrides = FAMILIES.get(family, (family, {}))
    model = make_tiny_model(tmp_path / "model", kind, **overrides)
    options = {"buckets": LADDER, "dtype": dtype, "target": target.name}
    artifact = compile_tiny(model, tmp_path / "out", kernel_cache, **options)
    check_bits(artifact)
    text = [int(t) for t in np.random.default_rng(1).integers(3, artifact.info.vocab_size, 24)]
    expected = reference_logits(model, text)
    compared(artifact)
    replayer = Replayer(artifact, num_threads=2, num_blocks=16)
    graph = next(i for i, g in enumerate(artifact.graphs()) if g.phase == "prefill" and g.max_tokens >= 24)
    logits = replay(replayer, graph, Pages(16, artifact.info.block_size), [(0, text, 0)])
    assert relative_error(logits, expected[-1:]) < bound
    same_dtype = reference_logits(model, text, {"bf16": torch.bfloat16, "f16": torch.float16}[dtype])
    assert relative_error(logits, same_dtype[-1:]) < 2 * bound  # which transformers rounds more often
