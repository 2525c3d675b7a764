"""Models with gated short convolutions as llama.cpp's files have them: names of their tensors, and what their metadata
say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmc.models.errors import ModelError
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
    metadata, count, key = read.metadata, read.layers(), read.key("attention.head_count_kv")
    heads = metadata.array(key)
    if heads is None:
        raise metadata.missing(key)
    of_layers = heads.integers()
    if len(of_layers) != count or len(set(of_layers) - {0}) != 1:
        raise metadata.wrong(key, f"a list of {count} integers, each 0 or the same number")
    told = tuple(i for i, number in enumerate(of_layers) if not number)
    found = tuple(i for i in layers_with("shortconv.conv.weight", iter(read.shapes)) if i < count)
    if found != told:
        one = min(set(found) ^ set(told))
        raise ModelError(
            f"{metadata.origin}: layer {one} {'has' if one in found else 'lacks'} a convolution "
            f"(shortconv.conv.weight), other than metadata {key} says; convert the model again"
        )
    return {
        "num_key_value_heads": max(of_layers),
        "layer_types": [CONV if i in found else FULL for i in range(count)],
        "conv_L_cache": read.integer("shortconv.l_cache"),
        "conv_bias": bool(layers_with("shortconv.in_proj.bias", iter(read.shapes))),
    }


SHORT_CONVS: Mapping[str, Callable[[Reader], dict[str, Any]]] = {"lfm2": _dense, "lfm2moe": _mixture}
