"""Config fields of LFM2: what old and new files say of layers, and the width of feed-forward blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from llmc.models import ModelError
from llmc.models.config import ModelConfig
from llmc.models.fields import Fields
from llmc.models.registry import get_family

SIZES: dict[str, Any] = {
    "model_type": "lfm2", "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 4, "vocab_size": 50,
    "num_attention_heads": 8, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    **SIZES, "model_type": "lfm2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
NOTHING = Fields({}, "generation_config.json")


def config_of(fields: dict[str, Any]) -> ModelConfig:
    return get_family(fields["model_type"]).read_config(Fields(fields, "config.json"), NOTHING)


def test_old_files_number_the_layers_with_attention() -> None:
    old = config_of({**SIZES, "full_attn_idxs": [1, 3], "theta": 5e5, "rope_theta": 5e5})
    new = config_of({**SIZES, "layer_types": ["conv", "full_attention"] * 2, "rope_theta": 5e5})
    assert old == new
    assert [old.has_state(layer) for layer in range(4)] == [True, False, True, False]
    assert (old.rope.theta, old.num_kv_heads, old.tie_word_embeddings) == (5e5, 8, True)
    without = config_of({**SIZES, "tie_embedding": False})
    assert (without.short_conv, without.tie_word_embeddings, without.rope.theta) == (None, False, 1e6)


@pytest.mark.parametrize("size", [100, 101, 640, 6656])
@pytest.mark.parametrize("multiple", [1, 7, 256])
@pytest.mark.parametrize("factor", [1.0, 1.3, 2])
@pytest.mark.parametrize("adjusted", [True, False])
def test_the_width_of_blocks(size: int, multiple: int, factor: float, adjusted: bool) -> None:
    given = {
        "block_multiple_of": multiple, "block_ffn_dim_multiplier": factor, "block_auto_adjust_ff_dim": adjusted,
        "intermediate_size": size,
    }  # fmt: skip
    with torch.device("meta"):
        wanted = Lfm2MLP(Lfm2Config(hidden_size=8, **given)).w1.out_features
    assert config_of({**SIZES, **given}).intermediate_size == wanted
    assert config_of({**EXPERTS, **given}).intermediate_size == size


@pytest.mark.parametrize("adjusted", [True, False])
def test_a_null_is_no_multiplier(adjusted: bool) -> None:
    """Nor is the width rounded up then, as in the reference, whose config class takes no null."""
    config = Lfm2Config(hidden_size=8, intermediate_size=101, block_auto_adjust_ff_dim=adjusted)
    object.__setattr__(config, "block_ffn_dim_multiplier", None)
    with torch.device("meta"):
        wanted = Lfm2MLP(config).w1.out_features
    given = {"intermediate_size": 101, "block_auto_adjust_ff_dim": adjusted, "block_ffn_dim_multiplier": None}
    assert config_of({**SIZES, **given}).intermediate_size == wanted == (67 if adjusted else 101)


def test_the_first_layers_of_a_mixture_are_plain() -> None:
    for count, layers in ((0, (0, 1, 2, 3)), (3, (3,))):
        experts = config_of({**EXPERTS, "num_dense_layers": count}).experts
        assert experts is not None
        assert experts.layers == layers
    assert config_of({**EXPERTS, "num_dense_layers": 4}).experts is None


def test_names_that_say_nothing_by_themselves() -> None:
    """As in transformers."""
    found = config_of({**SIZES, "theta": 5e5, "block_norm_eps": 1e-3})
    assert (found.rope.theta, found.norm_eps) == (1e6, 1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["conv"] * 4, "full_attn_idxs": [1]}, "layer_types is not what full_attn_idxs says"),
        ({"layer_types": ["linear_attention"] * 4}, "'linear_attention' is not one of full_attention, conv"),
        ({"full_attn_idxs": [1], "conv_L_cache": 1}, "conv_L_cache 1 is not from 2 to 64"),
        ({"full_attn_idxs": [1], "conv_L_cache": 65}, "conv_L_cache 65 is not from 2 to 64"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        config_of({**SIZES, **changes})
