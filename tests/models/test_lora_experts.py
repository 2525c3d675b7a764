"""Adapters of experts that are one tensor, merged: values are those that PEFT's formula makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmc.models.errors import ModelError

from support.adapters import make_adapter, merged_model, merged_values
from support.expert_adapters import BEFORE_SWAP, add_experts
from support.families import CASES
from support.mxfp4_experts import make_mxfp4_model
from support.tiny_models import make_tiny_model

BOTH = ("experts.gate_up_proj", "experts.down_proj")
# As [experts, rows, columns], one by one in the checkpoint or not; as [experts, columns, rows], in pairs, and where
# PEFT takes it for the other.
CASES_OF_EXPERTS = (
    "mixtral", "qwen3_moe", "deepseek_v3", "granitemoe", "qwen3_5_moe", "qwen3_vl_moe", "gpt_oss", "llama4",
    "gemma4_text-experts",
)  # fmt: skip


def tiny(path: Path, case: str, **fields: Any) -> Path:
    family, overrides = CASES[case]
    return make_tiny_model(path, family, **{**overrides, **fields})


def adapter_of(
    path: Path, model: Path, parameters: tuple[str, ...] = BOTH, rank: int = 4, version: str = "0.21.2", **config: Any
) -> Path:
    plain = make_adapter(path, model, ("o_proj",), rank=rank, seed=5)
    return add_experts(plain, model, parameters, rank=rank, version=version, **config)


def config(adapter: Path, **fields: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change(adapter: Path, pairs: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Gives an adapter lora_A and lora_B of more modules."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    for module, pair in pairs.items():
        for side, value in zip("AB", pair, strict=True):
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = value.astype(np.float32)
    save_file(tensors, adapter / "adapter_model.safetensors")


def check(model: Path, adapter: Path, tmp_path: Path, *kinds: str) -> None:
    """The merged values are those of the formula, and weights of such kinds have changed."""
    merged_model(model, adapter).save_pretrained(tmp_path / "merged")
    found, expected, plain = merged_values(model, adapter), merged_values(tmp_path / "merged"), merged_values(model)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    changed = {
        name.partition(".")[2].partition(".")[2] for name in plain if not np.array_equal(found[name], plain[name])
    }
    assert changed == {"attention.out.weight", *(f"mlp.experts.{kind}.weight" for kind in kinds)}


@pytest.mark.parametrize("case", CASES_OF_EXPERTS)
def test_values_are_those_of_the_formula(case: str, tmp_path: Path) -> None:
    model = tiny(tmp_path / "model", case)
    check(model, adapter_of(tmp_path / "a", model), tmp_path, "gate_up", "down")


def test_a_quantized_checkpoint(tmp_path: Path) -> None:
    """As gpt-oss is published: what its numbers stand for changes."""
    floats, stored = make_mxfp4_model(tmp_path)
    adapter = adapter_of(tmp_path / "a", floats)
    expected = merged_values(floats, adapter)
    for name, value in merged_values(stored, adapter).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss"])
def test_versions_with_a_at_the_outputs(case: str, tmp_path: Path) -> None:
    """Of PEFT, for parameters [experts, rows, columns]."""
    model = tiny(tmp_path / "model", case)
    check(model, adapter_of(tmp_path / "a", model, version=BEFORE_SWAP), tmp_path, "gate_up", "down")


@pytest.mark.parametrize("parameter", BOTH)
def test_one_parameter_of_two(parameter: str, tmp_path: Path) -> None:
    model = tiny(tmp_path / "model", "gpt_oss")
    adapter = adapter_of(tmp_path / "a", model, (parameter,), rank=3)
    check(model, adapter, tmp_path, "down" if "down" in parameter else "gate_up")


def test_ranks_and_scales_of_patterns(tmp_path: Path) -> None:
    """By the parameter's full name, as PEFT matches them."""
    model = tiny(tmp_path / "model", "qwen3_moe")
    patterns: dict[str, Any] = {"rank_pattern": {"experts.gate_up_proj": 6}, "alpha_pattern": {"experts.down_proj": 9}}
    check(model, adapter_of(tmp_path / "a", model, **patterns), tmp_path, "gate_up", "down")


@pytest.mark.parametrize(("case", "version"), [("mixtral", BEFORE_SWAP), ("mixtral", "0.21.2"), ("gpt_oss", "0.21.2")])
def test_square_matrices_are_as_the_others(case: str, version: str, tmp_path: Path) -> None:
    model = tiny(tmp_path / "model", case, intermediate_size=60)
    check(model, adapter_of(tmp_path / "a", model, version=version), tmp_path, "gate_up", "down")


def test_square_matrices_alone_are_refused(tmp_path: Path) -> None:
    model = tiny(tmp_path / "model", "mixtral", intermediate_size=60)
    with pytest.raises(
        ModelError, match=r"mlp\.experts' has square matrices, .* which side lora_A is at; merge the adapter with PEFT"
    ):
        merged_values(model, adapter_of(tmp_path / "a", model, BOTH[1:]))


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"])
def test_a_router_is_a_plain_matrix(case: str, tmp_path: Path) -> None:
    """A parameter, too, and by transformers' name."""
    model = tiny(tmp_path / "model", case, num_hidden_layers=1)
    adapter = adapter_of(tmp_path / "a", model)
    change(adapter, {"model.layers.0.mlp.gate": (np.ones((4, 60)), np.ones((8 if case == "qwen3_moe" else 4, 4)))})
    config(adapter, target_parameters=["gate.weight", *BOTH])
    name = "layers.0.mlp.router.weight"
    np.testing.assert_allclose(merged_values(model, adapter)[name], merged_values(model)[name] + 4, rtol=1e-6)


def test_names_that_peft_writes_for_linear_layers_it_has_fused(tmp_path: Path) -> None:
    """Of target_modules gate_proj, up_proj and down_proj: no module, and twice the rank for gate and up."""
    model = tiny(tmp_path / "model", "qwen3_moe")
    patterns: dict[str, Any] = {f"{key}_pattern": {".*\\.gate_up_proj": 8} for key in ("rank", "alpha")}
    adapter = adapter_of(tmp_path / "a", model, rank_pattern={"gate_up_proj": 8}, alpha_pattern={"gate_up_proj": 8})
    merged_model(model, adapter).save_pretrained(tmp_path / "merged")
    config(adapter, target_parameters=["down_proj", "gate_up_proj"], **patterns)
    found, expected = merged_values(model, adapter), merged_values(tmp_path / "merged")
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def test_an_embedding_as_a_parameter_leaves_the_output_projection_alone(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1, tie_word_embeddings=True)
    adapter = make_adapter(tmp_path / "a", model, ("o_proj",))
    change(adapter, {"model.embed_tokens": (np.ones((4, 60)), np.ones((515, 4)))})
    config(adapter, target_parameters=["embed_tokens.weight"])
    found, plain = merged_values(model, adapter), merged_values(model)
    np.testing.assert_allclose(found["embed.weight"], plain["embed.weight"] + 4, rtol=1e-6)
    np.testing.assert_array_equal(found["lm_head.weight"], plain["embed.weight"])


@pytest.mark.parametrize("part", ["mtp", "vision_tower.encoder"])
def test_layers_of_other_parts_are_not_the_decoders(part: str, tmp_path: Path) -> None:
    model = tiny(tmp_path / "model", "qwen3_moe")
    for module, end in ((".mlp.experts", "which fit no experts"), (".self_attn.o_proj", "which the model has not")):
        adapter = adapter_of(tmp_path / module, model)
        tensors = load_file(adapter / "adapter_model.safetensors")
        of_part = {name.replace("model.model.layers", f"model.{part}.layers"): value for name, value in tensors.items()}
        save_file({name: v for name, v in of_part.items() if module in name}, adapter / "adapter_model.safetensors")
        with pytest.raises(ModelError, match=rf"{part}\.layers\.[0-9]+{module}.*{end}"):
            merged_values(model, adapter)


def test_names_are_asked_before_sizes(tmp_path: Path) -> None:
    """Gate and up of experts of half the size are as large as down, turned."""
    model, other = tiny(tmp_path / "model", "qwen3_moe"), tiny(tmp_path / "x", "qwen3_moe", moe_intermediate_size=20)
    with pytest.raises(ModelError, match="which fit no experts of its layer"):
        merged_values(model, adapter_of(tmp_path / "a", other, BOTH[:1]))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"r": 3}, r"layers\.0\.mlp\.experts\.gate_up_proj has rank 4 where adapter_config\.json says 3"),
        ({"target_parameters": "experts.down_proj"}, "target_parameters is 'experts.down_proj', which is no list"),
        (
            {"target_parameters": []},
            r"layers\.0\.mlp\.experts(\.base_layer)? has rank 32 where adapter_config\.json says 4",
        ),
    ],
)
def test_what_cannot_be_merged_is_one_sentence(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    model = tiny(tmp_path / "model", "qwen3_moe", num_hidden_layers=1)
    adapter = add_experts(make_adapter(tmp_path / "a", model, ("o_proj",), ranks={"o_proj": 4}), model, BOTH, **fields)
    with pytest.raises(ModelError, match=says):
        merged_values(model, adapter)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    model, other = (tiny(tmp_path / name, "mixtral", num_local_experts=n) for name, n in (("model", 4), ("other", 3)))
    with pytest.raises(ModelError, match=r"lora_A of \[15, 60\] and lora_B of \[200, 15\], which fit no experts"):
        merged_values(model, adapter_of(tmp_path / "a", other, rank=5))


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        (
            {"experts.1.up_proj": ((4, 60), (40, 4))},
            r"changes model\.layers\.0\.mlp\.experts\.1\.up_proj\.weight twice",
        ),
        ({"experts": ((32, 60), (80, 32))}, r"'model\.layers\.0\.mlp\.experts' changes the same experts twice"),
        ({"experts": ((32,), (60, 32))}, r"lora_A of \[32\] and lora_B of \[60, 32\], which fit no experts"),
        ({"gate": ((), (8, 4))}, r"mlp\.gate.* lora_A of \[\] and lora_B of \[8, 4\], which fit no experts"),
        ({"gate": ((4,), (8, 4))}, r"mlp\.gate has lora_A of shape \[4\] and lora_B of \[8, 4\], which do not fit"),
        ({"gate": ((4, 60), (5, 4))}, r"as a tensor of shape \[5, 60\], which has \[8, 60\]"),
        ({"gate": ((0, 60), (8, 0))}, r"mlp\.gate.* lora_A of \[0, 60\] and lora_B of \[8, 0\], which fit no experts"),
    ],
)
def test_damaged_tensors_are_one_sentence(
    pairs: dict[str, tuple[tuple[int, ...], tuple[int, ...]]], says: str, tmp_path: Path
) -> None:
    model = tiny(tmp_path / "model", "qwen3_moe", num_hidden_layers=1)
    adapter = adapter_of(tmp_path / "a", model)
    change(adapter, {f"model.layers.0.mlp.{end}": (np.ones(a), np.ones(b)) for end, (a, b) in pairs.items()})
    config(adapter, target_parameters=["mlp.gate.weight", *BOTH])
    with pytest.raises(ModelError, match=says):
        merged_values(model, adapter)


def test_lengths_of_dora_are_refused(tmp_path: Path) -> None:
    model = tiny(tmp_path / "model", "qwen3_moe", num_hidden_layers=1)
    adapter = adapter_of(tmp_path / "a", model)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.0.mlp.experts.lora_magnitude_vector"] = np.ones(60, np.float32)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="has lengths of DoRA, which no experts of one tensor have"):
        merged_values(model, adapter)
