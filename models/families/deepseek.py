"""DeepSeek-MoE: Llama with experts, some of them shared by all tokens."""

from __future__ import annotations

from llmc.models.config import Experts, ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.mixtures import read_experts
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.standard import layer_count, standard_config

_LAYOUT = Layout(shared="mlp.shared_experts")


def _experts(fields: Fields) -> Experts | None:
    """Every moe_layer_freq-th layer from first_k_dense_replace on has experts."""
    if not fields.has("n_routed_experts"):
        return None
    first, every = fields.integer("first_k_dense_replace", 0, minimum=0), fields.integer("moe_layer_freq", 1)
    inner = fields.integer("moe_intermediate_size")
    return read_experts(
        fields,
        intermediate_size="moe_intermediate_size",
        layers=tuple(i for i in range(layer_count(fields)) if i >= first and i % every == 0),
        scores="softmax",
        normalised=fields.flag("norm_topk_prob", False) and fields.integer("num_experts_per_tok") > 1,
        least_sum=1e-20,
        shared_size=inner * (fields.integer("n_shared_experts") if fields.has("n_shared_experts") else 0),
    )


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return standard_config(fields, generation, attention_bias=bias, o_bias=bias, experts=_experts(fields))


DEEPSEEK = Family("deepseek", read_config, _LAYOUT.weight_map, neutral={"scoring_func": "softmax"})
