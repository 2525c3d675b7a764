"""GGUF files of models with Mamba-2 mixers, and of Granite 4 without: logits are those of transformers, and what is no
such file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.models import ModelError, open_source
from llmc.models.eager import load_model

from support.gguf_cases import TOLD, told_fields
from support.gguf_converter import write_converted
from support.marks import rare
from support.paged_reference import PagedRunner
from support.parity import reference_logits
from support.tiny_models import make_tiny_model

CASES = ["bamba", "granitemoehybrid-experts", "nemotron_h-latent"]
RARE = [
    "granitemoehybrid",
    "granitemoehybrid-attention",
    "granitemoehybrid-attention-experts",
    "granitemoeshared",
    "nemotron_h",
    "nemotron_h-biases",
]


def check(model: Path, path: Path) -> None:
    tokens = [int(t) for t in np.random.default_rng(5).integers(3, 500, 40)]
    found, expected = PagedRunner(load_model(path)).step([tokens])[0].numpy(), reference_logits(model, tokens)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("case", [*CASES, *map(rare, RARE)])
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, sizes = told_fields(case)
    model, path = make_tiny_model(tmp_path / "m", family, **sizes), tmp_path / "m.gguf"
    write_converted(model, path, open_source(model).config(), TOLD[case][1])
    check(model, path)


@pytest.mark.parametrize("case", ["granitemoehybrid-attention", "granitemoehybrid-attention-experts"])
def test_a_flag_says_that_heads_are_not_rotated(case: str, tmp_path: Path) -> None:
    """Also of architectures that have no mixers."""
    family, sizes = told_fields(case, {"position_embedding_type": "nope"})
    model, path = make_tiny_model(tmp_path / "m", family, **sizes), tmp_path / "m.gguf"
    config = open_source(model).config()
    write_converted(model, path, config, {**TOLD[case][1], "rope.scaling.finetuned": False})
    found = open_source(path).config()
    assert found.rope == config.rope
    assert found.rope.theta is None
    check(model, path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mambas")
    return {
        case: make_tiny_model(root / case, told_fields(case)[0], **told_fields(case)[1])
        for case in ("granitemoehybrid", "nemotron_h-latent")
    }


def test_layers_of_multi_token_prediction_are_left_out(models: dict[str, Path], tmp_path: Path) -> None:
    """They have attention and experts at once."""
    model, path = models["nemotron_h-latent"], tmp_path / "m.gguf"
    more = {f"blk.4.{name}.weight": np.ones((4, 60), np.float32) for name in ("attn_q", "ffn_up_exps", "nextn.eh_proj")}
    of_layers = {"attention.head_count_kv": [0, 0, 0, 1, 1], "feed_forward_length": [44, 0, 44, 0, 44]}
    metadata = {**TOLD["nemotron_h-latent"][1], **of_layers, "block_count": 5, "nextn_predict_layers": 1}
    write_converted(model, path, open_source(model).config(), metadata, more=more)
    check(model, path)


@pytest.mark.parametrize(
    ("case", "metadata", "said"),
    [
        (
            "granitemoehybrid",
            {"attention.head_count_kv": [0, 0, 1]},
            r"layer 1 lacks a Mamba-2 mixer \(ssm_out.weight\)",
        ),
        ("granitemoehybrid", {"attention.head_count_kv": [0, 1]}, "a list of 3 integers, each 0 or the same number"),
        (
            "granitemoehybrid",
            {"attention.head_count_kv": [0, -1, 0]},
            "a list of 3 integers, each 0 or the same number",
        ),
        ("granitemoehybrid", {"ssm.time_step_rank": 7}, "a multiple of the 7 heads of ssm.time_step_rank"),
        ("granitemoehybrid", {"ssm.inner_size": 126}, "a multiple of embedding_length 60"),
        ("granitemoehybrid", {"ssm.group_count": 4}, "mamba_n_groups 4 does not divide the 6 heads of mixers"),
        ("granitemoehybrid", {"ssm.state_size": None}, "lacks the metadata granitehybrid.ssm.state_size"),
        ("granitemoehybrid", {"rope.scaling.finetuned": "no"}, "true or false"),
        (
            "nemotron_h-latent",
            {"feed_forward_length": [44, 0, 44, 44]},
            "layer 3 has both attention and a feed-forward",
        ),
        ("nemotron_h-latent", {"feed_forward_length": [44, 44, 44, 0]}, "layer 1 has a Mamba-2 mixer"),
        ("nemotron_h-latent", {"moe_latent_size": 20}, "36, as the rows of ffn_latent_down.weight"),
        ("nemotron_h-latent", {"expert_gating_func": 1}, "where 2 was expected"),
        ("nemotron_h-latent", {"expert_group_count": 3}, "groups of 8 experts"),
        ("nemotron_h-latent", {"attention.sliding_window": 8}, "where 0 was expected"),
    ],
)
def test_what_is_no_such_file_is_refused(
    case: str, metadata: dict[str, Any], said: str, models: dict[str, Path], tmp_path: Path
) -> None:
    write_converted(models[case], tmp_path / "m.gguf", open_source(models[case]).config(), TOLD[case][1] | metadata)
    with pytest.raises(ModelError, match=said):
        open_source(tmp_path / "m.gguf").config()
