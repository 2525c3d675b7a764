"""Cases of `families` for models with Mamba-2 mixers: (model_type, fields)."""

from __future__ import annotations

from typing import Any

_MIXERS: dict[str, Any] = {
    "mamba_num_heads": 6, "mamba_head_dim": 20, "ssm_state_size": 24, "n_groups": 2, "conv_kernel": 4,
    "chunk_size": 16,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 44,
    "moe_shared_expert_intermediate_size": 52, "routed_scaling_factor": 2.5,
}  # fmt: skip

_OF_GRANITE: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": 20, "mamba_d_state": 24, "mamba_n_groups": 2, "mamba_chunk_size": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip

_NO_MIXERS: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 15, "mamba_d_state": 16, "layer_types": ["full_attention"] * 3,
}  # fmt: skip
"""transformers checks sizes of layers that there are none of."""

OF_MAMBA: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": (
        "bamba",
        {
            "mamba_n_heads": 6,
            "mamba_d_head": 20,
            "mamba_d_state": 24,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 16,
            "attn_layer_indices": [1],
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_OF_GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": 100,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.5,
        },
    ),
    "granitemoehybrid-attention": (
        "granitemoehybrid",
        {
            **_NO_MIXERS,
            "num_local_experts": 0,
            "shared_intermediate_size": 100,
            "position_embedding_type": "rope",
            "residual_multiplier": 0.6,
        },
    ),
    "granitemoehybrid-attention-experts": (
        "granitemoehybrid",
        {**_NO_MIXERS, "num_local_experts": 5, "shared_intermediate_size": 52, "embedding_multiplier": 3.0},
    ),
    "granitemoehybrid-experts": (
        "granitemoehybrid",
        {
            **_OF_GRANITE,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "time_step_limit": [0.3, 1.2],
            "num_local_experts": 5,
            "shared_intermediate_size": 52,
            "position_embedding_type": "rope",
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_MIXERS,
            **_EXPERTS,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        },
    ),
    "nemotron_h-latent": (
        "nemotron_h",
        {
            **_MIXERS,
            **_EXPERTS,
            "layers_block_type": ["mlp", "linear_attention", "moe", "moe", "full_attention"],
            "moe_latent_size": 36,
            "n_group": 2,
            "topk_group": 1,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "nemotron_h-biases": (
        "nemotron_h",
        {
            **_MIXERS,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "use_bias": True,
            "mlp_bias": True,
            "n_groups": 1,
            "time_step_min": 0.6,
        },
    ),
}
