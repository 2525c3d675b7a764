"""Tiny checkpoints of every family and of what its config.json may say: (model_type, fields)."""

from __future__ import annotations

from typing import Any

from support.falcon_h1_families import OF_FALCON_H1
from support.gemma_families import OF_GEMMA
from support.lfm2_families import OF_LFM2
from support.mamba_families import OF_MAMBA
from support.qwen_families import OF_QWEN

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + i / 10 for i in range(10)],
    "long_factor": [2.0 + i / 3 for i in range(10)],
}
LONG_OF_4 = {**LONG, "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.1, 1.4, 2.5, 4.0]}
MINICPM3 = {
    "num_key_value_heads": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "scale_emb": 3,
    "scale_depth": 1.4,
    "dim_model_base": 20,
}
LATENT = {
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


def latent_yarn(mscale: float, mscale_all_dim: float, beta_fast: float = 32.0) -> dict[str, Any]:
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


EXAONE_WINDOWS = {"sliding_window": 7, "sliding_window_pattern": 3}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
GROWING = {**YARN, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
           "llama_4_scaling_beta": 0.3, "max_position_embeddings": 64}  # fmt: skip
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MROPE = {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [4, 3, 3]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", {}),
    "aquila": ("aquila", {}),
    "arcee": ("arcee", {}),
    "arcee-biases": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "baichuan": ("baichuan", {}),
    "baichuan-2": ("baichuan", {"z_loss_weight": 0}),
    "baichuan-alibi": (
        "baichuan",
        {
            "max_position_embeddings": None,
            "model_max_length": 128,
            "num_attention_heads": 5,
            "z_loss_weight": 0,
        },
    ),
    "bloom": ("bloom", {"num_attention_heads": 5, "tie_word_embeddings": False}),
    "chatglm": ("chatglm", {}),
    "chatglm-biases": (
        "chatglm",
        {"multi_query_attention": False, "add_bias_linear": True, "rope_ratio": 50, "kv_channels": 16},
    ),
    "codegen": ("codegen", {"rotary_dim": 6, "num_attention_heads": 4, "hidden_size": 80, "n_inner": 100}),
    "cohere": ("cohere", {}),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": True}),
    "cohere2": ("cohere2", {"sliding_window": 6, "num_hidden_layers": 5, "tie_word_embeddings": True}),
    "cwm": ("cwm", {"sliding_window": 6, "num_hidden_layers": 5}),
    "dbrx": (
        "dbrx",
        {
            "d_model": 60,
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 0.8, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 5, "moe_top_k": 2},
        },
    ),
    "dbrx-plain": (
        "dbrx",
        {
            "d_model": 60,
            "attn_config": {"kv_n_heads": 3, "clip_qkv": 50.0, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 40,
                "moe_num_experts": 4,
                "moe_top_k": 3,
                "moe_normalize_expert_weights": None,
            },
        },
    ),
    "deepseek": ("deepseek", {}),
    "deepseek-normalised": ("deepseek", {"norm_topk_prob": True, "num_key_value_heads": 1}),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **LATENT,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None, "v_head_dim": 14, "rope_parameters": latent_yarn(0.707, 0.707)},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": 24,
            "n_group": 2,
            "topk_group": 1,
            "attention_bias": True,
            "rope_parameters": latent_yarn(1.0, 0.5),
        },
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 3,
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_vl": ("deepseek_vl", {}),
    "dots1": (
        "dots1",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.7,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
    ),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5-biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 1,
        },
    ),
    "ernie4_5_moe-some-layers": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 0,
            "moe_layer_interval": 2,
        },
    ),
    "exaone": ("exaone", {}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4-windows": ("exaone4", EXAONE_WINDOWS),
    "exaone_moe": (
        "exaone_moe",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "num_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
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
    **OF_FALCON_H1,
    **OF_GEMMA,
    "glm": ("glm", {}),
    "glm-untold": ("glm", {"attention_bias": False, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "glm4_moe": (
        "glm4_moe",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **{name: value for name, value in LATENT.items() if name != "first_k_dense_replace"},
            "q_lora_rank": 24,
            "n_group": 2,
            "topk_group": 1,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "gpt2": ("gpt2", {"tie_word_embeddings": True}),
    "gpt2-inner": ("gpt2", {"n_inner": 100, "scale_attn_weights": False}),
    "gptj": ("gptj", {"rotary_dim": 8, "n_inner": 100}),
    "gpt_bigcode": ("gpt_bigcode", {"tie_word_embeddings": True}),
    "gpt_bigcode-heads": ("gpt_bigcode", {"multi_query": False, "n_inner": 100}),
    "gpt_neo": (
        "gpt_neo",
        {"attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 6, "tie_word_embeddings": True},
    ),
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
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "granitemoe": (
        "granitemoe",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.5,
        },
    ),
    "granitemoeshared": (
        "granitemoeshared",
        {"num_local_experts": 5, "shared_intermediate_size": 52, "attention_multiplier": 0.3, "logits_scaling": 0.5},
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
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 6, "moe_topk": 2}),
    "hyperclovax": (
        "hyperclovax",
        {"residual_multiplier": 0.6, "embedding_multiplier": 3.0, "logits_scaling": 0.5, "attention_multiplier": 0.3},
    ),
    "hyperclovax-plain": ("hyperclovax", {"use_post_norm": False}),
    "idefics2": ("idefics2", {}),
    "idefics3": ("idefics3", {}),
    "internlm": ("internlm", {}),
    "internlm-dynamic": ("internlm", {"rotary": {"base": 10000, "type": "dynamic"}}),
    "internlm2": ("internlm2", {}),
    "internlm2-biases": ("internlm2", {"num_attention_heads": 6, "num_key_value_heads": 2, "bias": True}),
    "internlm3": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "internvl": ("internvl", {}),
    "jais2": ("jais2", {}),
    "janus": ("janus", {}),
    "kimi_k2": (
        "kimi_k2",
        {**LATENT, "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "rope_parameters": latent_yarn(1.0, 1.0, 1.0)},
    ),
    "kimi_k25": (
        "kimi_k25",
        {**LATENT, "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "rope_parameters": latent_yarn(1.0, 1.0, 1.0)},
    ),
    **OF_LFM2,
    "llama": ("llama", {}),
    "llama4": (
        "llama4",
        {"num_local_experts": 4, "intermediate_size": 40, "intermediate_size_mlp": 100, "attention_chunk_size": 16},
    ),
    "llama4_text": (
        "llama4_text",
        {
            "num_local_experts": 5,
            "intermediate_size": 40,
            "intermediate_size_mlp": 100,
            "attention_chunk_size": 7,
            "no_rope_layers": [1, 0, 1],
            "floor_scale": 4,
            "attn_scale": 0.3,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama4_text-dense": (
        "llama4_text",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size_mlp": 100,
            "moe_layers": [],
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 7,
            "floor_scale": 4,
            "attn_scale": 0.3,
        },
    ),
    "llama4_text-some-layers": (
        "llama4_text",
        {
            "num_local_experts": 3,
            "intermediate_size": 40,
            "intermediate_size_mlp": 100,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
        },
    ),
    "llava": ("llava", {}),
    "llava_next": ("llava_next", {}),
    "llava_next_video": ("llava_next_video", {}),
    "llava_onevision": ("llava_onevision", {"tie_word_embeddings": True}),
    "mimo": ("mimo", {}),
    "minicpm": ("minicpm", {}),
    "minicpm-tied": ("minicpm", {"tie_word_embeddings": True}),
    "minicpm3": (
        "minicpm3",
        {
            **MINICPM3,
            "q_lora_rank": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {**LONG_OF_4, "original_max_position_embeddings": 128},
        },
    ),
    "minicpm3-long": (
        "minicpm3",
        {
            **MINICPM3,
            "q_lora_rank": None,
            "v_head_dim": 14,
            "attention_bias": True,
            "rope_parameters": {**LONG_OF_4, "original_max_position_embeddings": 16},
        },
    ),
    "minimax": (
        "minimax",
        {
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 4,
            "full_attn_alpha_factor": 1.7,
            "full_attn_beta_factor": 0.8,
            "mlp_alpha_factor": 1.3,
        },
    ),
    "minimax-windows": (
        "minimax",
        {"layer_types": ["full_attention"] * 3, "num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 7},
    ),
    "minimax_text_01": ("minimax_text_01", {}),
    "minimax_m2": (
        "minimax_m2",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "ministral": (
        "ministral",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "ministral3": ("ministral3", {"rope_parameters": GROWING}),
    "mistral": ("mistral", {}),
    "mistral3": ("mistral3", {"rope_parameters": GROWING}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral-windows": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 7}),
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
    "multi_modality": ("multi_modality", {}),
    "nemotron": ("nemotron", {}),
    **OF_MAMBA,
    "olmo": ("olmo", {}),
    "olmo-clipped": ("olmo", {"clip_qkv": 0.7, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 6,
            "num_hidden_layers": 5,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}},
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 7, "num_experts_per_tok": 3}),
    "olmoe-normalised": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True}),
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
    "orion": ("orion", {}),
    "phi": ("phi", {}),
    "phi-groups": ("phi", {"num_attention_heads": 6, "num_key_value_heads": 2, "partial_rotary_factor": 0.4}),
    "phi-quick": ("phi", {"hidden_act": "quick_gelu"}),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3-long": ("phi3", {"rope_parameters": LONG, "max_position_embeddings": 256}),
    "phimoe": ("phimoe", {"num_local_experts": 6, "router_jitter_noise": 1.5, "lm_head_bias": True}),
    "phimoe-biases": (
        "phimoe",
        {
            "num_local_experts": 4,
            "attention_bias": True,
            "sliding_window": 9,
            "rope_parameters": {
                **LONG,
                "original_max_position_embeddings": 128,
                "short_mscale": 1.2,
                "long_mscale": 1.2,
            },
        },
    ),
    **OF_QWEN,
    "qwen2_5_vl": ("qwen2_5_vl", {"rope_parameters": MROPE}),
    "qwen2_audio": ("qwen2_audio", {}),
    "qwen2_vl": ("qwen2_vl", {"rope_parameters": MROPE, "tie_word_embeddings": True}),
    "qwen3_vl": ("qwen3_vl", {"rope_parameters": MROPE}),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {
            "rope_parameters": MROPE,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "seed_oss": ("seed_oss", {}),
    "seed_oss-biases": ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3-windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 1], "mlp_bias": True},
    ),
    "smolvlm": ("smolvlm", {}),
    "solar_open": (
        "solar_open",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_shared_experts": 1,
            "attention_bias": True,
        },
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
    "telechat": ("telechat", {}),
    "telechat-groups": ("telechat", {"n_head": 6, "num_key_value_heads": 2}),
    "telechat-long": ("telechat", {"base_seqlen": 32}),
    "vaultgemma": (
        "vaultgemma",
        {"sliding_window": 6, "attn_logit_softcapping": 2.0, "tie_word_embeddings": True},
    ),
    "voxtral": ("voxtral", {}),
    "xverse": ("xverse", {}),
    "youtu": (
        "youtu",
        {
            **{name: LATENT[name] for name in ("num_key_value_heads", *LATENT_SIZES)},
            "q_lora_rank": 24,
            "tie_word_embeddings": True,
            "pad_token_id": None,  # whose row transformers zeroes when it loads a model
        },
    ),
}
