"""Cases of `families` for models with latent attention: (model_type, fields)."""

from __future__ import annotations

from typing import Any

_MINICPM3 = {
    "num_key_value_heads": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "scale_emb": 3,
    "scale_depth": 1.4,
    "dim_model_base": 20,
}
_LATENT = {
    "num_key_value_heads": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LONG_OF_4 = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.1, 1.4, 2.5, 4.0],
}


def _latent_yarn(mscale: float, mscale_all_dim: float, beta_fast: float = 32.0) -> dict[str, Any]:
    """DeepSeek's."""
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": beta_fast,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


OF_LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        {**_LATENT, "q_lora_rank": None, "v_head_dim": 14, "rope_parameters": _latent_yarn(0.707, 0.707)},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "n_group": 2,
            "topk_group": 1,
            "attention_bias": True,
            "rope_parameters": _latent_yarn(1.0, 0.5),
        },
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 3,
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "tie_word_embeddings": True,
        },
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **{name: value for name, value in _LATENT.items() if name != "first_k_dense_replace"},
            "q_lora_rank": 24,
            "n_group": 2,
            "topk_group": 1,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "kimi_k2": (
        "kimi_k2",
        {**_LATENT, "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "rope_parameters": _latent_yarn(1.0, 1.0, 1.0)},
    ),
    "kimi_k25": (
        "kimi_k25",
        {**_LATENT, "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "rope_parameters": _latent_yarn(1.0, 1.0, 1.0)},
    ),
    "minicpm3": (
        "minicpm3",
        {
            **_MINICPM3,
            "q_lora_rank": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {**_LONG_OF_4, "original_max_position_embeddings": 128},
        },
    ),
    "minicpm3-long": (
        "minicpm3",
        {
            **_MINICPM3,
            "q_lora_rank": None,
            "v_head_dim": 14,
            "attention_bias": True,
            "rope_parameters": {**_LONG_OF_4, "original_max_position_embeddings": 16},
        },
    ),
    "youtu": (
        "youtu",
        {
            **{name: _LATENT[name] for name in ("num_key_value_heads", *_LATENT_SIZES)},
            "q_lora_rank": 24,
            "tie_word_embeddings": True,
            "pad_token_id": None,  # whose row transformers zeroes when it loads a model
        },
    ),
}
