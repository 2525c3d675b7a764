"""Encoder metadata as config.json fields, and pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmc.models.sources.gguf.reader import Reader

_PERIOD = 3  # ModernBERT layers; the first of them has no window


def _bert(read: Reader) -> dict[str, Any]:
    """The file states each table's size."""
    types, positions = read.shapes.get("token_types.weight"), read.shapes.get("position_embd.weight")
    found = {**read.eps(), "type_vocab_size": types[0] if types else 1}
    return found | ({"max_position_embeddings": positions[0]} if positions else {})


def _modern_bert(read: Reader) -> dict[str, Any]:
    """The window counts tokens on both sides."""
    theta = read.number("rope.freq_base", 160000.0)
    return {
        **read.eps(),
        "rope_theta": None,
        "global_rope_theta": theta,
        "local_rope_theta": read.number("rope.freq_base_swa", 10000.0),
        "local_attention": read.integer("attention.sliding_window"),
        "layer_types": read.kinds(_PERIOD, full_first=True),
        "norm_bias": "output_norm.bias" in read.shapes,
    }


ENCODERS: Mapping[str, Callable[[Reader], dict[str, Any]]] = {
    "bert": _bert,
    "nomic-bert": _bert,
    "modern-bert": _modern_bert,
}
