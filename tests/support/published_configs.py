"""config.json files as authors publish them, of models that no other file of the tests has, and their sizes.

Keys and sizes are those of the published files. Other values may be those of a close relative, such as lengths, ids of
tokens and epsilons. What a file repeats of transformers' defaults may be missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
_LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
_YI_34B: Config = {
    **_LLAMA, "hidden_size": 7168, "intermediate_size": 20480, "num_attention_heads": 56, "num_hidden_layers": 60,
    "num_key_value_heads": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 5000000.0,
    "vocab_size": 64000,
}  # fmt: skip
_AQUILA_7B: Config = {
    **_LLAMA, "architectures": ["AquilaForCausalLM"], "model_type": "aquila", "bos_token_id": 100006,
    "eos_token_id": 100007, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
    "num_hidden_layers": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "vocab_size": 100008,
    "auto_map": {
        "AutoConfig": "configuration_aquila.AquilaConfig",
        "AutoModelForCausalLM": "modeling_aquila.AquilaForCausalLM",
    },
}  # fmt: skip
_TELECHAT: Config = {
    "apply_residual_connection_post_layernorm": False, "architectures": ["TelechatForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_telechat.TelechatConfig",
        "AutoModelForCausalLM": "modeling_telechat.TelechatForCausalLM",
    },
    "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_dropout": 0.0, "initializer_range": 0.02, "masked_softmax_fusion": True,
    "model_type": "telechat", "n_inner": None, "pad_token_id": 3, "seq_length": 8192, "skip_bias_add": True,
    "skip_bias_add_qkv": False, "slow_but_exact": False, "unk_token_id": 0, "use_cache": True, "flash_attn": True,
    "training_seqlen": 8192,
}  # fmt: skip
_DEEPSEEK: Config = {
    **_LLAMA, "bos_token_id": 100000, "eos_token_id": 100001, "pad_token_id": None, "pretraining_tp": 1,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0,
    "vocab_size": 102400,
}  # fmt: skip
_CODEGEEX2: Config = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm",
    "auto_map": {
        "AutoConfig": "configuration_chatglm.ChatGLMConfig",
        "AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration",
    },
    "add_bias_linear": False, "add_qkv_bias": True, "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True, "ffn_hidden_size": 13696, "fp32_residual_connection": False, "hidden_dropout": 0.0,
    "hidden_size": 4096, "interleaved_qkv": False, "kv_channels": 128, "layernorm_epsilon": 1e-5,
    "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 28,
    "original_rope": True, "padded_vocab_size": 65024, "post_layer_norm": True, "rmsnorm": True,
    "rotary_percent": 0.5, "seq_length": 8192, "use_cache": True, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

_QWEN3_NEXT: Config = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_LFM2: Config = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0,
    "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
    "conv_use_xavier_init": True, "eos_token_id": 7, "initializer_range": 0.02, "max_position_embeddings": 128000,
    "model_type": "lfm2", "norm_eps": 1e-5, "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0,
    "use_cache": True, "use_pos_enc": True, "vocab_size": 65536,
}  # fmt: skip
_LFM2_LAYERS = ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)]
_LFM2_MOE: Config = {
    "architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
    "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 7168,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    "max_position_embeddings": 128000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_eps": 1e-5,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0,
    "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "use_cache": True, "use_expert_bias": True,
    "vocab_size": 65536,
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """parameters: of the published checkpoint, without counting shared ones twice."""

    config: Config
    parameters: int


PUBLISHED: dict[str, Published] = {
    "AquilaChat-7B": Published(_AQUILA_7B, 7_295_537_152),
    "CodeGeeX2-6B": Published(_CODEGEEX2, 6_243_584_000),
    "LFM2-1.2B": Published(
        {
            **_LFM2, "block_dim": 2048, "block_ff_dim": 12288, "conv_dim": 2048, "conv_dim_out": 2048,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "num_attention_heads": 32, "num_heads": 32,
            "rope_theta": 1000000.0, "theta": 1000000.0, "torch_dtype": "bfloat16",
        },
        1_170_340_608,
    ),
    "LFM2.5-350M": Published(
        {
            **_LFM2, "block_dim": 1024, "block_ff_dim": 6656, "conv_dim": 1024, "dtype": "bfloat16",
            "hidden_size": 1024, "intermediate_size": 6656, "layer_types": _LFM2_LAYERS, "num_attention_heads": 16,
            "num_heads": 16, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "tie_embedding": True, "tie_word_embeddings": True,
        },
        354_483_968,
    ),
    "LFM2-8B-A1B": Published(_LFM2_MOE, 8_339_930_560),
    "QwQ-32B": Published(
        {
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
            "intermediate_size": 27648, "max_position_embeddings": 40960, "max_window_layers": 64,
            "model_type": "qwen2", "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
        },
        32_763_876_352,
    ),
    "Qwen3-Next-80B-A3B": Published(_QWEN3_NEXT, 79_674_391_296),
    "SUS-Chat-34B": Published(
        {**_YI_34B, "max_position_embeddings": 8192, "pretraining_tp": 1, "rope_scaling": None}, 34_388_917_248
    ),
    "TeleChat-7B": Published(
        {
            **_TELECHAT, "embed_layernorm": False, "ffn_hidden_size": 12288, "hidden_size": 4096,
            "layer_norm_epsilon": 1e-5, "n_head": 32, "n_layer": 30, "vocab_size": 160256,
        },
        7_200_018_432,
    ),
    "TeleChat-12B": Published(
        {
            **_TELECHAT, "embed_layernorm": False, "ffn_hidden_size": 12288, "hidden_size": 5120,
            "layer_norm_epsilon": 1e-5, "logn": False, "n_head": 32, "n_layer": 38, "offset_alibi": 100,
            "pretraining_tp": 2, "semi_causal": False, "tie_word_embeddings": False, "vocab_size": 120000,
        },
        12_386_432_000,
    ),
    "TeleChat2-115B": Published(
        {
            **_TELECHAT, "base_seqlen": 8192, "ffn_hidden_size": 40960, "hidden_size": 8192,
            "layer_norm_epsilon": 1e-8, "n_head": 64, "n_layer": 96, "num_key_value_heads": 8, "pretraining_tp": 2,
            "skip_bias_add": False, "tie_word_embeddings": False, "vocab_size": 131072,
        },
        113_282_916_352,
    ),
    "Yi-34B": Published(_YI_34B, 34_388_917_248),
    "Yi-6B": Published(
        {
            **_YI_34B, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 4,
        },
        6_061_035_520,
    ),
    "XuanYuan-6B": Published(
        {
            **_LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
            "num_hidden_layers": 30, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "vocab_size": 39438,
        },
        6_394_580_992,
    ),
    "XuanYuan-70B": Published(
        {
            **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
            "num_hidden_layers": 80, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            "vocab_size": 39438,
        },
        69_098_512_384,
    ),
    "deepseek-llm-67b": Published(
        {
            **_DEEPSEEK, "hidden_size": 8192, "intermediate_size": 22016, "num_attention_heads": 64,
            "num_hidden_layers": 95, "num_key_value_heads": 8,
        },
        67_425_001_472,
    ),
    "deepseek-llm-7b": Published(
        {
            **_DEEPSEEK, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
            "num_hidden_layers": 30, "num_key_value_heads": 32,
        },
        6_910_365_696,
    ),
    "vicuna-7b-v1.5": Published(
        {
            **_LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096, "pretraining_tp": 1,
            "rms_norm_eps": 1e-5, "rope_scaling": None, "torch_dtype": "float16", "vocab_size": 32000,
        },
        6_738_415_616,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Hybrid:
    """A model with layers of linear attention. sentence: of its refusal. softmax: what its config says if there are
    none."""

    config: Config
    sentence: str
    softmax: Config


_MINIMAX: Config = {
    "architectures": ["MiniMaxText01ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": ([0] * 7 + [1]) * 10,
    "auto_map": {
        "AutoConfig": "configuration_minimax_text_01.MiniMaxText01Config",
        "AutoModelForCausalLM": "modeling_minimax_text_01.MiniMaxText01ForCausalLM",
    },
    "bos_token_id": None, "eos_token_id": None, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144,
    "initializer_range": 0.02, "intermediate_size": 9216, "layernorm_full_attention_alpha": 3.5565588200778455,
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_alpha": 3.5565588200778455,
    "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_alpha": 3.5565588200778455, "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 10240000, "model_type": "minimax_text_01", "num_attention_heads": 64,
    "num_experts_per_tok": 2, "num_hidden_layers": 80, "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": False, "postnorm": True, "rms_norm_eps": 1e-5, "rope_theta": 10000000, "rotary_dim": 64,
    "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid", "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
    "vocab_size": 200064,
}  # fmt: skip
HYBRIDS: dict[str, Hybrid] = {
    "MiniMax-Text-01": Hybrid(
        _MINIMAX,
        "layer 0 has linear attention (lightning attention), as have 70 of 80 layers",
        {"attn_type_list": [1] * 80},
    ),
}
