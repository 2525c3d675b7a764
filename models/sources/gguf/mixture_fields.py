"""Metadata of mixtures of experts and latent attention, as config.json fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmc.models.errors import ModelError
from llmc.models.sources.gguf.reader import Reader

_SIGMOID = 2  # value of expert_gating_func; 1 is a softmax
_WITHOUT_NORMED_HEADS = 128  # experts of Llama 4 Maverick


def expert_counts(read: Reader) -> dict[str, Any]:
    """Numbers of experts, under all families' names, and the width of one."""
    count, top_k = read.integer("expert_count"), read.integer("expert_used_count")
    read.metadata.integer(read.key("expert_shared_count"), 0, minimum=0)
    read.metadata.integer(read.key("expert_shared_feed_forward_length"), 0, minimum=0)
    return {
        **read.eps(),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), count),
        **dict.fromkeys(("num_experts_per_tok", "moe_k"), top_k),
        "moe_intermediate_size": read.integer("expert_feed_forward_length", _inner(read) or None),
    }


def _experts(read: Reader) -> dict[str, Any]:
    """n_shared_experts: number of experts merged in the shared matrices."""
    found, shared = expert_counts(read), read.rows("ffn_up_shexp.weight")
    inner = found["moe_intermediate_size"]
    if shared % inner:
        raise ModelError(
            f"{read.metadata.origin}: tensor ffn_up_shexp.weight has {shared} rows, no multiple of the {inner} of an "
            "expert; convert the model again"
        )
    return {**found, **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), shared // inner)}


def _inner(read: Reader) -> int:
    """Rows of an expert's first matrix, if metadata do not state them."""
    return read.rows("ffn_up_exps.weight") or read.rows("ffn_gate_up_exps.weight") // 2


def weights_of_experts(read: Reader, *, normalised: bool) -> dict[str, Any]:
    """How scores become weights. normalised: the default of files that do not say."""
    scale = read.number("expert_weights_scale", 0.0)
    groups = read.metadata.integer(read.key("expert_group_count"), 1, minimum=0) or 1
    top = read.metadata.integer(read.key("expert_group_used_count"), 1, minimum=0) or 1
    return {
        "norm_topk_prob": read.flag("expert_weights_norm", normalised),
        "routed_scaling_factor": scale or 1.0,
        "n_group": groups,
        "topk_group": top,
    }


def _gating(read: Reader, default: int) -> int:
    name = read.key("expert_gating_func")
    return read.metadata.integer(name, default, minimum=0, maximum=_SIGMOID) or default


def only_sigmoid(read: Reader) -> None:
    _only(read, _SIGMOID)


def _only(read: Reader, function: int) -> None:
    if _gating(read, function) != function:
        raise read.metadata.wrong(read.key("expert_gating_func"), str(function))


def _of_whole_model(read: Reader) -> dict[str, Any]:
    """Experts in every layer, with the width given for the whole model."""
    read.no_window()
    return {**_experts(read), "intermediate_size": _inner(read)}


def mixtral(read: Reader) -> dict[str, Any]:
    window = read.window()
    return {**_experts(read), "intermediate_size": _inner(read)} | ({"sliding_window": window} if window else {})


def qwen2moe(read: Reader) -> dict[str, Any]:
    """Weights of chosen experts are not normalised."""
    read.no_window()
    shared = read.rows("ffn_up_shexp.weight")
    read.integer("expert_shared_feed_forward_length", shared)
    inner = read.integer("expert_feed_forward_length", _inner(read) or None)
    return {
        **read.eps(),
        "num_experts": read.integer("expert_count"),
        "num_experts_per_tok": read.integer("expert_used_count"),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": False,
    }


def qwen3moe(read: Reader) -> dict[str, Any]:
    """Weights of the chosen experts are normalised."""
    read.no_window()
    return {**_experts(read), "norm_topk_prob": True}


def _dbrx(read: Reader) -> dict[str, Any]:
    found = _experts(read)
    inner = {
        "ffn_hidden_size": _inner(read),
        "moe_num_experts": found["num_experts"],
        "moe_top_k": found["num_experts_per_tok"],
    }
    heads = read.metadata.same_integer(read.key("attention.head_count_kv"))
    attention = {"kv_n_heads": heads, "clip_qkv": read.cap("attention.clamp_kqv")}
    return {**read.eps(), "attn_config": attention, "ffn_config": inner}


def _deepseek(read: Reader) -> dict[str, Any]:
    read.no_window()
    _leading(read)
    _only(read, 1)
    found = weights_of_experts(read, normalised=False)
    if found["routed_scaling_factor"] != 1.0:
        raise read.metadata.wrong(read.key("expert_weights_scale"), "1")
    return {**_experts(read), "norm_topk_prob": found["norm_topk_prob"]}


def _leading(read: Reader) -> None:
    """Marks the number of leading plain layers as read; tensors show it too."""
    read.metadata.integer(read.key("leading_dense_block_count"), 0, minimum=0)
    read.metadata.integer(read.key("interleave_moe_layer_step"), 1, minimum=0)


def _latent(read: Reader, *, rotated_halves: bool = False) -> dict[str, Any]:
    """Sizes of latent attention; files that keep heads apart from the shared key use the first names."""
    apart = read.metadata.has(read.key("attention.key_length_mla"))
    key, value = (f"attention.{part}_length{'_mla' if apart else ''}" for part in ("key", "value"))
    heads, rotated = read.metadata.same_integer(read.key("attention.head_count")), read.integer("rope.dimension_count")
    query = read.integer(key)
    if query <= rotated:
        raise read.metadata.wrong(read.key(key), f"more than rope.dimension_count {rotated}")
    queries = {"q_lora_rank": read.integer("attention.q_lora_rank")} if read.has("attn_q_a.weight") else {}
    return {
        **read.eps(),
        **queries,
        "kv_lora_rank": read.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": query - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": read.integer(value, read.integer("embedding_length") // heads),
        "rope_interleave": not rotated_halves,
        "num_key_value_heads": None,
        "head_dim": None,
        "partial_rotary_factor": None,
    }


def _deepseek2(read: Reader) -> dict[str, Any]:
    """V2 and relatives use a softmax; V3, R1 and Kimi K2 use sigmoid scores."""
    read.no_window()
    _leading(read)
    if not read.metadata.integer(read.key("expert_count"), 0, minimum=0):
        return _latent(read)
    sigmoid = _gating(read, 1) == _SIGMOID
    found = {**_latent(read), **_experts(read), **weights_of_experts(read, normalised=False)}
    if sigmoid:
        return {**found, "model_type": "deepseek_v3", "scoring_func": "sigmoid"}
    limited = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    return {**found, "topk_method": limited, "scoring_func": "softmax"}


def _minicpm3(read: Reader) -> dict[str, Any]:
    """Multipliers that llama.cpp hard-codes for the only model."""
    read.no_window()
    return {**_latent(read, rotated_halves=True), "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


def sigmoid(read: Reader) -> dict[str, Any]:
    read.no_window()
    _leading(read)
    only_sigmoid(read)
    normed = {"use_qk_norm": read.has("attn_q_norm.weight")}
    return {**_experts(read), **weights_of_experts(read, normalised=True), **normed, "sliding_window": None}


def _ernie(read: Reader) -> dict[str, Any]:
    read.no_window()
    _leading(read)
    return _experts(read)


def _gpt_oss(read: Reader) -> dict[str, Any]:
    """Every other layer has a window, starting with the first."""
    window = {"sliding_window": read.integer("attention.sliding_window"), "layer_types": read.kinds(2)}
    return {**_experts(read), "intermediate_size": _inner(read), **window}


def _llama4(read: Reader) -> dict[str, Any]:
    """Chunks have 8192 tokens unless the file has none; intermediate_size is an expert's."""
    _leading(read)
    only_sigmoid(read)
    plain = read.metadata.has(read.key("attention.sliding_window")) and not read.window()
    found = _experts(read)
    return {
        **found,
        "intermediate_size": found["moe_intermediate_size"],
        "intermediate_size_mlp": read.integer("feed_forward_length"),
        "attention_chunk_size": None if plain else 8192,
        "use_qk_norm": found["num_experts"] != _WITHOUT_NORMED_HEADS,
    }


def _minimax(read: Reader) -> dict[str, Any]:
    read.no_window()
    only_sigmoid(read)
    return {**_experts(read), "intermediate_size": _inner(read)}


def _phimoe(read: Reader) -> dict[str, Any]:
    window = {"sliding_window": read.window()} if read.window() else {}
    return {**_experts(read), "intermediate_size": _inner(read), "lm_head_bias": "output.bias" in read.shapes, **window}


MIXTURES: Mapping[str, Callable[[Reader], dict[str, Any]]] = {
    "dbrx": _dbrx,
    "deepseek": _deepseek,
    "deepseek2": _deepseek2,
    "dots1": sigmoid,
    "ernie4_5-moe": _ernie,
    "glm4moe": sigmoid,
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
    "minicpm3": _minicpm3,
    "minimax-m2": _minimax,
    "olmoe": _of_whole_model,
    "phimoe": _phimoe,
    "qwen2moe": qwen2moe,
    "qwen3moe": qwen3moe,
}
