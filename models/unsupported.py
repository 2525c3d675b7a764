"""What a model of no known family is built of, by the keys of its config.json: for the sentence that refuses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LINEAR = "linear attention or state space layers"
_PARTS: Mapping[str, tuple[str, ...]] = {
    "a mixture of experts": (
        "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "moe_intermediate_size",
        "ffn_config",
    ),
    "latent attention": ("kv_lora_rank",),
    "sparse attention": ("index_topk", "index_n_heads", "sparse_attention_config", "compress_ratios"),
    _LINEAR: (
        "linear_num_key_heads", "linear_attn_config", "attn_type_list", "mamba_num_heads", "hybrid_override_pattern",
        "conv_L_cache",
    ),
    "blocks of different sizes": ("block_configs",),
    "attention sinks": ("attention_sink_bias", "add_swa_attention_sink_bias", "swiglu_limit"),
    "inputs per layer": ("hidden_size_per_layer_input",),
    "bounded scores": ("attn_logit_softcapping",),
    "images": ("vision_config", "visual", "mm_vision_tower", "vision_tower", "img_processor"),
    "sound": ("audio_config",),
    "an encoder": ("type_vocab_size",),
}  # fmt: skip
"""Keys that only a config of a model with such parts has; null or 0 is without."""
_NESTED = ("text_config", "llm_config", "language_config")


def _linear_layers(kinds: object) -> bool:
    return isinstance(kinds, list) and "linear_attention" in kinds


def unsupported_parts(config: Mapping[str, Any]) -> Iterator[str]:
    """In words; none where the keys tell nothing."""
    places = [config, *(config[name] for name in _NESTED if isinstance(config.get(name), Mapping))]
    for part, names in _PARTS.items():
        named = any(place.get(name) for place in places for name in names)
        if named or (part == _LINEAR and any(_linear_layers(place.get("layer_types")) for place in places)):
            yield part
    if config.get("auto_map"):
        yield "code of its own (auto_map)"
