"""Shapes of known models, as in their config.json, and the tensors of such checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

SHAPES: dict[str, dict[str, object]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    # 26 layers as published; every sixth one sees the whole context.
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "vocab_size": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32768,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "phi-1.5": {
        "model_type": "phi",
        "architectures": ["PhiForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.5,
        "vocab_size": 51200,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu_new",
        "tie_word_embeddings": False,
    },
    # Qwen3-30B-A3B with 6 of its 48 layers and a smaller vocabulary.
    "qwen3-moe-4b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    # Gemma 4 E2B with a smaller vocabulary.
    "gemma-4-e2b": {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "use_double_wide_mlp": True,
        "num_hidden_layers": 35,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_kv_shared_layers": 20,
        "hidden_size_per_layer_input": 256,
        "vocab_size": 32768,
        "vocab_size_per_layer_input": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    # Qwen3.5-0.8B with a smaller vocabulary.
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
    },
    # LFM2-1.2B.
    "lfm2-1.2b": {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "num_hidden_layers": 16,
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
        "conv_L_cache": 3,
        "conv_bias": False,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
    },
    "granite-4.0-h-micro": {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "shared_intermediate_size": 8192,
        "num_local_experts": 0,
        "num_hidden_layers": 40,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "position_embedding_type": "nope",
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "logits_scaling": 8,
        "vocab_size": 100352,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_hidden_layers": 52,
        "layer_types": [
            {"M": "mamba", "-": "mlp", "*": "attention"}[letter]
            for letter in "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
        ],
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "mlp_hidden_act": "relu2",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131072,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    # gpt-oss-20b with 4 of its 24 layers and a smaller vocabulary, its experts as floats.
    "gpt-oss-3b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}


Sized = Iterator[tuple[str, tuple[int, ...]]]


def named(shape: dict[str, object]) -> Sized:
    """Names and sizes of all tensors of a checkpoint, in order."""
    hidden, model_type = _size(shape, "hidden_size"), shape["model_type"]
    if model_type in ("gemma4_text", "granitemoehybrid", "lfm2", "nemotron_h", "qwen3_5_text"):
        yield from _of_family(shape)
        return
    yield "model.embed_tokens.weight", (_size(shape, "vocab_size"), hidden)
    for i in range(_size(shape, "num_hidden_layers")):
        for name, size in _layer(shape):
            yield f"model.layers.{i}.{name}", size
    if model_type == "phi":
        yield from _affine("model.final_layernorm", hidden)
    else:
        yield "model.norm.weight", (hidden,)
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", (_size(shape, "vocab_size"), hidden)
        if model_type == "phi":
            yield "lm_head.bias", (_size(shape, "vocab_size"),)


def _of_family(shape: dict[str, object]) -> Sized:
    """As llmc's family reads them."""
    from llmc.models.fields import Fields
    from llmc.models.registry import get_family

    family = get_family(str(shape["model_type"]))
    config = family.read_config(Fields(shape, "shape"), Fields({}, "shape"))
    for target in family.weight_map(config).targets:
        for source in target.sources:
            yield source.name, source.stored_shape


def of_layers(shape: dict[str, object], count: int) -> dict[str, object]:
    """The first layers of a shape, of which none shares keys of another."""
    found = {**shape, "num_hidden_layers": count}
    if isinstance(kinds := shape.get("layer_types"), list):
        shared = {"num_kv_shared_layers": 0} if "num_kv_shared_layers" in shape else {}
        found |= {"layer_types": kinds[:count], **shared}
    return found


def is_norm(name: str, size: tuple[int, ...]) -> bool:
    """Whether a tensor holds factors: of a norm, or of a layer."""
    return len(size) == 1 and name.endswith(("norm.weight", "norm_f.weight", "layer_scalar"))


def _size(shape: dict[str, object], name: str) -> int:
    value = shape[name]
    assert isinstance(value, int)
    return value


def _affine(name: str, width: int) -> Sized:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _matrix(name: str, rows: int, columns: int, bias: bool) -> Sized:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _layer(shape: dict[str, object]) -> Sized:
    hidden, model_type = _size(shape, "hidden_size"), shape["model_type"]
    heads, kv_heads = _size(shape, "num_attention_heads"), _size(shape, "num_key_value_heads")
    head_dim = hidden // heads if "head_dim" not in shape else _size(shape, "head_dim")
    biased, out = model_type in ("qwen2", "phi", "gpt_oss"), "dense" if model_type == "phi" else "o_proj"
    for name, rows in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
        yield from _matrix(f"self_attn.{name}_proj", rows, hidden, biased)
    yield from _matrix(f"self_attn.{out}", hidden, heads * head_dim, biased and model_type != "qwen2")
    if model_type in ("qwen3_moe", "gemma3_text"):
        yield from ((f"self_attn.{name}_norm.weight", (head_dim,)) for name in "qk")
    if model_type == "gpt_oss":
        yield "self_attn.sinks", (heads,)
    yield from _mlp(shape)
    if model_type == "phi":
        yield from _affine("input_layernorm", hidden)
        return
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if model_type == "gemma3_text" else []
    yield from ((f"{name}.weight", (hidden,)) for name in norms)


def _mlp(shape: dict[str, object]) -> Sized:
    hidden, inter, model_type = _size(shape, "hidden_size"), _size(shape, "intermediate_size"), shape["model_type"]
    if model_type == "phi":
        yield from _matrix("mlp.fc1", inter, hidden, True)
        yield from _matrix("mlp.fc2", hidden, inter, True)
    elif model_type == "qwen3_moe":
        experts = _size(shape, "num_experts")
        yield "mlp.gate.weight", (experts, hidden)
        for expert in range(experts):
            yield from _gated(f"mlp.experts.{expert}", hidden, _size(shape, "moe_intermediate_size"))
    elif model_type == "gpt_oss":
        experts = _size(shape, "num_local_experts")
        yield from _matrix("mlp.router", experts, hidden, True)
        yield "mlp.experts.gate_up_proj", (experts, hidden, 2 * inter)
        yield "mlp.experts.gate_up_proj_bias", (experts, 2 * inter)
        yield "mlp.experts.down_proj", (experts, inter, hidden)
        yield "mlp.experts.down_proj_bias", (experts, hidden)
    else:
        yield from _gated("mlp", hidden, inter)


def _gated(name: str, hidden: int, inter: int) -> Sized:
    yield f"{name}.gate_proj.weight", (inter, hidden)
    yield f"{name}.up_proj.weight", (inter, hidden)
    yield f"{name}.down_proj.weight", (hidden, inter)
