"""What configs say of Mamba-2 mixers, and of layers of one block."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llmc.models import ModelError
from llmc.models.config import ModelConfig
from llmc.models.fields import Fields
from llmc.models.registry import get_family

from support.mamba_families import OF_MAMBA

_COMMON: dict[str, Any] = {
    "vocab_size": 515, "hidden_size": 60, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
_BLOCKS = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]


def read(case: str, **changes: Any) -> ModelConfig:
    family, fields = OF_MAMBA[case]
    values = {**_COMMON, "model_type": family, **fields, **changes}
    return get_family(family).read_config(Fields(values, "config.json"), Fields({}, "none"))


def test_layers_by_letters_and_by_either_names() -> None:
    expected = read("nemotron_h")
    assert (expected.mlp_only_layers, expected.mixer_only_layers) == ((1, 3), (0, 2, 4))
    assert expected.mamba is not None
    assert expected.experts is not None
    assert (expected.mamba.layers, expected.experts.layers) == ((0, 4), (1,))
    old = ["mamba", "moe", "attention", "mlp", "mamba"]
    for stated in (
        {"layers_block_type": old},
        {"layers_block_type": None, "layer_types": _BLOCKS},
        {"layers_block_type": None, "hybrid_override_pattern": "ME*-M"},
        {"hybrid_override_pattern": "ME*-M", "num_hidden_layers": 99},
    ):
        assert read("nemotron_h", **stated) == expected
    assert read("nemotron_h", layers_block_type=None).num_layers == 4


def test_kv_heads_and_rotated_elements_are_those_of_transformers() -> None:
    """A null is as many KV heads as heads. Bamba rotates half of a head, whatever stands beside its rope_parameters."""
    assert read("bamba", num_key_value_heads=None, num_attention_heads=3).num_kv_heads == 3
    plain, stated = read("bamba"), read("bamba", partial_rotary_factor=0.25)
    assert plain.rope == stated.rope


@pytest.mark.parametrize("case", ["bamba", "granitemoehybrid"])
def test_a_convolution_without_a_bias(case: str) -> None:
    """A null is no bias, and no field is one, as in transformers."""
    for stated, has_bias in (({}, True), ({"mamba_conv_bias": None}, False), ({"mamba_conv_bias": False}, False)):
        mamba = read(case, **stated).mamba
        assert mamba is not None
        assert mamba.conv_bias is has_bias


def test_a_model_without_mixers_or_experts() -> None:
    with pytest.raises(ModelError, match="no layer has a mixer or attention"):
        read("nemotron_h", layers_block_type=["mlp", "mlp"])
    config = read("nemotron_h", layers_block_type=["full_attention", "mlp"])
    assert (config.mamba, config.experts, config.num_kv_layers) == (None, None, 1)


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ([0.0, math.inf], (0.0, None)),
        ([0.0, {"__float__": "Infinity"}], (0.0, None)),
        ([0, 1e308], (0.0, None)),
        ([0.25, 2], (0.25, 2.0)),
        (None, (0.0, None)),
    ],
)
def test_limits_of_steps(limits: Any, found: tuple[float, float | None]) -> None:
    mamba = read("granitemoehybrid", time_step_limit=limits).mamba
    assert mamba is not None
    assert (mamba.least_step, mamba.most_step) == found


def test_steps_of_nemotron_have_a_lower_bound() -> None:
    for stated, least in ((0.02, 0.02), (None, 0.001), (-1.0, 0.0)):
        mamba = read("nemotron_h", time_step_min=stated).mamba
        assert mamba is not None
        assert (mamba.least_step, mamba.most_step) == (least, None)


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        ("nemotron_h", {"layers_block_type": ["mlp", "swa"]}, "the kind of layer 'swa' is not one of linear_attention"),
        ("nemotron_h", {"layers_block_type": "mlp"}, "layers_block_type is not a list of 1 to"),
        ("nemotron_h", {"layers_block_type": []}, "layers_block_type is not a list of 1 to"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX"}, "the kind of layer 'X' is not"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": ""}, "has not 1 to 4096 letters"),
        ("nemotron_h", {"hybrid_override_pattern": "MM*-M"}, "layers_block_type and hybrid_override_pattern state"),
        ("nemotron_h", {"n_groups": 4}, "n_groups 4 does not divide the 6 heads of mixers"),
        ("nemotron_h", {"conv_kernel": 1}, "conv_kernel 1 is not from 2 to 64"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "Mamba-2 mixers with the activation gelu are not supported"),
        ("nemotron_h", {"n_group": 8, "topk_group": 8}, "n_group 8 leaves groups of less than two of 8 experts"),
        ("granitemoehybrid", {"mamba_d_head": 21}, "mamba_n_heads 6 of 21 elements are not the 120 of mamba_expand"),
        ("granitemoehybrid", {"mamba_n_groups": 4}, "mamba_n_groups 4 does not divide the 6 heads"),
        ("granitemoehybrid", {"time_step_limit": [0.5]}, "time_step_limit is not a list of two numbers"),
        ("granitemoehybrid", {"time_step_limit": ["a", 1]}, "time_step_limit is not a list of two numbers"),
        ("granitemoehybrid", {"time_step_limit": [2, 1]}, "time_step_limit 2, 1 is not a range of positive steps"),
        ("granitemoehybrid", {"layer_types": ["mlp"] * 3}, "layer type 'mlp' is not one of full_attention, linear"),
        ("bamba", {"attn_layer_indices": [1, 3]}, "attn_layer_indices has layer 3, and the layers are 0 to 2"),
    ],
)
def test_what_does_not_go_together_is_refused(case: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read(case, **changes)
