"""GGUF files of every architecture: they have the configuration and every bit of the checkpoints that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from llmc.models import ModelError, open_source
from llmc.models.families.around_text import AROUND_TEXT
from llmc.models.loader import load_parameters
from llmc.models.pooled import Task
from llmc.models.registry import FAMILIES
from llmc.models.rotary import Rope
from llmc.models.sources.gguf.architectures import ARCHITECTURES
from llmc.quantize.formats.codes import E8M0, Codes

from support.families import CASES
from support.gguf_cases import ENCODERS, TOLD, told_fields
from support.gguf_converter import write_converted
from support.gguf_models import CASES as OLDER
from support.tiny_encoders import make_encoder
from support.tiny_models import make_tiny_model

WITHOUT_FILES = {
    "aquila", "codegen", "gpt_neo", "gptj", "helium", "internlm", "mimo", "minimax", "minimax_text_01", "opt",
    "telechat", "vaultgemma",
}  # fmt: skip
"""Families that llama.cpp's converter makes no file of."""
NOT_READ = {
    "cwm", "exaone_moe", "glm4_moe_lite", "hunyuan_v1_moe", "hyperclovax", "jais2", "ministral",
    "ministral3", "olmo3", "solar_open", "youtu",
    *(family.model_type for family in AROUND_TEXT),
}  # fmt: skip
"""Families whose files, if there are any, llmc does not read; of those around a text model, it reads that one."""
IN_OTHERS = {
    "bamba": "granitehybrid", "chatglm": "chatglm", "deepseek_v3": "deepseek2", "gemma3": "gemma3",
    "gemma3n": "gemma3n", "gemma4": "gemma4", "gemma4_unified": "gemma4", "gemma4_unified_text": "gemma4",
    "granitemoeshared": "granitemoe",
    "internlm3": "llama", "kimi_k2": "deepseek2", "kimi_k25": "deepseek2", "llama4": "llama4", "mistral": "llama",
    "mixtral": "llama", "qwen2_5_vl": "qwen2vl", "qwen2_vl": "qwen2vl", "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe", "qwen3_vl": "qwen3vl", "qwen3_vl_moe": "qwen3vlmoe", "roberta": "bert",
    "xlm-roberta": "bert",
}  # fmt: skip
"""Families whose files are of an architecture that another family reads, or may."""


def test_every_family_has_an_architecture_or_none_is_there() -> None:
    read = {one.model_type for one in ARCHITECTURES.values()}
    assert read | WITHOUT_FILES | NOT_READ | IN_OTHERS.keys() == FAMILIES.keys()
    assert set(IN_OTHERS.values()) <= ARCHITECTURES.keys()
    tested = {CASES[case][0] for case in TOLD} | {family for family, _ in OLDER.values()} | ENCODERS.keys()
    assert read <= tested


def rounded(value: Any) -> Any:
    """With numbers as float32 has them, as files do."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: rounded(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return tuple(map(rounded, value))
    return f"{value:.6g}" if isinstance(value, float) else value


def check(model: Path, path: Path, metadata: dict[str, Any], **changes: Any) -> None:
    """changes: of the configuration that the file implies."""
    source = open_source(model)
    expected = source.config()
    write_converted(model, path, expected, metadata)
    found = open_source(path)
    config = found.config()
    same = replace(expected, eos_token_ids=(), bos_token_id=None, dtype="f32", model_type=config.model_type, **changes)
    tiled = config.delta_net is not None and config.delta_net.tiled
    if tiled and expected.delta_net is not None:
        same = replace(same, delta_net=replace(expected.delta_net, tiled=True))
    if expected.mamba is not None:
        # Files have no bounds of steps.
        assert expected.mamba.least_step <= 1e-12
        same = replace(same, mamba=replace(expected.mamba, least_step=0.0))
    assert rounded(config) == rounded(same)
    theirs = {p.name: p.value() for p in load_parameters(expected, source.checkpoint(), "f32")}
    ours = {p.name: p.value() for p in load_parameters(config, found.checkpoint(), "f32")}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        # Value heads in another order; `test_gguf_delta_nets.py` compares logits.
        pair = [np.sort(one, axis=None) if tiled and ".attention." in name else one for one in (ours[name], value)]
        assert pair[0].tobytes() == pair[1].tobytes(), name


@pytest.mark.parametrize("case", TOLD)
def test_a_file_is_read_as_its_checkpoint(case: str, tmp_path: Path) -> None:
    family, sizes = told_fields(case)
    check(make_tiny_model(tmp_path / "m", family, **sizes), tmp_path / "m.gguf", TOLD[case][1])


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_is_read_as_its_checkpoint(family: str, tmp_path: Path) -> None:
    make_encoder(tmp_path / "m", family)
    check(tmp_path / "m", tmp_path / "m.gguf", {"attention.causal": False, **ENCODERS[family]})


def test_experts_in_mxfp4_keep_their_numbers(tmp_path: Path) -> None:
    """As published files of gpt-oss have them."""
    family, sizes = CASES["gpt_oss"]
    even = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 20, "swiglu_limit": 7.0}
    model = make_tiny_model(tmp_path / "m", family, **{**sizes, **even})
    path = tmp_path / "m.gguf"

    def type(name: str) -> Type:
        return Type.MXFP4 if name.endswith("_exps.weight") else Type.F32

    stood = write_converted(model, path, open_source(model).config(), type=type)
    source = open_source(path)
    parameters = {p.name: p for p in load_parameters(source.config(), source.checkpoint(), "bf16")}
    down, gate_up = (parameters[f"layers.1.mlp.experts.{name}.weight"] for name in ("down", "gate_up"))
    for parameter in (down, gate_up):
        assert parameter.stored is not None
        assert parameter.stored.format == Codes("e2m1", 32, E8M0)
    wide = replace(down, dtype="f32").value().reshape(5, 64, 64)
    assert np.array_equal(wide, stood["blk.1.ffn_down_exps.weight"])
    both = replace(gate_up, dtype="f32").value().reshape(5, 2, 64, 64)
    assert np.array_equal(both[:, 0], stood["blk.1.ffn_gate_exps.weight"])
    assert np.array_equal(both[:, 1], stood["blk.1.ffn_up_exps.weight"])


def test_parts_of_gates_that_no_file_has(tmp_path: Path) -> None:
    """Of Gemma 3n: what is no short decimal is taken as it is; other lists are refused."""
    family, sizes = told_fields("gemma3n_text")
    model, path = make_tiny_model(tmp_path / "m", family, **sizes), tmp_path / "m.gguf"
    config, key = open_source(model).config(), "activation_sparsity_scale"

    def cutoffs(scales: list[float] | None) -> tuple[float | None, ...]:
        write_converted(model, path, config, {**TOLD["gemma3n_text"][1], key: scales})
        streams = open_source(path).config().streams
        assert streams is not None
        return streams.cutoffs

    assert list(cutoffs([3.0123456] * 7)) == pytest.approx([3.0123456] * 7, rel=1e-6)
    # Seven layers, where all of the published models' first ten are cut.
    assert cutoffs(None) == (None,) * 7
    for wrong in ([0.0] * 6, [0.0] * 6 + [float("nan")]):
        with pytest.raises(ModelError, match=rf"gemma3n\.{key} is an array of \d where a list of 7 numbers below"):
            cutoffs(wrong)


def test_a_part_of_each_head_is_rotated_as_by_llama_cpp(tmp_path: Path) -> None:
    """In every family, also where config.json of a model could not say so."""
    model, path = make_tiny_model(tmp_path / "m", "llama", head_dim=32), tmp_path / "m.gguf"
    config = open_source(model).config()
    for part in (32, 16):
        write_converted(model, path, config, {"rope.dimension_count": part})
        assert open_source(path).config().rope == replace(config.rope, dim=part)


WRONG_GEMMA4: dict[str, tuple[dict[str, Any], str]] = {
    "no kinds": ({"attention.sliding_window_pattern": None}, r"lacks the metadata .*sliding_window_pattern"),
    "a window at the end": ({"attention.sliding_window_pattern": [True] * 7}, "where a list that ends with false was"),
    "another value": ({"attention.value_length_swa": 10}, r"value_length_swa is 10 where 12 as the length of a key"),
    "half rotated": ({"rope.dimension_count": 12}, r"dimension_count is 12 where 24 as the length of a key"),
    "no local base": ({"rope.freq_base_swa": None}, r"lacks the metadata gemma4\.rope\.freq_base_swa"),
    "too few widths": ({"feed_forward_length": [100] * 6}, "is an array of 6 where a list of 7 integers was"),
    "another width": ({"feed_forward_length": [100] * 6 + [300]}, "where 100, or twice that in the last 3 layers, was"),
    "no width": ({"feed_forward_length": [0] * 7}, r"feed_forward_length is 0 where an integer from 1"),
    "heads of a layer": ({"attention.head_count_kv": [1] * 6 + [3]}, "layers without a window differ in their heads"),
    "of one with a window": ({"attention.head_count_kv": [1, 1, 3, 1, 1, 1, 1]}, "with a window has heads of its own"),
    "no inputs said": ({"embedding_length_per_layer_input": None}, "lacks the metadata .*length_per_layer_input"),
}


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, sizes = told_fields("gemma4_text")
    return make_tiny_model(tmp_path_factory.mktemp("gemma4") / "m", family, **sizes)


@pytest.mark.parametrize("case", WRONG_GEMMA4)
def test_a_gemma_4_that_is_none(case: str, gemma4: Path, tmp_path: Path) -> None:
    metadata, message = WRONG_GEMMA4[case]
    write_converted(gemma4, tmp_path / "m.gguf", open_source(gemma4).config(), metadata)
    with pytest.raises(ModelError, match=message):
        open_source(tmp_path / "m.gguf").config()


def test_factors_of_gemma_4s_frequencies(gemma4: Path, tmp_path: Path) -> None:
    """Of layers without a window: those that leave a pair unrotated, and others; none are refused."""
    config, path = open_source(gemma4).config(), tmp_path / "m.gguf"
    plain = replace(config, rope=replace(config.rope, dim=24, scaling=None))

    def rope(factors: Sequence[float]) -> Rope:
        write_converted(gemma4, path, plain, more={"rope_freqs.weight": np.array(factors, np.float32)})
        assert open_source(path).config().local_rope == config.local_rope
        return open_source(path).config().rope

    assert rope([1] * 3 + [1e30] * 9) == config.rope
    assert rope([1] * 12) == plain.rope
    odd = rope([1] * 3 + [2] * 9).scaling
    assert odd is not None
    assert (odd.rope_type, odd.frequency_factors) == ("factors", (1,) * 3 + (2,) * 9)
    write_converted(gemma4, path, plain)
    with pytest.raises(ModelError, match=r"lacks the tensor rope_freqs\.weight; convert the model again"):
        open_source(path).config()


def test_latent_attention_of_an_older_file(tmp_path: Path) -> None:
    """Whose lengths are of heads, with one matrix for what makes keys and values."""
    family, sizes = CASES["deepseek_v2"]
    model = make_tiny_model(tmp_path / "m", family, **sizes)
    source, path = open_source(model), tmp_path / "m.gguf"
    latent = source.config().latent
    assert latent is not None
    older = {"attention.key_length_mla": None, "attention.value_length_mla": None, "attention.head_count_kv": 3,
             "attention.key_length": latent.query_dim, "attention.value_length": latent.value_dim}  # fmt: skip
    write_converted(model, path, source.config(), older, latent_apart=False)
    theirs = [p.value() for p in load_parameters(source.config(), source.checkpoint(), "f32")]
    ours = [p.value() for p in load_parameters(open_source(path).config(), open_source(path).checkpoint(), "f32")]
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_reranker_and_what_is_none(tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "m", "xlm-roberta") or tmp_path / "m"
    config = open_source(model).config()
    rng = np.random.default_rng(0)
    head = {"cls.weight": (60, 60), "cls.bias": (60,), "cls.output.weight": (1, 60), "cls.output.bias": (1,)}
    more = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in head.items()}
    metadata = {"attention.causal": False, "pooling_type": 4}
    write_converted(model, tmp_path / "r.gguf", config, metadata, more=more)
    source = open_source(tmp_path / "r.gguf")
    assert source.config().task == Task("rank", "sigmoid")
    ours = {p.name: p.value() for p in load_parameters(source.config(), source.checkpoint(), "f32")}
    assert np.array_equal(ours["pooled.dense.1.linear.weight"], more["cls.output.weight"])
    write_converted(model, tmp_path / "e.gguf", config, {"attention.causal": False, "pooling_type": 1})
    found = open_source(tmp_path / "e.gguf").config().pooled
    assert found is not None
    assert found.pooling == "mean"
    with pytest.raises(ModelError, match=r"--task rank needs a GGUF file of a reranker, with bert\.pooling_type 4"):
        open_source(tmp_path / "e.gguf", task="rank").config()
    write_converted(model, tmp_path / "c.gguf", config, {"attention.causal": True})
    with pytest.raises(ModelError, match=r"bert\.attention\.causal is True where false was expected"):
        open_source(tmp_path / "c.gguf").config()
