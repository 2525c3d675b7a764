"""Mixtures with sigmoid router scores: GLM-4.5 and 4.6 (glm4_moe), dots.llm1, Solar Open, K-EXAONE (exaone_moe)."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.config import ModelConfig
from llmc.models.families.exaone4 import read_windows
from llmc.models.families.family import Family
from llmc.models.families.mixtures import read_sigmoid_experts, stacked
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.mtp_layout import DEEPSEEK_MTP
from llmc.models.rope_fields import read_rope
from llmc.models.standard import head_sizes, layer_count, standard_config
from llmc.models.windows import from_layer, stated_window

_LAYOUT = Layout(shared="mlp.shared_experts")
# The layer after the last predicts the token after the next.
_GLM_LAYOUT = replace(_LAYOUT, other_modules=("model.layers.{}.",))


def read_glm4(fields: Fields, generation: Fields) -> ModelConfig:
    """Half of each head is rotated."""
    positions = fields.integer("max_position_embeddings")
    return standard_config(
        fields,
        generation,
        attention_bias=fields.flag("attention_bias", False),
        o_bias=False,
        qk_norm="head" if fields.flag("use_qk_norm", False) else "none",
        rope=read_rope(fields, positions, head_sizes(fields)[2], partial=0.5),
        experts=read_sigmoid_experts(fields),
    )


def read_solar(fields: Fields, generation: Fields) -> ModelConfig:
    """Every layer has experts."""
    experts = read_sigmoid_experts(fields)
    return standard_config(
        fields,
        generation,
        attention_bias=fields.flag("attention_bias", False),
        o_bias=False,
        head_dim=128,
        intermediate_size=experts.intermediate_size,
        experts=experts,
    )


def read_exaone(fields: Fields, generation: Fields) -> ModelConfig:
    """EXAONE 4's windows and rotation; mlp_layer_types says which layers have experts."""
    windows, unrotated = read_windows(fields)
    fields = fields.renamed(n_routed_experts="num_experts", n_shared_experts="num_shared_experts")
    experts = read_sigmoid_experts(fields)
    if fields.has("mlp_layer_types"):
        kinds = fields.texts("mlp_layer_types", layer_count(fields))
        experts = replace(experts, layers=tuple(i for i, kind in enumerate(kinds) if kind == "sparse"))
    return standard_config(
        fields,
        generation,
        attention_bias=False,
        o_bias=False,
        qk_norm="head",
        layer_windows=windows,
        unrotated_layers=unrotated,
        experts=experts if experts.layers else None,
    )


def read_dots1(fields: Fields, generation: Fields) -> ModelConfig:
    """A window applies to layers from max_window_layers on, or by layer_types."""
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        qk_norm="head",
        layer_windows=from_layer(fields, stated_window(fields, 4096), 62),
        experts=read_sigmoid_experts(fields),
    )


GLM4_MOE = Family(
    "glm4_moe",
    read_glm4,
    _GLM_LAYOUT.weight_map,
    other_maps=(stacked(_GLM_LAYOUT).weight_map,),
    harmless=frozenset({"num_nextn_predict_layers"}),  # multi-token prediction layers
    mtp=DEEPSEEK_MTP,
)
DOTS1 = Family(
    "dots1",
    read_dots1,
    _LAYOUT.weight_map,
    other_maps=(stacked(_LAYOUT).weight_map,),
    # Layers are read if there is a window, and no layer types.
    harmless=frozenset({"ep_size", "max_window_layers"}),
    # The name of the choice with a bias, which is of sigmoids.
    neutral={
        "moe_layer_freq": 1,
        "scoring_func": "noaux_tc",
        "topk_method": "noaux_tc",
        "use_sliding_window": False,
    },
)
SOLAR_OPEN = Family("solar_open", read_solar, _LAYOUT.weight_map, other_maps=(stacked(_LAYOUT).weight_map,))
_EXAONE = replace(_LAYOUT, choice_bias="mlp.e_score_correction_bias", other_modules=("mtp.",))
_RENAMED = stacked(replace(_EXAONE, choice_bias=_LAYOUT.choice_bias))
EXAONE_MOE = Family(
    "exaone_moe",
    read_exaone,
    _EXAONE.weight_map,
    other_maps=(_RENAMED.weight_map, stacked(_EXAONE).weight_map),
    # Layer types say the same.
    harmless=frozenset({"sliding_window_pattern", "first_k_dense_replace", "num_nextn_predict_layers"}),
)
