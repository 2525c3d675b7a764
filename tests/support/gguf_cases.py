"""Tiny models that GGUF files are made of, by cases of `support.families`, and what such a file says of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from support.families import CASES, MROPE

LEFT_OUT = object()
_NONE = -math.inf
_NO_MIXERS = {
    "attention.head_count_kv": [1] * 3, "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 1,
    "ssm.inner_size": 120, "ssm.time_step_rank": 8,
}  # fmt: skip
"""What is said of mixers, though there are none."""
_UNBOUNDED = {"time_step_min": 1e-12}
"""Steps, as files have no bounds of them."""
# Of a case of `support.families`: other fields, where a file does not say them or the tiny model is none that
# llama.cpp knows, then metadata beside those that a configuration implies.
TOLD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "apertus": ({"rope_parameters": {"rope_type": "default", "rope_theta": 12e6}}, {}),
    "arcee": ({}, {}),
    "baichuan": ({}, {}),
    "bamba": ({}, {}),
    "bloom": ({}, {}),
    "cohere": ({"tie_word_embeddings": True}, {"logit_scale": 0.0625}),
    "cohere-qk-norm": ({}, {"logit_scale": 0.0625}),
    "cohere2": ({}, {"logit_scale": 0.0625}),
    "dbrx": ({}, {"attention.clamp_kqv": 0.8}),
    "deepseek": ({}, {"leading_dense_block_count": 1}),
    "deepseek_v2": ({}, {}),
    "deepseek_v2-lite": ({}, {}),
    "deepseek_v3": ({"rope_parameters": LEFT_OUT}, {"nextn_predict_layers": 0}),
    "dots1": ({"sliding_window": None}, {}),
    "ernie4_5": ({}, {}),
    "ernie4_5_moe": ({}, {}),
    "ernie4_5_moe-some-layers": ({}, {"interleave_moe_layer_step": 2}),
    "exaone": ({}, {}),
    "exaone4": ({}, {}),
    "exaone4-windows": ({}, {"attention.sliding_window_pattern": [True, True, False]}),
    "falcon": ({}, {}),
    "falcon-new": ({}, {}),
    "falcon_h1-norm": ({"mamba_norm_before_gate": False, "time_step_limit": LEFT_OUT}, {}),
    "gemma3n_text": (
        {},
        {"attention.shared_kv_layers": 3, "attention.sliding_window_pattern": [True, False] * 3 + [False],
         "altup.active_idx": 0, "altup.num_inputs": 4, "embedding_length_per_layer_input": 12,
         "activation_sparsity_scale": [1.6448535, 0.5244005, _NONE, _NONE, _NONE, 0.0, _NONE],
         "final_logit_softcapping": 8.0},
    ),
    "gemma4-experts": ({}, {}),
    "gemma4_text": ({}, {"final_logit_softcapping": 4.0}),
    "gemma4_text-experts": ({}, {}),
    "gemma4_text-large": ({}, {}),
    "glm": ({}, {}),
    "glm4": ({}, {}),
    "glm4_moe": ({}, {}),
    "gpt2": ({}, {}),
    "gpt_bigcode": ({}, {}),
    "gpt_neox": ({}, {"use_parallel_residual": True}),
    "gpt_neox-sequential": ({}, {"use_parallel_residual": False}),
    "gpt_oss": ({"swiglu_limit": 7.0}, {}),
    "granitemoe": (
        {},
        {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 0.5},
    ),
    "granitemoeshared": (
        {},
        {"attention.scale": 0.3, "embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 0.5,
         "expert_shared_feed_forward_length": 52},
    ),
    "granitemoehybrid": (
        {},
        {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 0.5},
    ),
    "granitemoehybrid-attention": (
        {},
        {"attention.scale": 1.0, "embedding_scale": 1.0, "residual_scale": 0.6, "logit_scale": 1.0, **_NO_MIXERS},
    ),
    "granitemoehybrid-attention-experts": (
        {"position_embedding_type": "rope"},
        {"attention.scale": 1.0, "embedding_scale": 3.0, "residual_scale": 1.0, "logit_scale": 1.0, **_NO_MIXERS},
    ),
    "granitemoehybrid-experts": (
        {"position_embedding_type": "nope", "time_step_limit": LEFT_OUT},
        {"attention.scale": 1.0, "embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0},
    ),
    "hunyuan_v1_dense": ({}, {}),
    "internlm2": ({}, {}),
    "kimi_k2": ({}, {}),
    "lfm2": ({}, {}),
    "lfm2-biases": ({}, {}),
    "lfm2_moe": ({"tie_word_embeddings": True}, {"leading_dense_block_count": 1}),
    "llama4_text": (
        {"attention_chunk_size": 8192, "no_rope_layers": LEFT_OUT, "floor_scale": 8192, "attn_scale": 0.1,
         "rope_parameters": LEFT_OUT},
        {"expert_weights_scale": None, "expert_weights_norm": None, "expert_gating_func": 2},
    ),
    "minicpm": ({}, {"embedding_scale": 3.0, "residual_scale": 1.4 / 3**0.5, "logit_scale": 3.0}),
    "minicpm3": ({"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}, {}),
    "minimax_m2": ({}, {"expert_weights_scale": None, "expert_weights_norm": None}),
    "mpt-clipped": ({"attn_config": {"clip_qkv": 0.8}}, {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.8}),
    "nemotron": ({}, {}),
    "nemotron_h": (
        {**_UNBOUNDED, "intermediate_size": 44,
         "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]},
        {},
    ),
    "nemotron_h-biases": (_UNBOUNDED, {}),
    "nemotron_h-latent": (
        {**_UNBOUNDED, "intermediate_size": 44,
         "layers_block_type": ["moe", "linear_attention", "moe", "full_attention"]},
        {"expert_group_used_count": None},
    ),
    "olmo-clipped": ({}, {"attention.clamp_kqv": 0.7}),
    "olmoe": ({}, {}),
    "orion": ({}, {}),
    "phi": ({}, {}),
    "phi3": ({}, {}),
    "phi3-long": ({}, {}),
    "phimoe": ({"router_jitter_noise": 0.01}, {}),
    "qwen": ({"use_dynamic_ntk": False, "use_logn_attn": False}, {"feed_forward_length": 200}),
    "qwen2_vl": ({}, {"rope.dimension_sections": [4, 3, 3, 0]}),
    "qwen3_vl": ({}, {"rope.dimension_sections": [4, 3, 3, 0], "n_deepstack_layers": 1}),
    "qwen3_vl_moe": (
        {"mlp_only_layers": []},
        {"rope.dimension_sections": [4, 3, 3, 0], "n_deepstack_layers": 1},
    ),
    "qwen3_5_moe_text": ({}, {"full_attention_interval": 2, "rope.dimension_sections": [1, 1, 1, 0]}),
    "qwen3_5_text": ({}, {"full_attention_interval": 2, "rope.dimension_sections": [1, 1, 1, 0]}),
    "qwen3_next": ({"mlp_only_layers": []}, {"full_attention_interval": 2}),
    "seed_oss": ({}, {}),
    "smollm3": ({}, {}),
    "stablelm": ({}, {"use_parallel_residual": False}),
    "stablelm-parallel": ({}, {"use_parallel_residual": True}),
    "xverse": ({}, {}),
}  # fmt: skip

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "nomic_bert": {},
    "roberta": {},
    "xlm-roberta": {},
    "modernbert": {"rope.freq_base_swa": 10000.0, "attention.sliding_window": 14},
}


_WIDE = {"hidden_size": 96}
_WIDE_EXPERTS = {**_WIDE, "intermediate_size": 96, "moe_intermediate_size": 32}
_WIDE_NETS = {**_WIDE, "intermediate_size": 96, "linear_value_head_dim": 16}
_WIDE_MIXTURES = {**_WIDE_NETS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
_OF_HIDDEN = ("falcon", "falcon-new", "gpt2", "gpt_bigcode")  # whose feed-forward blocks are as wide as that says
_WIDE_MIXERS = {**_WIDE, "mamba_d_head": 32, "intermediate_size": 64, "shared_intermediate_size": 96}
_WIDE_NEMOTRON = {
    **_WIDE, "mamba_head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 64, "moe_latent_size": 64,
    "moe_shared_expert_intermediate_size": 96,
}  # fmt: skip
_BLOCKS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_OF_HIDDEN, _WIDE),
    "bamba": {**_WIDE, "mamba_d_head": 32, "intermediate_size": 96},
    "bloom": {"hidden_size": 160},
    "dbrx": {"d_model": 96, **_WIDE, "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 5, "moe_top_k": 2}},
    "falcon_h1-norm": {**_WIDE, "intermediate_size": 96, "mamba_d_ssm": 192, "mamba_d_head": 32},
    **dict.fromkeys(("gemma4-experts", "gemma4_text-experts"), _WIDE_EXPERTS),
    "granitemoehybrid": {**_WIDE_MIXERS, "intermediate_size": 96},
    "granitemoehybrid-attention": {**_WIDE_MIXERS, "mamba_d_head": 24, "intermediate_size": 96},
    "granitemoehybrid-attention-experts": {**_WIDE_MIXERS, "mamba_d_head": 24},
    "granitemoehybrid-experts": _WIDE_MIXERS,
    "gpt_neox-sequential": {**_WIDE, "rotary_pct": 0.125},
    "minicpm": {**_WIDE, "intermediate_size": 96, "dim_model_base": 32},
    "mpt-clipped": {},
    **dict.fromkeys(("nemotron_h", "nemotron_h-biases", "nemotron_h-latent"), _WIDE_NEMOTRON),
    "phi3-long": {"intermediate_size": 96},
    "qwen": {**_WIDE, "kv_channels": 32},
    "qwen3_5_text": _WIDE_NETS,
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), _WIDE_MIXTURES),
    "qwen2_vl": {**_WIDE, "rope_parameters": {**MROPE, "mrope_section": [6, 5, 5]}},
    "stablelm": {**_WIDE, "partial_rotary_factor": 0.25},
}


def in_blocks(case: str) -> dict[str, Any]:
    """Sizes with which most rows are whole blocks of 32."""
    return _BLOCKS.get(case, {**_WIDE, "intermediate_size": 96})


_READ_AS = {
    "bamba": "granitemoehybrid", "gemma4": "gemma4_text", "kimi_k2": "deepseek_v3", "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe",
    # Cases.
    "granitemoehybrid-attention": "granite", "granitemoehybrid-attention-experts": "granitemoeshared",
}  # fmt: skip


def read_as(case: str) -> str:
    """The model_type that a file of a case is read as."""
    family = CASES[case][0]
    return _READ_AS.get(case) or _READ_AS.get(family, family)


def told_fields(case: str, more: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """(model_type, fields) of a case of TOLD; more: go before those of the case."""
    family, sizes = CASES[case]
    fields = {**sizes, **TOLD[case][0], **(more or {})}
    return family, {name: value for name, value in fields.items() if value is not LEFT_OUT}
