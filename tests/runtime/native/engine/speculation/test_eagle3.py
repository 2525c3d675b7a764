"""EAGLE-3 heads: what they compute, what they guess, and that their guesses change no bit of any result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmc.compiler.config import CompileConfig
from llmc.compiler.drafting_heads import compile_with_head
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.loader import check_checkpoint
from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer

from support.compiled import Pages, replay
from support.eagle3_heads import ReferenceEagle3, make_eagle3
from support.engine_driver import MIXED_LADDER, bits, drive, random_ids
from support.head_runs import check_guesses, left_states, mixed_requests

pytestmark = pytest.mark.native
OPTIONS: dict[str, Any] = {"buckets": MIXED_LADDER, "dtype": "f32", "block_size": 16}
READ = (0, 1, 3)
"""Behind no layer, the first, and the last of three."""
PREFILL = 0
"""The smallest graph of a prompt, the first of a ladder."""


HEADS: dict[str, dict[str, Any]] = {
    # With the model's embedding and size; named as the head of a trainer.
    "sharing": {"layer": "layers.0"},
    "apart": {"hidden": 48, "norm_before_residual": True},
}


@pytest.fixture(scope="module", params=["sharing", pytest.param("apart", marks=pytest.mark.exhaustive)])
def pair(
    request: pytest.FixtureRequest,
    llama: tuple[Path, Artifact],
    kernel_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Artifact, Artifact]:
    """(directory of a head of few of its model's tokens, the model whose graphs leave states, the head)."""
    root = tmp_path_factory.mktemp("eagle3")
    # Shorter texts than its model: it begins anew now and then.
    fields = {"max_position_embeddings": 48, "eagle_aux_hidden_state_layer_ids": READ, **HEADS[request.param]}
    folder = make_eagle3(root / "head", llama[0], **fields)
    config = CompileConfig(llama[0], root / "llama.llmc", cache_dir=kernel_cache, jobs=1, tokenizer="none", **OPTIONS)
    _, report = compile_with_head(config, folder)
    return folder, Artifact(config.output), Artifact(report.artifact)


@pytest.fixture(scope="module")
def reference(llama: tuple[Path, Artifact], pair: tuple[Path, Artifact, Artifact]) -> ReferenceEagle3:
    return ReferenceEagle3(pair[0], llama[0], READ)


@pytest.fixture(scope="module")
def liked(reference: ReferenceEagle3) -> dict[int, float]:
    """Tokens that both draw: a head of random weights is right now and then only where few tokens are likely."""
    tokens = torch.arange(200) + reference.weights["d2t"]
    return {int(token): 6.0 for token in tokens[::50]} | {3: 4.0}


def test_logits_of_a_head_are_those_of_the_definition(
    pair: tuple[Path, Artifact, Artifact], reference: ReferenceEagle3
) -> None:
    """The first step is given zeros as states, the second one those that the first has left."""
    tokens, pages, states = random_ids(3, 8), Pages(8, 16), torch.zeros(8, reference.config["hidden_size"])
    with Replayer(pair[2], num_threads=2, num_blocks=8) as replayer:
        first = replay(replayer, PREFILL, pages, [(0, tokens[:4], 0)])
        second = replay(replayer, PREFILL, pages, [(0, tokens[4:], 4)])
    states[4:] = reference.states(tokens[:4], states[:4])
    expected = reference.logits(reference.states(tokens, states))
    assert (first[0] == np.float32(-1e30)).sum() == 515 - 200
    np.testing.assert_allclose(first[0], expected[3], atol=1e-4, rtol=0)
    np.testing.assert_allclose(second[0], expected[7], atol=1e-4, rtol=0)


def test_the_states_that_a_model_leaves(pair: tuple[Path, Artifact, Artifact], reference: ReferenceEagle3) -> None:
    """Of all rows, in a graph that computes logits of the last one only."""
    tokens = random_ids(4, 8)
    expected = reference.joined(tokens)
    found = left_states(pair[1], PREFILL, tokens, expected[0].numel()).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def test_guesses_of_a_head_change_no_bit(
    llama: tuple[Path, Artifact], pair: tuple[Path, Artifact, Artifact], liked: dict[int, float]
) -> None:
    """Nor do the states that are left: the plain run is of a model that leaves none."""
    _, model, head = pair
    requests = mixed_requests(liked)
    found = []
    guesses: dict[str, Any] = {"draft": head, "speculate_tokens": 3, "speculate_always": 1}
    for artifact, more in ((llama[1], {}), (model, guesses)):
        with Engine(artifact, num_threads=1, max_num_seqs=4, num_blocks=9, **more) as engine:
            found.append([[bits(o) for o in of] for of in drive(engine, requests)])
            if more:
                assert engine.stats.num_preemptions > 0
                assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens
    assert found[0] == found[1]


def test_a_head_guesses_what_the_definition_guesses(
    pair: tuple[Path, Artifact, Artifact], reference: ReferenceEagle3, liked: dict[int, float]
) -> None:
    check_guesses(*pair[1:], reference, reference.joined, liked, 515)


def test_a_model_without_states_takes_no_head(
    llama: tuple[Path, Artifact], pair: tuple[Path, Artifact, Artifact]
) -> None:
    with pytest.raises(LlmcError, match=r"reads hidden states of \d+ numbers, and the model leaves none; compile"):
        Engine(llama[1], num_threads=1, draft=pair[2], speculate_tokens=3)


def test_configurations_of_heads(llama: tuple[Path, Artifact], tmp_path: Path) -> None:
    """As trainers write them; and one sentence each on those that do not fit."""

    def opened(folder: Path, *, leave_states: bool = False) -> ModelConfig:
        config = CompileConfig(llama[0], tmp_path / "out", head=folder, leave_states=leave_states, **OPTIONS)
        source = config.open_source()
        check_checkpoint(source.config(), source.checkpoint())
        return source.config()

    def made(name: str, **fields: Any) -> Path:
        return make_eagle3(tmp_path / name, llama[0], **fields)

    # Of three layers these are all.
    assert opened(made("plain"), leave_states=True).states_layers == (0, 1, 2)
    outputs = {"eagle_aux_hidden_state_layer_ids": [0, 2], "use_aux_hidden_state": True}
    head = made("outputs", eagle_config=outputs, layers=2, hidden=48, norm_before_residual=True)
    model = opened(head, leave_states=True)
    assert (model.states_layers, model.states_width) == ((1, 3), 48)
    assert (opened(head).states_width, opened(head).normed_states) == (48, True)
    whole = made("whole", tokens=None, architectures=["LlamaForCausalLMEagle3"])
    assert opened(whole).draft_vocab_size == 0
    nested = made("nested", layer="layers.0")
    layer = json.loads((nested / "config.json").read_text())
    speculators = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "norm_before_fc": False,
                   "draft_vocab_size": layer.pop("draft_vocab_size"), "transformer_layer_config": layer}  # fmt: skip
    (nested / "config.json").write_text(json.dumps(speculators))
    assert opened(nested) == opened(tmp_path / "plain")

    for name, fields, sentence in (
        ("small", {"hidden_size": 48}, r"hidden_size is 48, but hidden_size of .*model is 60; give the model that"),
        ("target", {"target_hidden_size": 64}, r"target_hidden_size is 64, but hidden_size of .*model is 60; give"),
        ("vocab", {"vocab_size": 300}, r"vocab_size is 300, but vocab_size of .*model is 515; give the model"),
        ("many", {"draft_vocab_size": 600}, r"draft_vocab_size is 600, more than the 515 tokens of the model"),
        ("layers", {"num_hidden_layers": 2}, r"the head has 2 layers, but llmc has heads of EAGLE-3 with one only"),
        ("type", {"model_type": "qwen3"}, r"has a layer of 'qwen3', but llmc has heads .* with a layer of llama only"),
        (
            "ids",
            {"eagle_aux_hidden_state_layer_ids": [0, 2, 9]},
            r"has 3 layers, but the head .* 0, 2, 9 of them",
        ),
        ("normed", {"norm_before_fc": True}, r"norm_before_fc is True, which llmc does not know of eagle3 models"),
    ):
        folder = made(name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(ModelError, match=sentence):
            opened(folder)
    for name, change, sentence in (
        ("apart", {"d2t": None}, r"lacks the tensor d2t of 200 integers, which names its tokens; download"),
        ("twice", {"d2t": torch.zeros(200, dtype=torch.int64) - torch.arange(200)}, r"does not name 200 different"),
    ):
        folder = made(name)
        tensors = load_file(folder / "model.safetensors") | change
        save_file({key: value for key, value in tensors.items() if value is not None}, folder / "model.safetensors")
        with pytest.raises(ModelError, match=sentence):
            opened(folder)
