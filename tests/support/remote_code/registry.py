"""The definitions by model_type, with what their authors' config.json files say, in small."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from support.remote_code.encoders import FlashRobertaClassifier, NomicBert
from support.remote_code.llama_like import Baichuan, DeepSeek, InternLm, Llama, Mimo, MiniCpm, Orion
from support.remote_code.minimax import MiniMax
from support.remote_code.own_names import ChatGlm, InternLm2, Qwen, TeleChat
from support.remote_code.parts import Config

_COMMON: Config = {
    "vocab_size": 515,
    "hidden_size": 60,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "use_cache": True,
}
_LLAMA: Config = {
    **_COMMON,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}
_EXPERTS: Config = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "rope_theta": 10000,
    "rope_scaling": None,
    "attention_bias": False,
}
_QWEN: Config = {
    **_COMMON,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 200,
    "kv_channels": 20,
    "layer_norm_epsilon": 1e-6,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "seq_length": 128,
    "max_position_embeddings": 512,
    "no_bias": True,
    "scale_attn_weights": True,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "use_flash_attn": "auto",
    "bf16": False,
}
_GLM: Config = {
    **{name: value for name, value in _COMMON.items() if name != "vocab_size"},
    "padded_vocab_size": 515,
    "num_layers": 3,
    "num_attention_heads": 3,
    "kv_channels": 20,
    "ffn_hidden_size": 100,
    "layernorm_epsilon": 1e-5,
    "multi_query_attention": True,
    "multi_query_group_num": 1,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_softmax_in_fp32": True,
    "fp32_residual_connection": False,
    "original_rope": True,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 128,
}
_TELECHAT: Config = {
    **_COMMON,
    "n_layer": 3,
    "n_head": 3,
    "ffn_hidden_size": 100,
    "layer_norm_epsilon": 1e-5,
    "seq_length": 128,
    "training_seqlen": 128,
    "base_seqlen": 128,
    "embed_layernorm": False,
    "apply_residual_connection_post_layernorm": False,
    "flash_attn": True,
    "logn": True,
}
_MINIMAX: Config = {
    **{name: value for name, value in _LLAMA.items() if not name.endswith("token_id")},
    "num_key_value_heads": 1,
    "head_dim": 24,
    "rotary_dim": 12,
    "rope_theta": 10000000,
    "attn_type_list": [1, 1, 1],
    "layernorm_full_attention_alpha": 3.5565588200778455,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 3.5565588200778455,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 3.5565588200778455,
    "layernorm_mlp_beta": 1.0,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "attention_dropout": 0.0,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "postnorm": True,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
}
_MINICPM: Config = {"num_key_value_heads": 1, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 20}

REMOTE: dict[str, tuple[Callable[[Config], nn.Module], Config]] = {
    "aquila": (Llama, {**_LLAMA, "pretraining_tp": 1, "rope_scaling": None}),
    "baichuan": (Baichuan, _LLAMA),
    "chatglm": (ChatGlm, _GLM),
    "deepseek": (DeepSeek, {**_LLAMA, **_EXPERTS}),
    "internlm": (InternLm, {**_LLAMA, "bias": True}),
    "internlm2": (InternLm2, {**_LLAMA, "num_key_value_heads": 1, "rope_theta": 1000000, "bias": False}),
    "mimo": (Mimo, {**_LLAMA, "num_key_value_heads": 1, "attention_bias": True, "num_nextn_predict_layers": 1}),
    "minicpm": (MiniCpm, {**_LLAMA, **_MINICPM}),
    "minimax_text_01": (MiniMax, _MINIMAX),
    "orion": (Orion, {**_LLAMA, "num_key_value_heads": 1}),
    "qwen": (Qwen, _QWEN),
    "telechat": (TeleChat, _TELECHAT),
    "xverse": (Llama, {**_LLAMA, "max_tokenizer_truncation": 100}),
}

_NOMIC: Config = {
    "model_type": "nomic_bert",
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "auto_map": {"AutoModel": "modeling_hf_nomic_bert.NomicBertModel"},
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 32,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 60,
    "n_head": 3,
    "n_inner": 256,
    "n_layer": 2,
    "n_positions": 96,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.0,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "torch_dtype": "float32",
    "transformers_version": "4.37.2",
    "type_vocab_size": 2,
    "use_cache": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "use_xentropy": True,
    "vocab_size": 203,
}
_FLASH: Config = {
    "_name_or_path": "jina-reranker-v2-base-multilingual",
    "architectures": ["XLMRobertaForSequenceClassification"],
    "attention_probs_dropout_prob": 0.1,
    "auto_map": {
        "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": "modeling_xlm_roberta.XLMRobertaModel",
        "AutoModelForSequenceClassification": "modeling_xlm_roberta.XLMRobertaForSequenceClassification",
    },
    "bos_token_id": 0,
    "classifier_dropout": None,
    "emb_pooler": None,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 60,
    "num_labels": 1,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "intermediate_size": 100,
    "label2id": {"LABEL_0": 0},
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 98,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "output_past": True,
    "pad_token_id": 1,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "transformers_version": "4.40.0",
    "type_vocab_size": 1,
    "use_cache": False,
    "use_flash_attn": True,
    "vocab_size": 203,
}
ENCODERS: dict[str, tuple[Callable[[Config], nn.Module], Config]] = {
    "NomicBertModel": (NomicBert, _NOMIC),
    "XLMRobertaForSequenceClassification": (FlashRobertaClassifier, _FLASH),
}
"""By the architecture that config.json names."""


def run_encoder(path: Path) -> nn.Module:
    """An encoder of a checkpoint in its authors' names: ids [T] → hidden states, or scores."""
    config = json.loads((path / "config.json").read_text())
    model = ENCODERS[config["architectures"][0]][0](config)
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model.eval()


def remote_config(family: str, **overrides: object) -> Config:
    """What config.json says; a field that is overridden by None is not there."""
    fields = {"model_type": family, **REMOTE[family][1], **overrides}
    return {name: value for name, value in fields.items() if value is not None}


def save_remote(model: nn.Module, config: Config, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))


def remote_model(path: Path) -> nn.Module:
    """The model of a checkpoint, float32."""
    config = json.loads((path / "config.json").read_text())
    model = REMOTE[config["model_type"]][0](config)
    tensors = load_file(path / "model.safetensors")
    if config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = next(tensor for name, tensor in tensors.items() if "embed" in name)
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name in model.state_dict()})
    return model.float().eval()


def run_remote(path: Path, dtype: torch.dtype) -> Callable[..., SimpleNamespace]:
    """The model of a checkpoint, which is called as those of transformers are, with one text."""
    model = remote_model(path).to(dtype)

    def run(ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=model(ids[0])[None])

    return run
