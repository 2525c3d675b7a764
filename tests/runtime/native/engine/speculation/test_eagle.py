"""EAGLE heads: what they compute, and that their guesses change no bit of any result."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.drafting_heads import compile_with_head
from llmc.compiler.resolve import resolve
from llmc.compiler.targets.gpu.opencl import OpenClTarget
from llmc.models.errors import ModelError
from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer

from support.compiled import Pages, replay
from support.eagle_heads import ReferenceHead, hidden_states, make_head
from support.engine_driver import MIXED_LADDER, bits, drive, random_ids
from support.head_runs import check_guesses, left_states, mixed_requests

pytestmark = pytest.mark.native
OPTIONS: dict[str, Any] = {"buckets": MIXED_LADDER, "dtype": "f32", "block_size": 16}
PREFILL = 0
"""The smallest graph of a prompt, the first of a ladder."""
LIKED = {int(token): 6.0 for token in random_ids(80, 4)}
"""A head of random weights is right now and then only where few tokens are likely."""


@pytest.fixture(scope="module")
def pair(
    llama: tuple[Path, Artifact], kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Artifact, Artifact]:
    """(directory of a head, the model whose graphs leave states, the head)."""
    root = tmp_path_factory.mktemp("eagle")
    # Shorter texts than its model: it begins anew now and then.
    folder = make_head(root / "head", llama[0], max_position_embeddings=48)
    config = CompileConfig(llama[0], root / "llama.llmc", cache_dir=kernel_cache, jobs=1, tokenizer="none", **OPTIONS)
    _, report = compile_with_head(config, folder)
    assert report.artifact == root / "llama-eagle.llmc"
    return folder, Artifact(config.output), Artifact(report.artifact)


def test_logits_of_a_head_are_those_of_the_definition(
    llama: tuple[Path, Artifact], pair: tuple[Path, Artifact, Artifact]
) -> None:
    """The first step is given zeros as states, the second one those that the first has left."""
    reference, artifact = ReferenceHead(pair[0], llama[0]), pair[2]
    tokens = random_ids(3, 8)
    pages = Pages(8, 16)
    states = torch.zeros(8, 60)
    with Replayer(artifact, num_threads=2, num_blocks=8) as replayer:
        first = replay(replayer, PREFILL, pages, [(0, tokens[:4], 0)])
        second = replay(replayer, PREFILL, pages, [(0, tokens[4:], 4)])
    states[4:] = reference.states(tokens[:4], states[:4])
    expected = reference.logits(reference.states(tokens, states))
    np.testing.assert_allclose(first[0], expected[3], atol=1e-4, rtol=0)
    np.testing.assert_allclose(second[0], expected[7], atol=1e-4, rtol=0)


def test_the_states_that_a_model_leaves(llama: tuple[Path, Artifact], pair: tuple[Path, Artifact, Artifact]) -> None:
    """Of all rows, in a graph that computes logits of the last one only."""
    tokens = random_ids(4, 8)
    found = left_states(pair[1], PREFILL, tokens, 60)
    np.testing.assert_allclose(found, hidden_states(llama[0], tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{"num_blocks": 60}, {"num_blocks": 9}], ids=["room", "preemptions"])
def test_guesses_of_a_head_change_no_bit(
    options: dict[str, Any], llama: tuple[Path, Artifact], pair: tuple[Path, Artifact, Artifact]
) -> None:
    """Nor do the states that are left: the plain run is of a model that leaves none."""
    _, model, head = pair
    requests, found = mixed_requests(LIKED), []
    guesses: dict[str, Any] = {"draft": head, "speculate_tokens": 3}
    for artifact, more in ((llama[1], {}), (model, {**guesses, "speculate_always": 1}), (model, guesses)):
        with Engine(artifact, num_threads=1, max_num_seqs=4, **options, **more) as engine:
            for _ in range(2):  # the second time with what the prefix cache has kept
                outputs = [[bits(o) for o in of] for of in drive(engine, requests)]
            found.append(outputs)
            if "speculate_always" in more:
                assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens
                assert (engine.stats.num_preemptions > 0) == (options["num_blocks"] == 9)
    assert found[0] == found[1] == found[2]


def test_a_head_guesses_what_the_definition_guesses(
    llama: tuple[Path, Artifact], pair: tuple[Path, Artifact, Artifact]
) -> None:
    reference = ReferenceHead(pair[0], llama[0])
    states_of = partial(hidden_states, llama[0])
    check_guesses(*pair[1:], reference, states_of, LIKED, reference.output.shape[0])


def test_heads_that_do_not_fit(llama: tuple[Path, Artifact], pair: tuple[Path, Artifact, Artifact]) -> None:
    head = pair[2]
    with pytest.raises(LlmcError, match="head that reads hidden states of 60 numbers, and the model leaves none; comp"):
        Engine(llama[1], num_threads=1, draft=head, speculate_tokens=3)
    with pytest.raises(LlmcError, match="The artifact is a head that guesses for another model; run that one"):
        Engine(head, num_threads=1)


def test_a_head_for_shorter_texts_than_the_options_ask_for(
    llama: tuple[Path, Artifact], kernel_cache: Path, tmp_path: Path
) -> None:
    folder = make_head(tmp_path / "head", llama[0], max_position_embeddings=48)
    config = CompileConfig(
        llama[0], tmp_path / "m.llmc", cache_dir=kernel_cache, jobs=1, tokenizer="none", dtype="f32", max_model_len=64,
        max_num_seqs=1,
    )  # fmt: skip
    assert [report.max_model_len for report in compile_with_head(config, folder)] == [64, 48]


def test_heads_that_are_refused(llama: tuple[Path, Artifact], tmp_path: Path) -> None:
    def refused(folder: Path, **options: Any) -> None:
        resolved = CompileConfig(llama[0], tmp_path / "out", head=folder, **{**OPTIONS, **options})
        assert resolve(resolved).model is not None
        resolved.open_source().checkpoint()

    with pytest.raises(ModelError, match=r"hidden_size is 48, but that of .*model is 60; give the model"):
        refused(make_head(tmp_path / "small", llama[0], hidden_size=48))
    with pytest.raises(ModelError, match=r"absent is not a directory; pass that of an EAGLE head"):
        refused(tmp_path / "absent")
    good = make_head(tmp_path / "good", llama[0])
    with pytest.raises(CompileError, match="--eagle and --tensor-parallel do not go together yet"):
        refused(good, tensor_parallel=2)
    refused(good, target="opencl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenClTarget, "keeps_states", False)
        with pytest.raises(
            CompileError, match=r"for devices of kind opencl, which keep no rows beside a graph's inputs"
        ):
            refused(good, target="opencl")
