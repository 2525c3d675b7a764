"""ERNIE 4.5 with experts: interleaved rotation, a bias for the choice of experts."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.mixtures import read_experts, stacked
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.standard import layer_count, standard_config

# Multi-token prediction is not part of the decoder.
_LAYOUT = Layout(
    interleaved=True,
    choice_bias="mlp.moe_statics.e_score_correction_bias",
    choice_bias_row=True,
    shared="mlp.shared_experts",
    other_modules=("model.mtp_",),
)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """Every moe_layer_interval-th layer from moe_layer_start_index to moe_layer_end_index has experts; −1 means the
    last."""
    if fields.flag("use_bias", False):
        raise ModelError(f"{fields.origin}: use_bias of a mixture of experts is not supported; set it to false")
    layers, interval = layer_count(fields), fields.integer("moe_layer_interval", 1)
    first = fields.integer("moe_layer_start_index", 1, minimum=0)
    last = fields.integer("moe_layer_end_index", -1, minimum=-1)
    mixed = range(first, layers if last == -1 else min(last + 1, layers))
    inner = fields.integer("moe_intermediate_size")
    experts = read_experts(
        fields,
        intermediate_size="moe_intermediate_size",
        layers=tuple(i for i in mixed if (i + 1) % interval == 0),
        scores="softmax",
        choice_bias=True,
        normalised=True,
        least_sum=fields.number("moe_norm_min", 1e-12),
        shared_size=fields.integer("moe_num_shared_experts", 2, minimum=0) * inner,
    )
    return standard_config(
        fields,
        generation,
        attention_bias=False,
        o_bias=False,
        default_eps=1e-5,
        tie_word_embeddings=True,
        experts=experts,
    )


# No expert is too full in inference; layers for multi-token prediction are unused.
ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    read_config,
    _LAYOUT.weight_map,
    other_maps=(stacked(_LAYOUT).weight_map,),
    harmless=frozenset({"moe_capacity", "num_nextn_predict_layers"}),
    neutral={"moe_gate": "topk", "moe_use_aux_free": True},
)
