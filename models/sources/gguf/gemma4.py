"""Gemma 4 as llama.cpp's files have it: what its further tensors are called, and what its metadata say.

Numbers that differ by layer are arrays there. Lengths of keys are of layers without a window; those of layers with one
have names of their own.
"""

from __future__ import annotations

from typing import Any

from llmc.models.errors import ModelError
from llmc.models.sources.gguf.architecture import ROPE_FACTORS
from llmc.models.sources.gguf.reader import Reader
from llmc.models.sources.gguf.streams import INPUTS_OF_LAYERS, input_vocab
from llmc.models.windows import FULL, WINDOWED

OF_LAYERS = {
    **INPUTS_OF_LAYERS,
    "layer_output_scale.weight": "layer_scalar",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
"""Tensors of a layer, theirs to those of a checkpoint."""


def read_gemma4(read: Reader) -> dict[str, Any]:
    """Fields of a gemma4_text. Raises ModelError."""
    kinds, shared = _kinds(read), read.metadata.integer(read.key("attention.shared_kv_layers"), 0, minimum=0)
    return {
        **read.eps(),
        **_heads(read, kinds, shared),
        **_inner(read, len(kinds), shared),
        **_experts(read),
        "sliding_window": read.integer("attention.sliding_window"),
        "layer_types": kinds,
        "num_kv_shared_layers": shared,
        "final_logit_softcapping": read.cap("final_logit_softcapping"),
        "hidden_size_per_layer_input": read.metadata.integer(read.key("embedding_length_per_layer_input"), minimum=0),
        "vocab_size_per_layer_input": input_vocab(read),
    }


def _kinds(read: Reader) -> list[str]:
    """Kind of attention per layer. Files always have the list, of which the last layer has no window."""
    key = read.key("attention.sliding_window_pattern")
    if read.metadata.array(key) is None:
        raise read.metadata.missing(key)
    kinds = read.kinds(1)
    if kinds[-1] == WINDOWED:
        raise read.metadata.wrong(key, "a list that ends with false")
    return kinds


def _heads(read: Reader, kinds: list[str], shared: int) -> dict[str, Any]:
    """Sizes of attention and its rope; layers without a window have a table of their own."""
    full, local = (_length(read, suffix) for suffix in ("", "_swa"))
    of_layers = read.metadata.integers(read.key("attention.head_count_kv"), len(kinds))
    windowed = [count for count, kind in zip(of_layers, kinds, strict=True) if kind == WINDOWED] or of_layers
    own = {
        str(layer): {"num_key_value_heads": count, "head_dim": full if kind == FULL else local}
        for layer, (count, kind) in enumerate(zip(of_layers, kinds, strict=True))
    }
    return {
        "num_key_value_heads": windowed[0],
        "head_dim": local,
        "per_layer_config": own,
        "attention_k_eq_v": _keys_are_values(read, kinds[: len(kinds) - shared]),
        "rope_parameters": _ropes(read, full, local),
        "rope_theta": None,
        "partial_rotary_factor": None,
    }


def _length(read: Reader, suffix: str) -> int:
    """Elements of a key, which are those of a value."""
    found = read.integer(f"attention.key_length{suffix}")
    if read.integer(name := f"attention.value_length{suffix}") != found:
        raise read.metadata.wrong(read.key(name), f"{found} as the length of a key")
    return found


def _keys_are_values(read: Reader, kinds: list[str]) -> bool:
    """Whether layers without a window have no matrix of values. kinds: of layers that make keys."""
    return not any(f"blk.{i}.attn_v.weight" in read.shapes for i, kind in enumerate(kinds) if kind == FULL)


def _ropes(read: Reader, full: int, local: int) -> dict[str, Any]:
    """rope_parameters. Factors in a tensor say which pairs of a head without a window are rotated."""
    if ROPE_FACTORS not in read.shapes:
        raise ModelError(f"{read.metadata.origin} lacks the tensor {ROPE_FACTORS}; convert the model again")
    for name, length in (("rope.dimension_count", full), ("rope.dimension_count_swa", local)):
        if read.integer(name, length) != length:
            raise read.metadata.wrong(read.key(name), f"{length} as the length of a key")
    return {
        "full_attention": {"rope_type": "default", "rope_theta": read.number("rope.freq_base")},
        "sliding_attention": {"rope_type": "default", "rope_theta": read.number("rope.freq_base_swa")},
    }


def _inner(read: Reader, layers: int, shared: int) -> dict[str, Any]:
    """Width of feed-forward blocks, which may be twice as much in layers that share keys."""
    key = read.key("feed_forward_length")
    sizes = read.metadata.integers(key, layers)
    wide = len(set(sizes)) > 1
    first = sizes[0]
    if wide and sizes != [first] * (layers - shared) + [2 * first] * shared:
        raise read.metadata.wrong(key, f"{first}, or twice that in the last {shared} layers,")
    return {"intermediate_size": first, "use_double_wide_mlp": wide}


def _experts(read: Reader) -> dict[str, Any]:
    """Experts beside the plain block of each layer."""
    count = read.metadata.integer(read.key("expert_count"), 0, minimum=0)
    if not count:
        return {}
    inner = read.rows("ffn_gate_exps.weight") or read.rows("ffn_gate_up_exps.weight") // 2
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": read.integer("expert_used_count"),
        "moe_intermediate_size": read.integer("expert_feed_forward_length", inner or None),
    }
