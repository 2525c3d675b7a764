"""Cases of `families` for Falcon-H1: (model_type, fields)."""

from __future__ import annotations

from typing import Any

_MIXERS: dict[str, Any] = {
    "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 24, "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip

OF_FALCON_H1: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_h1": (
        "falcon_h1",
        {
            **_MIXERS,
            "embedding_multiplier": 5.6,
            "lm_head_multiplier": 0.4,
            "attention_out_multiplier": 0.94,
            "key_multiplier": 0.39,
            "ssm_in_multiplier": 1.25,
            "ssm_multipliers": [0.35, 0.25, 0.4, 0.5, 0.3],
            "ssm_out_multiplier": 0.24,
            "mlp_multipliers": [0.88, 0.59],
        },
    ),
    "falcon_h1-biases": (
        "falcon_h1",
        {
            **_MIXERS,
            "mamba_d_ssm": None,
            "mamba_d_head": "auto",
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": None,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "attention_in_multiplier": 1.7,
            "attention_out_multiplier": 0.6,
            "key_multiplier": 0.7,
            "ssm_in_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.2, 0.7, 1.3, 0.6],
            "ssm_out_multiplier": 1.4,
            "mlp_multipliers": [0.5, 1.6],
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1-norm": (
        "falcon_h1",
        {
            **_MIXERS,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "num_key_value_heads": None,
            "time_step_limit": [0.3, 1.2],
        },
    ),
}
