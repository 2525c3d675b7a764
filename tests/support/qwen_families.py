"""Cases of `families` for Qwen, from the first to Qwen3.5: (model_type, fields)."""

from __future__ import annotations

from typing import Any

DELTA_NETS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 24, "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN3_5 = {
    **DELTA_NETS,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.3,
    },
}  # fmt: skip
QWEN3_5_MOE = {
    **QWEN3_5, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 44,
    "shared_expert_intermediate_size": 52,
}  # fmt: skip

OF_QWEN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": ("qwen", {}),
    "qwen-biases": ("qwen", {"no_bias": False, "kv_channels": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "shared_expert_intermediate_size": 52,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "qwen3_moe-some-layers": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 2},
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **DELTA_NETS,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "shared_expert_intermediate_size": 52,
            "mlp_only_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.3},
        },
    ),
    "qwen3_next-attention": (
        "qwen3_next",
        {
            "layer_types": ["full_attention"] * 3,
            "num_experts": 0,
            "attention_bias": True,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
        },
    ),
    "qwen3_5": ("qwen3_5", QWEN3_5),
    "qwen3_5_moe": ("qwen3_5_moe", QWEN3_5_MOE),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", QWEN3_5_MOE),
    "qwen3_5_text": ("qwen3_5_text", QWEN3_5),
}
