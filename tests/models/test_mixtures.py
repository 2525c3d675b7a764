"""Mixtures of experts: both ways in which checkpoints have them, modules that are passed over, and what is refused."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from llmc.buckets.cost import ModelShape
from llmc.models import ModelError, load_config, load_parameters, open_source
from llmc.models.blocks.experts import mixed
from llmc.models.convert import Array
from llmc.quantize.formats.base import Quantized

from support.families import CASES
from support.mxfp4_experts import make_mxfp4_model
from support.tiny_models import make_tiny_model


def parameters_of(path: Path) -> dict[str, Array]:
    source = open_source(path)
    return {p.name: p.value() for p in load_parameters(source.config(), source.checkpoint(), "f32")}


def made(case: str, folder: Path) -> Path:
    family, overrides = CASES[case]
    return make_tiny_model(folder / "model", family, **overrides)


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "glm4_moe", "lfm2_moe"])
def test_one_tensor_of_all_experts_is_as_good_as_one_of_each(case: str, tmp_path: Path) -> None:
    path = made(case, tmp_path)
    before, tensors = parameters_of(path), load_file(path / "model.safetensors")
    names = {"mixtral": ("block_sparse_moe", ("w1", "w3"), "w2"), "lfm2_moe": ("feed_forward", ("w1", "w3"), "w2")}
    whole = "feed_forward" if case == "lfm2_moe" else "mlp"
    block, gates, down = names.get(case, ("mlp", ("gate_proj", "up_proj"), "down_proj"))
    config = load_config(path)
    assert config.experts is not None
    for layer in config.experts.layers:
        prefix, stacked = f"model.layers.{layer}.{block}.experts", f"model.layers.{layer}.{whole}.experts"

        def of_each(part: str, prefix: str = prefix) -> list[Array]:
            assert config.experts is not None
            return [tensors.pop(f"{prefix}.{i}.{part}.weight") for i in range(config.experts.count)]

        first, second = (of_each(gate) for gate in gates)
        tensors[f"{stacked}.gate_up_proj"] = np.stack(
            [np.concatenate(pair) for pair in zip(first, second, strict=True)]
        )
        tensors[f"{stacked}.down_proj"] = np.stack(of_each(down))
        if block != whole:
            tensors[f"model.layers.{layer}.mlp.gate.weight"] = tensors.pop(f"model.layers.{layer}.{block}.gate.weight")
    save_file(tensors, path / "model.safetensors")
    after = parameters_of(path)
    assert before.keys() == after.keys()
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())


@pytest.mark.parametrize(
    ("case", "name"), [("glm4_moe", "model.layers.3.eh_proj.weight"), ("ernie4_5_moe", "model.mtp_block.0.weight")]
)
def test_what_guesses_further_tokens_is_passed_over(case: str, name: str, tmp_path: Path) -> None:
    path = made(case, tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, name: np.ones((3, 4), np.float32)}, path / "model.safetensors")
    assert parameters_of(path)
    save_file({**tensors, "model.other.weight": np.ones((3, 4), np.float32)}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.other\.weight .* which this architecture does not use"):
        parameters_of(path)


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than 4"),
        ("dots1", {"n_group": 3}, "2 of 3 groups of 8 experts"),
        ("dots1", {"n_group": 8, "topk_group": 4}, "groups of less than two"),
        ("dots1", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than 4"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
        ("qwen2_moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek_v2", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7, an even number"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek_v3", {"num_key_value_heads": 1}, "num_key_value_heads is 1 where latent attention has 3"),
    ],
)
def test_what_is_out_of_reach_is_refused_by_name(
    case: str, changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    path = made(case, tmp_path)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, **changes}))
    with pytest.raises(ModelError, match=named):
        load_config(path)


@pytest.mark.parametrize("noise", [0.01, 0.2, 0.6])
def test_sparse_mixing(noise: float) -> None:
    logits = torch.randn(3000, 7, generator=torch.Generator().manual_seed(3))
    weights, chosen = sparsemixer(logits, noise, training=False)
    scores = mixed(logits, noise)
    assert torch.equal(chosen, logits.topk(2, dim=-1).indices)
    torch.testing.assert_close(scores.gather(1, chosen), weights)
    assert (weights < 1).any()
    equal = torch.tensor([[2.0, -1.0, 2.0]])
    first = sparsemixer(equal, noise, training=False)[0][0, 0]
    torch.testing.assert_close(mixed(equal, noise)[0, ::2], first.expand(2))


def test_weights_of_deepseek_v2_are_normalised_or_scaled(tmp_path: Path) -> None:
    path = made("deepseek_v2", tmp_path)
    fields = json.loads((path / "config.json").read_text())
    for changes, normalised, scale, layers in (
        ({}, False, 1.7, (1, 2)),
        ({"norm_topk_prob": True}, True, 1.0, (1, 2)),
        ({"moe_layer_freq": 2}, False, 1.7, (2,)),
    ):
        (path / "config.json").write_text(json.dumps({**fields, **changes}))
        experts = load_config(path).experts
        assert experts is not None
        assert (experts.normalised, experts.scale, experts.layers) == (normalised, scale, layers)
    (path / "config.json").write_text(json.dumps({**fields, "first_k_dense_replace": 3}))
    assert load_config(path).experts is None


def test_costs_count_the_experts_in_use() -> None:
    config = {
        "num_attention_heads": 2,
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "vocab_size": 10,
        "intermediate_size": 99,
    }
    config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
    shape = ModelShape.from_config({**config, "shared_expert_intermediate_size": 7})
    attention, one = 3 * 4 * 8 * 8, 3 * 3 * 8 * 5
    assert shape.layer_weights == attention + 2 * one + 3 * 3 * 8 * 7
    # Every choice of two experts by each of three tokens, and what they use in the mean.
    choices = list(product(combinations(range(4), 2), repeat=3))
    used = sum(len({expert for chosen in choice for expert in chosen}) for choice in choices) / len(choices)
    read = shape.layer_weights_read(np.array([1.0, 3.0, 100.0])) - shape.layer_weights
    np.testing.assert_allclose(read, [0, (used - 2) * one, 2 * one])
    plain = ModelShape.from_config({**config, "num_experts": None})
    assert plain.intermediate == 99
    assert plain.layer_weights_read(np.array([7.0])).tolist() == [plain.layer_weights]


def test_costs_of_latent_attention() -> None:
    """Of DeepSeek-V2-Lite."""
    config = {
        "num_attention_heads": 16, "hidden_size": 2048, "num_hidden_layers": 27, "vocab_size": 102400,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None,
        "intermediate_size": 10,
    }  # fmt: skip
    shape = ModelShape.from_config(config)
    assert shape.kv_elements == 27 * 576
    assert shape.ops_per_pair == 27 * 2 * 16 * (576 + 512)
    attention = 2048 * 16 * 192 + 2048 * 576 + 16 * 256 * 512 + 16 * 128 * 2048
    assert shape.layer_weights == 27 * (attention + 3 * 2048 * 10)
    with_rank = ModelShape.from_config({**config, "q_lora_rank": 100})
    assert shape.layer_weights - with_rank.layer_weights == 27 * (2048 * 16 * 192 - 100 * (2048 + 16 * 192))


def test_mxfp4_experts_are_those_of_floats(tmp_path: Path) -> None:
    """Of gpt-oss: their numbers are kept, whichever way gate and up lie."""
    floats, path = make_mxfp4_model(tmp_path)
    expected, found = parameters_of(floats), parameters_of(path)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    source = open_source(path)
    kept = {p.name for p in load_parameters(source.config(), source.checkpoint(), "f32") if p.stored is not None}
    assert kept == {f"layers.{layer}.mlp.experts.{part}.weight" for layer in range(3) for part in ("gate_up", "down")}
    for parameter in load_parameters(source.config(), source.checkpoint(), "f32"):
        if parameter.stored is not None:
            numbers = Quantized.empty(parameter.stored.format, 7, parameter.shape[1])
            parameter.stored.read(90, numbers)
            np.testing.assert_array_equal(numbers.value(), found[parameter.name][90:97])
