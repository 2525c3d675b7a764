"""A model's own layer for multi-token prediction: what it computes, what it guesses, and that no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.drafting_heads import compile_with_head
from llmc.compiler.resolve import resolve
from llmc.models.errors import ModelError
from llmc.models.loader import check_checkpoint
from llmc.runtime.binding import Artifact, Engine, Replayer

from support.compiled import Pages, compile_tiny, replay
from support.engine_driver import MIXED_LADDER, bits, drive, random_ids
from support.families import CASES
from support.head_runs import check_guesses, left_states, mixed_requests
from support.mtp_heads import ReferenceMtp, add_mtp
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.native
OPTIONS: dict[str, Any] = {"buckets": MIXED_LADDER, "dtype": "f32", "block_size": 16}
PREFILL = 0
"""The smallest graph of a prompt, the first of a ladder."""
LIKED, FEWER = {3: 9.0, 20: 9.0, 71: 9.0}, {3: 9.0, 130: 9.0}
"""A layer of random weights is right now and then only where few tokens are likely."""
MODELS = (
    "qwen3_5", "mimo", *(
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3", "glm4_moe", "glm4_moe_lite")
    ),
)  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with such a layer; Qwen's have layers with states, too."""
    family, fields = CASES[request.param]
    return add_mtp(make_tiny_model(tmp_path_factory.mktemp("mtp") / "model", family, **fields))


@pytest.fixture(scope="module")
def pair(model: Path, kernel_cache: Path) -> tuple[Artifact, Artifact]:
    """(the model whose graphs leave states, the head)."""
    output = model.parent / "model.llmc"
    config = CompileConfig(model, output, cache_dir=kernel_cache, jobs=1, tokenizer="none", **OPTIONS)
    _, report = compile_with_head(config, None)
    assert report.artifact == model.parent / "model-mtp.llmc"
    return Artifact(output), Artifact(report.artifact)


@pytest.fixture(scope="module")
def reference(model: Path) -> ReferenceMtp:
    return ReferenceMtp(model)


def test_logits_are_those_of_the_definition(pair: tuple[Artifact, Artifact], reference: ReferenceMtp) -> None:
    """The first step is given zeros as states, the second one those that the first has left."""
    tokens, pages, states = random_ids(3, 8), Pages(8, 16), torch.zeros(8, 60)
    with Replayer(pair[1], num_threads=2, num_blocks=8) as replayer:
        first = replay(replayer, PREFILL, pages, [(0, tokens[:4], 0)])
        second = replay(replayer, PREFILL, pages, [(0, tokens[4:], 4)])
    states[4:] = reference.states(tokens[:4], states[:4])
    expected = reference.logits(reference.states(tokens, states))
    np.testing.assert_allclose(first[0], expected[3], atol=1e-4, rtol=0)
    np.testing.assert_allclose(second[0], expected[7], atol=1e-4, rtol=0)


def test_the_states_that_a_model_leaves(pair: tuple[Artifact, Artifact], reference: ReferenceMtp) -> None:
    tokens = random_ids(4, 8)
    np.testing.assert_allclose(left_states(pair[0], PREFILL, tokens, 60), reference.of_model(tokens), atol=2e-4, rtol=0)


def test_guesses_change_no_bit(model: Path, pair: tuple[Artifact, Artifact], kernel_cache: Path) -> None:
    """Nor do the states that are left: the plain run is of a model that leaves none."""
    found = []
    guesses: dict[str, Any] = {"draft": pair[1], "speculate_tokens": 3, "speculate_always": 1}
    with compile_tiny(model, model.parent / "plain", kernel_cache, **OPTIONS) as plain:
        for artifact, more in ((plain, {}), (pair[0], guesses)):
            with Engine(artifact, num_threads=1, max_num_seqs=4, num_blocks=8, **more) as engine:
                found.append([[bits(o) for o in of] for of in drive(engine, mixed_requests(LIKED))])
                if more:
                    assert engine.stats.num_preemptions > 0
                    assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens
    assert found[0] == found[1]


def test_it_guesses_what_the_definition_guesses(pair: tuple[Artifact, Artifact], reference: ReferenceMtp) -> None:
    """Without a prefix cache, for which steps of models with states leave some in place of guesses."""
    check_guesses(*pair, reference, reference.of_model, FEWER, 515, prefix_cache=0)


def test_models_without_such_a_layer(llama: tuple[Path, Artifact], tmp_path: Path) -> None:
    def refused(folder: Path, **options: Any) -> None:
        resolved = CompileConfig(folder, tmp_path / "out", mtp=True, **{**OPTIONS, **options})
        assert resolve(resolved).model is not None
        resolved.open_source().checkpoint()

    with pytest.raises(ModelError, match=r"knows no layer for multi-token prediction of llama models; leave out --mtp"):
        refused(llama[0])
    family, fields = CASES["glm4_moe"]
    folder = make_tiny_model(tmp_path / "without", family, **fields)
    with pytest.raises(ModelError, match=r"which has the tensor model\.layers\.3\.eh_proj\.weight; leave out --mtp"):
        refused(folder)
    add_mtp(folder)
    refused(folder)
    with pytest.raises(CompileError, match="--mtp and --tensor-parallel do not go together yet"):
        refused(folder, tensor_parallel=2)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.hnorm.weight"]
    save_file(tensors, folder / "model.safetensors")
    source = CompileConfig(folder, tmp_path / "out", mtp=True).open_source()
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.3\.hnorm\.weight of shape \[60\]"):
        check_checkpoint(source.config(), source.checkpoint())
