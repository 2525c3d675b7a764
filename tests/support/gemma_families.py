"""Cases of `families` for Gemma, from the first to the fourth: (model_type, fields)."""

from __future__ import annotations

from typing import Any

GEMMA4 = {
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
    "sliding_window": 6,
    "num_kv_shared_layers": 3,
    "head_dim": 12,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 515,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 4.0,
}
GEMMA4_LARGE = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "head_dim": 10,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_UNIFIED = {name: value for name, value in GEMMA4_LARGE.items() if name != "hidden_size_per_layer_input"}
GEMMA4_EXPERTS = {
    **GEMMA4_LARGE,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 40,
    "tie_word_embeddings": True,
}
GEMMA3N = {
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
    "sliding_window": 6,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 500,
    "laurel_rank": 10,
    "activation_sparsity_pattern": [0.95, 0.7, 0.0, 0.0, 0.0, 0.5, 0.0],
    "final_logit_softcapping": 8.0,
}
OF_GEMMA: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {}),
    "gemma-tied": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"sliding_window": 6, "num_hidden_layers": 3, "attn_logit_softcapping": 2.0}),
    "gemma2-uncapped": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 33},
    ),
    "gemma3": ("gemma3", {"sliding_window": 6, "num_hidden_layers": 7}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 6, "num_hidden_layers": 7}),
    "gemma3_text-scaled": (
        "gemma3_text",
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 33,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3n": ("gemma3n", GEMMA3N),
    "gemma3n_text": ("gemma3n_text", GEMMA3N),
    "gemma3n_text-tied": (
        "gemma3n_text",
        {
            "num_hidden_layers": 2,
            "sliding_window": 6,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 515,
            "laurel_rank": 10,
            "altup_num_inputs": 3,
            "altup_correct_scale": False,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": ("gemma4", GEMMA4),
    "gemma4-large": ("gemma4", GEMMA4_LARGE),
    "gemma4-experts": ("gemma4", GEMMA4_EXPERTS),
    "gemma4_text": ("gemma4_text", GEMMA4),
    "gemma4_unified": ("gemma4_unified", GEMMA4_UNIFIED),
    "gemma4_unified_text": ("gemma4_unified_text", GEMMA4_UNIFIED),
    "gemma4_unified_text-odd": (
        "gemma4_unified_text",
        {
            **GEMMA4_UNIFIED,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "num_kv_shared_layers": 1,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "partial_rotary_factor": 0.4,
                    "factor": 4.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4_text-experts": ("gemma4_text", GEMMA4_EXPERTS),
    "gemma4_text-large": ("gemma4_text", GEMMA4_LARGE),
}
