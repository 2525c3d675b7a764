"""Qwen3-Next: most layers have a gated delta net, the others gated attention; norm weights are stored less one;
experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmc.models.config import Experts, ModelConfig
from llmc.models.delta_layout import DELTA_LAYOUT
from llmc.models.families.delta_net import read_delta_net
from llmc.models.families.family import Family
from llmc.models.families.mixtures import read_experts, sparse_layers, stacked
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.mtp_layout import QWEN_MTP
from llmc.models.rope_fields import read_rope
from llmc.models.row_orders import heads_to_rows
from llmc.models.standard import standard_config
from llmc.models.weight_map import Rows

HEAD_DIM, ROTATED = 256, 0.25
"""Where a config does not say: elements of a head, and the part of them that is rotated."""


def gate_first(config: ModelConfig) -> Rows:
    """A head of q_proj has the rows of q, then those of the gate."""
    of_q = np.arange(2 * config.num_heads).reshape(-1, 2)
    of_kv = 2 * config.num_heads + np.arange(2 * config.num_kv_heads)
    return heads_to_rows(np.concatenate((of_q[:, 1], of_q[:, 0], of_kv)), config.head_dim)


LAYOUT = Layout(qkv_rows=gate_first, norm_plus=1.0, other_modules=("mtp.", "model.mtp."))
_BY_KEY_HEAD = replace(LAYOUT, delta_net=replace(DELTA_LAYOUT, inputs=("in_proj_qkvz",), gates=("in_proj_ba",)))


def gated_config(fields: Fields, generation: Fields, experts: Experts | None) -> ModelConfig:
    """Where all layers have experts, a config may lack intermediate_size."""
    bias, positions = fields.flag("attention_bias", False), fields.integer("max_position_embeddings")
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        qk_norm="head",
        default_eps=1e-6,
        head_dim=HEAD_DIM,
        rope=read_rope(fields, positions, fields.integer("head_dim", HEAD_DIM), partial=ROTATED),
        attention_gate=True,
        delta_net=read_delta_net(fields),
        intermediate_size=None if experts is None else experts.intermediate_size,
        experts=experts,
    )


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    layers = sparse_layers(fields) if fields.integer("num_experts", minimum=0) else ()
    if not layers:
        return gated_config(fields, generation, None)
    experts = read_experts(
        fields,
        intermediate_size="moe_intermediate_size",
        layers=layers,
        scores="softmax",
        normalised=fields.flag("norm_topk_prob", True),
        shared_size=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return gated_config(fields, generation, experts)


OF_LINEAR = frozenset({
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads",
})  # fmt: skip
"""Sizes of layers with linear attention."""
# Read where there are experts.
_OF_EXPERTS = frozenset({
    "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok", "norm_topk_prob",
})  # fmt: skip
QWEN3_NEXT = Family(
    "qwen3_next",
    read_config,
    _BY_KEY_HEAD.weight_map,
    other_maps=(stacked(_BY_KEY_HEAD).weight_map,),
    harmless=OF_LINEAR | _OF_EXPERTS | {"decoder_sparse_step", "mlp_only_layers"},
    neutral={"use_sliding_window": False},
    mtp=QWEN_MTP,
)
