"""Tiny checkpoints of every family and of what its config.json may say: (model_type, fields)."""

from __future__ import annotations

from typing import Any

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + i / 10 for i in range(10)],
    "long_factor": [2.0 + i / 3 for i in range(10)],
}
EXAONE_WINDOWS = {"sliding_window": 7, "sliding_window_pattern": 3}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "arcee-biases": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "bloom": ("bloom", {"num_attention_heads": 5, "tie_word_embeddings": False}),
    "codegen": ("codegen", {"rotary_dim": 6, "num_attention_heads": 4, "hidden_size": 80, "n_inner": 100}),
    "cohere": ("cohere", {}),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": True}),
    "cohere2": ("cohere2", {"sliding_window": 6, "num_hidden_layers": 5, "tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5-biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4-windows": ("exaone4", EXAONE_WINDOWS),
    "falcon": ("falcon", {"tie_word_embeddings": True}),
    "falcon-new": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 3, "num_attention_heads": 6, "hidden_size": 60},
    ),
    "falcon-new-one-norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon-alibi": (
        "falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True, "tie_word_embeddings": True},
    ),
    "falcon-sequential": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "gemma": ("gemma", {}),
    "gemma-tied": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"sliding_window": 6, "num_hidden_layers": 3, "attn_logit_softcapping": 2.0}),
    "gemma2-uncapped": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 33},
    ),
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
    "glm": ("glm", {}),
    "glm-untold": ("glm", {"attention_bias": False, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "gpt2": ("gpt2", {"tie_word_embeddings": True}),
    "gpt2-inner": ("gpt2", {"n_inner": 100, "scale_attn_weights": False}),
    "gptj": ("gptj", {"rotary_dim": 8, "n_inner": 100}),
    "gpt_bigcode": ("gpt_bigcode", {"tie_word_embeddings": True}),
    "gpt_bigcode-heads": ("gpt_bigcode", {"multi_query": False, "n_inner": 100}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "gpt_neox-sequential": ("gpt_neox", {"rotary_pct": 0.1, "use_parallel_residual": False, "attention_bias": False}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.5,
        },
    ),
    "helium": ("helium", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_v1_dense-alpha": (
        "hunyuan_v1_dense",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "mpt": ("mpt", {"hidden_size": 60, "num_attention_heads": 3, "num_hidden_layers": 3, "max_seq_len": 128}),
    "mpt-clipped": (
        "mpt",
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.4},
        },
    ),
    "nemotron": ("nemotron", {}),
    "olmo": ("olmo", {}),
    "olmo-clipped": ("olmo", {"clip_qkv": 0.7, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "opt": ("opt", {"ffn_dim": 100, "word_embed_proj_dim": 60, "tie_word_embeddings": True}),
    "opt-plain": (
        "opt",
        {
            "ffn_dim": 100,
            "word_embed_proj_dim": 60,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
        },
    ),
    "phi": ("phi", {}),
    "phi-groups": ("phi", {"num_attention_heads": 6, "num_key_value_heads": 2, "partial_rotary_factor": 0.4}),
    "phi-quick": ("phi", {"hidden_act": "quick_gelu"}),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3-long": ("phi3", {"rope_parameters": LONG, "max_position_embeddings": 256}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "seed_oss": ("seed_oss", {}),
    "seed_oss-biases": ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3-windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 1], "mlp_bias": True},
    ),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.3}),
    "stablelm-parallel": (
        "stablelm",
        {
            "partial_rotary_factor": 0.5,
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "use_qkv_bias": True,
        },
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "starcoder2-plain": ("starcoder2", {"use_bias": False, "tie_word_embeddings": True}),
}
