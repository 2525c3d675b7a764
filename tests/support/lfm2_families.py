"""Cases of `families` for LFM2 and LFM2.5: (model_type, fields)."""

from __future__ import annotations

from typing import Any

CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
OF_LFM2: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        {**CONVOLUTIONS, "block_multiple_of": 24, "block_ffn_dim_multiplier": 1.3, "tie_word_embeddings": True},
    ),
    "lfm2-biases": (
        "lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "conv", "conv", "full_attention"],
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2-attention": ("lfm2", {"block_multiple_of": 16, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **CONVOLUTIONS,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "routed_scaling_factor": 1.7,
        },
    ),
    "lfm2_moe-scores": (
        "lfm2_moe",
        {
            **CONVOLUTIONS,
            "num_dense_layers": 0,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "conv_L_cache": 2,
            "tie_word_embeddings": True,
        },
    ),
}
