"""Granite as llama.cpp's files have it: what metadata say, also of Granite 4 and Bamba, which have Mamba-2 mixers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmc.models.families.layer_kinds import FULL, LINEAR
from llmc.models.layout import Layout
from llmc.models.sources.gguf import mamba
from llmc.models.sources.gguf.mixture_fields import expert_counts
from llmc.models.sources.gguf.reader import Reader

LAYOUT = Layout(mamba=mamba.LAYOUT)
_HEADS, _ROTATED = "attention.head_count_kv", "rope.scaling.finetuned"
_SHARED = "expert_shared_feed_forward_length"
_UNUSED = (*mamba.SIZES, _SHARED)
"""What today's converter tells of Granite 4 without mixers or experts, too."""


def _multipliers(read: Reader) -> dict[str, float]:
    """0 stands for none, and of scores for the usual scale."""
    usual = read.integer("attention.key_length", _head_dim(read)) ** -0.5
    names = {
        "attention_multiplier": ("attention.scale", usual),
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
        "logits_scaling": ("logit_scale", 1.0),
    }
    return {ours: read.number(theirs, 0.0) or neutral for ours, (theirs, neutral) in names.items()}


def _head_dim(read: Reader) -> int:
    return max(1, read.integer("embedding_length") // read.metadata.same_integer(read.key("attention.head_count")))


def _dense(read: Reader) -> dict[str, Any]:
    if not read.flag(_ROTATED, True):
        return _hybrid(read)
    read.no_window()
    _ignore(read)
    return {**read.eps(), **_multipliers(read), "model_type": "granite"}


def _ignore(read: Reader) -> None:
    for name in _UNUSED:
        read.metadata.has(read.key(name))


def _mixture(read: Reader) -> dict[str, Any]:
    """Granite 3, and Granite 4 without mixers."""
    if not read.metadata.integer(read.key("expert_count"), 0, minimum=0):
        return _dense(read)
    if not read.flag(_ROTATED, True):
        return _hybrid(read)
    _ignore(read)
    shared = read.rows("ffn_up_shexp.weight")
    kind = {"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {}
    return {**_experts(read), **_multipliers(read), **kind}


def _experts(read: Reader) -> dict[str, Any]:
    read.no_window()
    found = expert_counts(read)
    return {**found, "intermediate_size": found["moe_intermediate_size"]}


def _hybrid(read: Reader) -> dict[str, Any]:
    """Layers with a mixer have no KV heads. Heads are rotated only if a flag says so: as in Bamba, not in Granite 4 H.
    Without experts, every token takes the block that experts would share."""
    read.no_window()
    heads = read.of_layers(_HEADS)
    mixers = [i for i, number in enumerate(heads) if not number]
    read.check_layers(mamba.OF_EACH, mixers, "a Mamba-2 mixer", _HEADS)
    _ignore(read)
    if read.metadata.integer(read.key("expert_count"), 0, minimum=0):
        found = {**_experts(read), "shared_intermediate_size": read.rows("ffn_up_shexp.weight")}
    else:
        found = {**read.eps(), "num_local_experts": 0, "shared_intermediate_size": read.integer("feed_forward_length")}
    return {
        **found,
        **_multipliers(read),
        **(_net(read) if mixers else {}),
        "model_type": "granitemoehybrid",
        # Without attention, any number.
        "num_key_value_heads": max(heads) or 1,
        "layer_types": [FULL if number else LINEAR for number in heads],
        "position_embedding_type": "rope" if read.flag(_ROTATED, True) else "nope",
    }


def _net(read: Reader) -> dict[str, Any]:
    net, hidden = mamba.read_sizes(read), read.integer("embedding_length")
    if net.inner % hidden:
        raise read.metadata.wrong(read.key("ssm.inner_size"), f"a multiple of embedding_length {hidden}")
    return {**mamba.fields_of(net), "mamba_expand": net.inner // hidden}


GRANITES: Mapping[str, Callable[[Reader], dict[str, Any]]] = {
    "granite": _dense,
    "granitehybrid": _hybrid,
    "granitemoe": _mixture,
}
