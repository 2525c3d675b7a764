"""llama.cpp's names for parts of a model, by their names in a checkpoint layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from llmc.models.layout import Layout

LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)", re.ASCII | re.DOTALL)
"""A layer's tensor: layer number, and name within the layer."""
_KINDS = ("weight", "bias")
# Latent attention, whose names all checkpoints share.
_LATENT = {
    "attn_q_a": "q_a_proj",
    "attn_q_a_norm": "q_a_layernorm",
    "attn_q_b": "q_b_proj",
    "attn_kv_a_mqa": "kv_a_proj_with_mqa",
    "attn_kv_a_norm": "kv_a_layernorm",
    "attn_kv_b": "kv_b_proj",
    "attn_k_b": "k_b_proj",
    "attn_v_b": "v_b_proj",
}
# Of a layer for multi-token prediction, as in `DEEPSEEK_MTP`.
_MTP = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}


def whole_names(layout: Layout) -> dict[str, str]:
    """Names of tensors outside layers, theirs → ours, with suffixes."""
    modules = {
        "token_embd": layout.embed,
        "token_embd_norm": layout.embed_norm,
        "position_embd": layout.positions,
        "token_types": layout.types,
        "output_norm": layout.norm,
        "output": layout.head,
        **dict(zip(("cls", "cls.output"), layout.dense, strict=False)),
    }
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in modules.items() if ours for kind in _KINDS}


def layer_names(layout: Layout, others: Mapping[str, str], *, gated: bool) -> dict[str, str]:
    """Names of a layer's tensors, theirs → ours, with suffixes. If two of theirs map to one of ours, the first is the
    usual one.

    others: modules that an architecture names differently.
    """
    of_expert = {f"ffn_{part}_shexp": f"{layout.shared}.{part}_proj" for part in ("gate", "up", "down")}
    feed_forward = _feed_forward(layout) if gated else {"ffn_up": layout.up}
    attention = {"attn_qkv": layout.qkv[0]} if len(layout.qkv) == 1 else dict(
        zip(("attn_q", "attn_k", "attn_v"), layout.qkv, strict=True)
    )  # fmt: skip
    modules = {
        "attn_norm": layout.attention_norm,
        **attention,
        "attn_output": layout.out,
        "attn_q_norm": layout.q_norm,
        "attn_k_norm": layout.k_norm,
        **{theirs: f"self_attn.{ours}" for theirs, ours in _LATENT.items()},
        "ffn_norm": layout.mlp_norm,
        "post_attention_norm": layout.post_attention_norm,
        **feed_forward,
        "ffn_down": layout.down,
        "post_ffw_norm": layout.post_mlp_norm,
        "ffn_gate_inp": layout.router,
        **of_expert,
        "ffn_gate_inp_shexp": layout.shared_gate,
        **_MTP,
        **others,
    }
    tensors = {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in modules.items() for kind in _KINDS}
    for scores in ("exp_probs_b.bias", "exp_probs_b.weight", "exp_probs_b"):
        tensors[scores] = layout.choice_bias
    return {**tensors, "attn_sinks.weight": layout.sinks}


def _feed_forward(layout: Layout) -> dict[str, str]:
    names = ("ffn_up",) if len(layout.gate_up) == 1 else ("ffn_gate", "ffn_up")
    return dict(zip(names, layout.gate_up, strict=True))


def expert_names(layout: Layout, *, gated: bool) -> dict[str, str]:
    """Names of tensors of all experts of a layer, theirs → ours with {} for the expert's number."""
    one = ("ffn_gate_up_exps",) if gated else ("ffn_up_exps",)
    theirs = one if len(layout.expert_gate_up) == 1 else ("ffn_gate_exps", "ffn_up_exps")
    found = dict(zip((f"{name}.weight" for name in theirs), layout.expert_gate_up, strict=True))
    found["ffn_down_exps.weight"] = layout.expert_down
    found.update(zip((f"{name}.bias" for name in theirs), layout.expert_gate_up_bias, strict=False))
    return found | ({"ffn_down_exps.bias": layout.expert_down_bias} if layout.expert_down_bias else {})


def inverse(names: Mapping[str, str]) -> dict[str, str]:
    """The inverse mapping."""
    return {ours: theirs for theirs, ours in reversed(tuple(names.items()))}


def layers_with(part: str, names: Iterator[str]) -> tuple[int, ...]:
    """Numbers of layers with a tensor, ascending."""
    return tuple(sorted(int(found[1]) for name in names if (found := LAYER.fullmatch(name)) and found[2] == part))
