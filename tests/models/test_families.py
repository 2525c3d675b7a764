"""Every family against transformers on the same weights, in float32, eagerly, over a paged cache."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from llmc import manifest_schema
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.resolve import resolve
from llmc.models import ModelError, load_config, load_parameters, open_source
from llmc.models.blocks.decoder import Embedding
from llmc.models.config import Experts, Heads, ModelConfig
from llmc.models.context import sound_scaling, trained_length
from llmc.models.convert import Array
from llmc.models.eager import load_model
from llmc.models.registry import FAMILIES, build_model, get_family

from support.families import CASES, LONG
from support.paged_reference import PagedRunner, check_equals_transformers
from support.tiny_models import greedy_of_transformers, make_tiny_model, reference_model
from support.verified import Limit, refuses


def parameters_of(path: Path) -> dict[str, Array]:
    source = open_source(path)
    return {p.name: p.value() for p in load_parameters(source.config(), source.checkpoint(), "f32")}


def test_every_family_has_a_case() -> None:
    assert {family for family, _ in CASES.values()} == {name for name, family in FAMILIES.items() if family.generates}


def test_a_manifest_has_what_a_config_has() -> None:
    assert {field.name for field in dataclasses.fields(ModelConfig)} == manifest_schema.Model.model_fields.keys()
    assert {field.name for field in dataclasses.fields(Experts)} == manifest_schema.Experts.model_fields.keys()
    assert {field.name for field in dataclasses.fields(Heads)} == manifest_schema.Heads.model_fields.keys()


@refuses(lambda: [Limit("gpt2", "texts longer than the table of positions")])
def test_no_text_is_longer_than_the_table_of_positions(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "gpt2", num_hidden_layers=1)
    with pytest.raises(CompileError, match="max-model-len is 129, but the model has a table of 128 positions"):
        resolve(CompileConfig(model=path, output=tmp_path / "out", max_model_len=129))


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    path = make_tiny_model(tmp_path / "m", family, **overrides)
    check_equals_transformers(path)
    check_tables(load_config(path))


def check_tables(config: ModelConfig) -> None:
    """The weight map knows the matrices whose rows are picked, which no scheme rounds as a linear layer's."""
    with torch.device("meta"):
        model = build_model(config, "f32", 32)
    picked = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Embedding)}
    targets = get_family(config.model_type).weight_map(config).targets
    assert {target.name for target in targets if target.table} == picked


@pytest.mark.parametrize("changes", [{"intermediate_size": 60}, {"intermediate_size": 100}, {}])
def test_opt_has_blocks_of_ffn_dim(changes: dict[str, int], tmp_path: Path) -> None:
    """Some config.json have intermediate_size besides, which transformers does not read."""
    path = make_tiny_model(tmp_path / "m", "opt", ffn_dim=100, word_embed_proj_dim=60)
    fields = json.loads((path / "config.json").read_text())
    fields.pop("intermediate_size", None)
    (path / "config.json").write_text(json.dumps({**fields, **changes}))
    assert load_config(path).intermediate_size == 100
    check_equals_transformers(path)
    del fields["ffn_dim"]
    (path / "config.json").write_text(json.dumps({**fields, **changes}))
    assert load_config(path).intermediate_size == transformers.OPTConfig(**changes).ffn_dim


def test_a_minimax_of_transformers_rotates_whole_heads(tmp_path: Path) -> None:
    """Whatever rotary_dim says: it is read of its authors' model_type alone."""
    path = make_tiny_model(tmp_path / "m", "minimax", **CASES["minimax"][1])
    fields = json.loads((path / "config.json").read_text())
    head_dim = load_config(path).head_dim
    assert load_config(path).rope.dim == head_dim
    (path / "config.json").write_text(json.dumps({**fields, "rotary_dim": head_dim}))
    check_equals_transformers(path)
    (path / "config.json").write_text(json.dumps({**fields, "rotary_dim": head_dim // 2}))
    with pytest.raises(ModelError, match=r"rotary_dim is .*, which llmc does not know of minimax models"):
        load_config(path)
    whole = open_source(path, allow_unknown_config=True).config()
    assert whole.rope.dim == head_dim
    (path / "config.json").write_text(json.dumps(fields))
    assert whole == load_config(path)
    # transformers computes the same with the key as without it.
    text = torch.tensor([list(range(3, 20))])
    with torch.no_grad():
        without = reference_model(path)(text).logits
        (path / "config.json").write_text(json.dumps({**fields, "rotary_dim": head_dim // 2}))
        assert torch.equal(reference_model(path)(text).logits, without)


def test_longrope_takes_the_long_factors_beyond_its_original_context(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "phi3", rope_parameters=LONG, max_position_embeddings=256)
    prompt = torch.randint(3, 515, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    expected_ids, expected = greedy_of_transformers(path, prompt, 4)
    short, _ = PagedRunner(load_model(path, max_len=64)).greedy(prompt[:20], 4)
    ids, logits = PagedRunner(load_model(path, max_len=256)).greedy(prompt, 4)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (ids, len(short)) == (expected_ids, 4)


@pytest.mark.parametrize("family", ["qwen", "telechat"])
def test_texts_beyond_those_of_training(family: str, tmp_path: Path) -> None:
    """As the authors' code runs one text of the greatest length: its frequencies are those of every text."""
    fields: dict[str, Any] = {"seq_length": 32} if family == "qwen" else {"training_seqlen": 48, "base_seqlen": 32}
    path = make_tiny_model(tmp_path / "m", family, **fields)
    text = torch.randint(3, 515, (128,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = reference_model(path)(torch.tensor([text])).logits[0]
    runner = PagedRunner(load_model(path, max_len=128))
    rows = [runner.step([text[begin : begin + 32]])[0] for begin in range(0, 128, 32)]
    assert (torch.cat(rows) - expected).abs().max() <= 1e-4 * expected.abs().max()
    plain = PagedRunner(load_model(path, max_len=load_config(path).max_position_embeddings)).step([text[:30]])[0]
    with torch.no_grad():
        short = reference_model(path)(torch.tensor([text[:30]])).logits[0]
    assert (plain - short).abs().max() <= 1e-4 * short.abs().max()
    assert (plain - expected[:30]).abs().max() > 1e-2 * expected.abs().max()


def test_qwen_without_either(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "qwen", seq_length=32, use_dynamic_ntk=False, use_logn_attn=False)
    config = load_config(path)
    assert (config.rope.scaling, config.query_growth) == (None, None)


def test_a_stretched_gemma_reads_as_much_as_it_says(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "gemma3")
    fields = json.loads((path / "config.json").read_text())
    stretched = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    fields["text_config"]["rope_parameters"]["full_attention"] = stretched
    (path / "config.json").write_text(json.dumps(fields))
    config = load_config(path)
    assert config.rope.scaling is not None
    assert (config.rope.scaling.factor, trained_length(config)) == (8.0, 128)


@refuses(lambda: [Limit(family, "texts read in both directions") for family in ("gemma4", "gemma4_text")])
def test_what_a_gemma_4_may_not_say(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "gemma4_text", **CASES["gemma4_text-large"][1])
    fields = json.loads((path / "config.json").read_text())
    by_layer, ropes = fields["per_layer_config"], fields["rope_parameters"]
    half = {**ropes["sliding_attention"], "partial_rotary_factor": 0.4}
    assert by_layer.keys() == {"1", "2"}
    for told, said in (
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ({"rope_parameters": {**ropes, "sliding_attention": half}}, "partial_rotary_factor 0.4 does nothing with"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25, which llmc does not know"),
        ({"per_layer_config": {**by_layer, "0": {"head_dim": 8}}}, "0: a layer with a window has heads of its own"),
        ({"per_layer_config": {"1": by_layer["1"]}}, "layers without a window differ in their heads"),
        ({"per_layer_config": {**by_layer, "2": {"sliding_window": 8}}}, "2: 'sliding_window' of a layer is not"),
        (
            {"per_layer_config": None, "num_global_key_value_heads": 3},
            "4 is not a multiple of the 3 KV heads of layers",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "lacks full_attention or sliding_attention"),
        (
            {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3},
            "top_k_experts 3 is more than num_experts 2",
        ),
    ):
        (path / "config.json").write_text(json.dumps({**fields, **told}))
        with pytest.raises(ModelError, match=said):
            load_config(path)


@pytest.mark.parametrize("place", ["experts", "moe.experts"])
def test_experts_of_a_gemma_4_one_by_one(place: str, tmp_path: Path) -> None:
    """As programs that quantize them write them."""
    family, fields = CASES["gemma4_text-experts"]
    path = make_tiny_model(tmp_path / "m", family, **fields)
    file, before, tensors = path / "model.safetensors", parameters_of(path), load_file(path / "model.safetensors")
    apart = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(3):
        gate_up, down = (tensors[f"model.layers.{layer}.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
        for expert in range(len(down)):
            gate, up = np.split(gate_up[expert], 2)
            for name, tensor in (("gate", gate), ("up", up), ("down", down[expert])):
                apart[f"model.layers.{layer}.{place}.{expert}.{name}_proj.weight"] = np.ascontiguousarray(tensor)
    save_file(apart, file)
    after = parameters_of(path)
    assert before.keys() == after.keys()
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())


def test_what_a_gemma_4_need_not_say(tmp_path: Path) -> None:
    """Tensors that nothing reads, and ends of a text that the whole model has."""
    path = make_tiny_model(tmp_path / "m", "gemma4", **CASES["gemma4"][1])
    before, tensors = parameters_of(path), load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, 7]}))
    (path / "generation_config.json").unlink(missing_ok=True)
    unread = ("k_proj.weight", "v_proj.bias", "k_norm.weight", "v_norm.weight")
    others = {f"model.language_model.layers.6.self_attn.{name}": np.ones(4, np.float32) for name in unread}
    save_file({**tensors, **others}, path / "model.safetensors")
    assert all(parameters_of(path)[name].tobytes() == value.tobytes() for name, value in before.items())
    found = load_config(path)
    assert found.eos_token_ids == (2, 7)
    assert found.kv_head_counts == dict.fromkeys(range(4), 1)


def test_a_longer_context_of_a_gemma_4(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "gemma4_text", **CASES["gemma4_text-large"][1])
    before, fields = load_config(path), json.loads((path / "config.json").read_text())
    advice = sound_scaling(before, 512)
    (path / "config.json").write_text(json.dumps({**fields, "rope_parameters": advice}))
    after = load_config(path)
    assert trained_length(after) == 512
    assert (after.rope.dim, after.rope.theta, after.local_rope) == (
        before.rope.dim,
        before.rope.theta,
        before.local_rope,
    )


def test_a_gemma_4_as_published_says_the_same(tmp_path: Path) -> None:
    """Not layer by layer, but what layers without a window have."""
    path = make_tiny_model(tmp_path / "m", "gemma4_text", **CASES["gemma4_text-large"][1])
    expected, fields = load_config(path), json.loads((path / "config.json").read_text())
    del fields["per_layer_config"]
    published = {"num_global_key_value_heads": 2, "global_head_dim": 16}
    (path / "config.json").write_text(json.dumps({**fields, **published}))
    assert load_config(path) == expected
    assert expected.full_heads == Heads(4, 2, 16, keys_are_values=True)


@pytest.mark.parametrize(("family", "prefix"), [("bloom", "transformer."), ("gpt2", "transformer."), ("opt", "model.")])
def test_a_checkpoint_of_the_decoder_alone(family: str, prefix: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", family, tie_word_embeddings=True, num_hidden_layers=1)
    file = path / "model.safetensors"
    before, tensors = parameters_of(path), load_file(file)
    save_file({name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, file)
    after = parameters_of(path)
    assert before.keys() == after.keys()
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())


def test_the_first_telechat_ties_its_embedding_untold(tmp_path: Path) -> None:
    """As TeleChat-7B's authors publish it; their code for it stretches frequencies beyond half as many tokens."""
    path = make_tiny_model(tmp_path / "m", "telechat", tie_word_embeddings=True, n_layer=1)
    file, before = path / "model.safetensors", parameters_of(path)
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}, file)
    fields = json.loads((path / "config.json").read_text())
    told = {name: value for name, value in fields.items() if name not in ("tie_word_embeddings", "base_seqlen")}
    (path / "config.json").write_text(json.dumps({**told, "training_seqlen": 8192}))
    after, scaling = parameters_of(path), load_config(path).rope.scaling
    assert before.keys() == after.keys()
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())
    assert scaling is not None
    assert (scaling.original_max_position_embeddings, scaling.factor) == (4096, 2.0)
    (path / "config.json").write_text(json.dumps({**told, "tie_word_embeddings": True}))
    later = load_config(path).rope.scaling
    assert later is not None
    assert later.original_max_position_embeddings == 8192


_LIGHTNING = "layers of linear (lightning) attention, as published models have"
# What a config.json says, what its refusal names, and how docs/models.md calls it.
REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "bloom-residual": (
        "bloom",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection",
        "residuals after norms",
    ),
    "gpt2-layers": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx",
        "scores scaled by the layer's index",
    ),
    "mpt-positions": ("mpt", {"attn_config": {"alibi": False}}, "without ALiBi", "learned positions"),
    "mpt-logits": ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale", "scaled logits"),
    "opt-width": ("opt", {"word_embed_proj_dim": 30}, "word_embed_proj_dim 30", "an embedding of another width (350M)"),
    "phi-norms": ("phi", {"qk_layernorm": True}, "qk_layernorm", "QK norm"),
    "chatglm-first": ("chatglm", {"position_encoding_2d": True}, "ChatGLM-6B, the first one", "ChatGLM-6B"),
    "chatglm-divided": (
        "chatglm",
        {"rope_ratio": 4, "seq_length": 32768},
        "rope_ratio 4 that divides positions",
        "ChatGLM2-6B-32K",
    ),
    "chatglm-norms": ("chatglm", {"rmsnorm": False}, "rmsnorm False", "layer norms"),
    "dbrx-power": (
        "dbrx",
        {"ffn_config": {"moe_normalize_expert_weights": 2}},
        "moe_normalize_expert_weights 2",
        "weights of experts normalized by squares",
    ),
    "hunyuan-experts": (
        "hunyuan_v1_moe",
        {"moe_topk": [2, 2, 1]},
        "moe_topk .* differs between layers",
        "layers that differ in experts",
    ),
    "internlm2-reward": ("internlm2", {"reward_token_id": 5}, "a reward model", "reward models"),
    "llama4-experts": ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok 2", "several experts per token"),
    "minimax-linear": (
        "minimax",
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        r"layer 1 has linear attention \(lightning attention\), as have 1 of 3 layers",
        _LIGHTNING,
    ),
    "minimax-untold": ("minimax", {"layer_types": None}, "layer 1 has linear", _LIGHTNING),
    "minimax_m2-linear": ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "layer 1 has linear", "linear attention"),
    "minimax_text_01-linear": (
        "minimax_text_01",
        {"attn_type_list": [1, 1, 0]},
        "layer 2 has linear",
        _LIGHTNING,
    ),
    "minimax_text_01-postnorm": (
        "minimax_text_01",
        {"postnorm": False},
        "postnorm is not true",
        "residuals of another kind",
    ),
    "phimoe-scales": (
        "phimoe",
        {"rope_parameters": {**LONG, "short_mscale": 1.0, "long_mscale": 1.2}},
        "a short_mscale that is not long_mscale",
        "different scales for short and long texts",
    ),
    "phimoe-three": ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok 3", "more than two experts per token"),
    "nemotron_h-biases": (
        "nemotron_h",
        {"mlp_bias": True},
        "experts beside which mlp_bias gives others biases",
        "experts beside layers with biases",
    ),
    "telechat-norm": ("telechat", {"embed_layernorm": True}, "embed_layernorm", "a norm on the embedding"),
    "gemma3n-sizes": (
        "gemma3n_text",
        {"intermediate_size": [100] * 6 + [96]},
        "intermediate_size differs between layers",
        "feed-forward blocks of different sizes",
    ),
    "gemma3-cap": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "soft-capped scores"),
}


@refuses(lambda case: [Limit(REFUSED[case][0], REFUSED[case][3])])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_out_of_reach_is_refused_by_name(case: str, tmp_path: Path) -> None:
    family, changes, named, _ = REFUSED[case]
    path = make_tiny_model(tmp_path / "m", family, **CASES[family][1])
    fields = json.loads((path / "config.json").read_text())
    of_text = fields.get("text_config", {})
    fields |= {name: {**of_text, **new} if name == "text_config" else new for name, new in changes.items()}
    (path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=named):
        load_config(path)
