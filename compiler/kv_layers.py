"""KV blocks of a model's layers, and slots of states."""

from __future__ import annotations

from llmc.compiler.targets.base import Target
from llmc.graphs_records import KvLayerRecord
from llmc.kv_dtypes import LATENT_SCALES
from llmc.models.config import ModelConfig


def kv_layer_records(model: ModelConfig, target: Target, block_size: int, kv_dtype: str) -> tuple[KvLayerRecord, ...]:
    """KV blocks of the layers of the KV cache, or slots of those with a state. model: of one rank."""
    key_scales = 1 if model.latent is None else LATENT_SCALES
    found = []
    for kv_layer in range(model.num_kv_layers):
        if (net := model.cached_state(kv_layer)) is not None:
            found.append(KvLayerRecord(*net.pool_bytes))
            continue
        keys, values = target.kv_block_bytes(*model.kv_heads(kv_layer), block_size, kv_dtype, key_scales)
        # The values of latent vectors are part of the keys.
        found.append(KvLayerRecord(keys, values if model.latent is None else 0))
    return tuple(found)


def state_layers(model: ModelConfig) -> tuple[int, ...]:
    """Layers of the KV cache that hold a state in place of keys and values."""
    return tuple(layer for layer in range(model.num_kv_layers) if model.cached_state(layer) is not None)
