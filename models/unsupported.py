"""Describes what llmc lacks of a model of unknown family, by its config.json: the reasons of a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Table = Mapping[str, Any]
_KEYS: Mapping[str, tuple[str, ...]] = {
    "sparse attention": ("index_topk", "index_n_heads", "sparse_attention_config", "compress_ratios"),
    "blocks of different sizes": ("block_configs",),
    "images": ("vision_config", "visual", "mm_vision_tower", "vision_tower", "img_processor"),
    "sound": ("audio_config",),
    "an encoder": ("type_vocab_size",),
}
"""Keys that only a config of a model with such parts has; null, false or 0 is without."""
_LINEAR_KEYS = (
    "linear_num_key_heads", "linear_attn_config", "mamba_num_heads", "hybrid_override_pattern",
)  # fmt: skip
_LINEAR_KINDS: tuple[tuple[str, object], ...] = (("attn_type_list", 0), ("layer_types", "linear_attention"))


def _linear(table: Table) -> bool:
    listed = any(isinstance(table.get(name), list) and kind in table[name] for name, kind in _LINEAR_KINDS)
    return listed or any(table.get(name) for name in _LINEAR_KEYS)


def _short_values(table: Table) -> bool:
    sizes = table.get("head_dim"), table.get("v_head_dim")
    return all(sizes) and sizes[0] != sizes[1] and not table.get("kv_lora_rank")


def _unequal_layers(table: Table) -> bool:
    windowed = table.get("swa_num_key_value_heads")
    return bool(windowed) and windowed != table.get("num_key_value_heads")


_LINEAR, _HEADS_DIFFER = "linear attention or state space layers", "layers of different numbers of heads"
_CONDITIONS: Mapping[str, Callable[[Table], bool]] = {
    _LINEAR: _linear,
    "values shorter than keys": _short_values,
    _HEADS_DIFFER: _unequal_layers,
}
_OF_TYPES: Mapping[str, tuple[str, ...]] = {
    "step3p7": ("gates on the results of heads", _HEADS_DIFFER),
}
"""What every model of a model_type has, whatever its config.json tells."""
_NESTED = ("text_config", "llm_config", "language_config")


def unsupported_parts(config: Table) -> Iterator[str]:
    """In words; none where nothing tells of any."""
    places = [config, *(config[name] for name in _NESTED if isinstance(config.get(name), Mapping))]
    parts = [part for part, holds in _CONDITIONS.items() if any(map(holds, places))]
    parts += [part for part, names in _KEYS.items() if any(place.get(name) for place in places for name in names)]
    yield from dict.fromkeys((*_OF_TYPES.get(str(config.get("model_type")), ()), *parts))
    if config.get("auto_map"):
        yield "code of its own (auto_map)"
