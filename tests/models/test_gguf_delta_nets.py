"""GGUF files of models with gated delta nets: logits are those of transformers, and what is no such file is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from llmc.models import ModelError, open_source
from llmc.models.eager import load_model
from llmc.models.loader import Parameter, load_parameters
from llmc.quantize.formats.integers import Integers

from support.gguf_cases import TOLD, in_blocks, told_fields
from support.gguf_converter import write_converted
from support.paged_reference import PagedRunner
from support.parity import reference_logits
from support.tiny_models import make_tiny_model

# By case: fields, and whether value heads of a key head lie apart in the file.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "qwen3_next": ("qwen3_next", {}, False),
    "qwen3_5": ("qwen3_5_text", {}, True),
    "qwen3_5-three-of-a-key": ("qwen3_5_text", {"linear_num_value_heads": 12}, True),
    "qwen3_5-one-of-a-key": ("qwen3_5_text", {"linear_num_value_heads": 4}, False),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    told, more, tiled = CASES[case]
    family, sizes = told_fields(told, more)
    model, path = make_tiny_model(tmp_path / "m", family, **sizes), tmp_path / "m.gguf"
    write_converted(model, path, open_source(model).config(), TOLD[told][1])
    net = open_source(path).config().delta_net
    assert net is not None
    assert net.tiled == tiled
    tokens = [int(t) for t in np.random.default_rng(5).integers(3, 500, 40)]
    found, expected = PagedRunner(load_model(path)).step([tokens])[0].numpy(), reference_logits(model, tokens)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, sizes = told_fields("qwen3_5_text", in_blocks("qwen3_5_text"))
    return make_tiny_model(tmp_path_factory.mktemp("dense") / "m", family, **sizes)


def parameters(model: Path, path: Path, type: Callable[[str], Type]) -> tuple[dict[str, Parameter], dict[str, Any]]:
    """Parameters of the file, and what its tensors stand for."""
    stood = write_converted(model, path, open_source(model).config(), TOLD["qwen3_5_text"][1], type)
    source = open_source(path)
    return {p.name: p for p in load_parameters(source.config(), source.checkpoint(), "bf16")}, stood


def test_numbers_are_kept(dense: Path, tmp_path: Path) -> None:
    """Of matrices of one type, and of two types that one format holds."""
    types = {"blk.0.attn_gate.weight": Type.Q4_0, "blk.0.ssm_alpha.weight": Type.F32}
    found, stood = parameters(dense, tmp_path / "m.gguf", lambda name: types.get(name, Type.Q8_0))
    joined = {
        "layers.0.attention.inputs": ("blk.0.attn_qkv", "blk.0.attn_gate"),
        "layers.2.attention.inputs": ("blk.2.attn_qkv", "blk.2.attn_gate"),
        "layers.2.attention.gates": ("blk.2.ssm_beta", "blk.2.ssm_alpha"),
        "layers.2.attention.out": ("blk.2.ssm_out",),
    }
    for name, parts in joined.items():
        parameter = found[f"{name}.weight"]
        assert parameter.stored is not None
        assert parameter.stored.format == Integers(8, 32, scale_kind="f16")
        expected = np.concatenate([stood[f"{part}.weight"] for part in parts])
        assert np.array_equal(replace(parameter, dtype="f32").value(), expected), name
    # One part is not quantized.
    assert found["layers.0.attention.gates.weight"].stored is None


def test_layers_by_a_list_and_one_more_for_prediction(dense: Path, tmp_path: Path) -> None:
    """Newer files list their layers. That of multi-token prediction has attention and is left out."""
    path, config = tmp_path / "m.gguf", open_source(dense).config()
    metadata = {"block_count": 4, "nextn_predict_layers": 1, "attention.recurrent_layers": [True, False, True, False]}
    more = {"blk.3.attn_q.weight": (4, 96), "blk.3.nextn.eh_proj.weight": (96, 192)}
    write_converted(dense, path, config, metadata, more={n: np.zeros(shape, np.float32) for n, shape in more.items()})
    source = open_source(path)
    net = source.config().delta_net
    assert net is not None
    assert net.layers == (0, 2)
    assert source.config().num_layers == 3
    assert len(list(load_parameters(source.config(), source.checkpoint(), "f32"))) > 30


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another period": (
        {},
        r"layer 1 lacks a gated delta net \(ssm_out\.weight\), other than .*full_attention_interval",
    ),
    "another list": (
        {"attention.recurrent_layers": [True, False, False]},
        r"layer 2 has a gated delta net \(ssm_out\.weight\), other than metadata qwen35\.attention\.recurrent_layers",
    ),
    "a short list": ({"attention.recurrent_layers": [True, False]}, r"is an array of 2 where a list of 3 flags was"),
    "no list": ({"attention.recurrent_layers": 1}, r"recurrent_layers is 1 where an array was expected"),
    "no taps": (
        {"full_attention_interval": 2, "ssm.conv_kernel": None},
        r"lacks the metadata qwen35\.ssm\.conv_kernel",
    ),
    "half a head": ({"full_attention_interval": 2, "ssm.inner_size": 66}, "is 66 where a multiple of the 8 heads of"),
    "odd heads": (
        {"full_attention_interval": 2, "ssm.group_count": 3},
        "8 is not a multiple of linear_num_key_heads 3",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_metadata_that_do_not_fit(case: str, dense: Path, tmp_path: Path) -> None:
    metadata, message = WRONG[case]
    write_converted(dense, tmp_path / "m.gguf", open_source(dense).config(), metadata)
    with pytest.raises(ModelError, match=message):
        open_source(tmp_path / "m.gguf").config()


def test_an_older_file(dense: Path, tmp_path: Path) -> None:
    """In which one matrix makes queries, keys, values and gates."""
    joined = {"blk.0.ssm_in.weight": np.zeros((8, 96), np.float32)}
    write_converted(dense, tmp_path / "m.gguf", open_source(dense).config(), TOLD["qwen3_5_text"][1], more=joined)
    with pytest.raises(ModelError, match=r"has the tensor blk\.0\.ssm_in\.weight, as older files of gated delta nets"):
        open_source(tmp_path / "m.gguf").config()
