"""Models with gated short convolutions as llama.cpp's files have them: names of their tensors, and what their metadata
say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmc.models.families.layer_kinds import CONV, FULL
from llmc.models.layout import Layout
from llmc.models.short_conv_layout import ShortConvLayout
from llmc.models.sources.gguf.mixture_fields import sigmoid
from llmc.models.sources.gguf.part_names import layers_with
from llmc.models.sources.gguf.reader import Reader

LAYOUT = Layout(short_conv=ShortConvLayout(taps_only=True))
OF_LAYERS = {
    f"shortconv.{part}.{kind}": f"conv.{part}.{kind}"
    for part in ("in_proj", "conv", "out_proj")
    for kind in ("weight", "bias")
}
"""Tensors of a layer, theirs to those of a checkpoint."""
OF_MODEL = {"token_embd_norm.weight": f"{LAYOUT.norm}.weight"}
"""The last norm, in spite of its name there."""
_SCORES = ("exp_probs_b.bias", "exp_probs_b.weight", "exp_probs_b")


def _dense(read: Reader) -> dict[str, Any]:
    read.no_window()
    return {**read.eps(), **_layers(read), "block_auto_adjust_ff_dim": False}


def _mixture(read: Reader) -> dict[str, Any]:
    """The first layers have plain blocks. Weights are normalised unless the file says otherwise."""
    return {
        **sigmoid(read),
        **_layers(read),
        "num_dense_layers": read.metadata.integer(read.key("leading_dense_block_count"), 0, minimum=0),
        "use_expert_bias": any(layers_with(name, iter(read.shapes)) for name in _SCORES),
    }


def _layers(read: Reader) -> dict[str, Any]:
    """Layers with a convolution have no KV heads. Raises ModelError unless tensors agree."""
    heads = read.of_layers("attention.head_count_kv")
    convolved = [i for i, number in enumerate(heads) if not number]
    read.check_layers("shortconv.conv.weight", convolved, "a convolution", "attention.head_count_kv")
    return {
        # Without attention, any number.
        "num_key_value_heads": max(heads) or 1,
        "layer_types": [FULL if number else CONV for number in heads],
        "conv_L_cache": read.integer("shortconv.l_cache"),
        "conv_bias": bool(layers_with("shortconv.in_proj.bias", iter(read.shapes))),
    }


SHORT_CONVS: Mapping[str, Callable[[Reader], dict[str, Any]]] = {"lfm2": _dense, "lfm2moe": _mixture}
