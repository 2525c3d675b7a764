"""KV blocks of a model's layers, and how many tokens a block has unless the user says so."""

from __future__ import annotations

from llmc.buckets.ladder import DEFAULT_BLOCK_SIZE
from llmc.compiler.config import MAX_BLOCK_SIZE
from llmc.compiler.targets.base import Target
from llmc.graphs_records import KvLayerRecord
from llmc.kv_dtypes import LATENT_SCALES
from llmc.models.config import ModelConfig

_MOST_WITH_STATES = 1024


def kv_layer_records(model: ModelConfig, target: Target, block_size: int, kv_dtype: str) -> tuple[KvLayerRecord, ...]:
    """KV blocks of the layers of the KV cache. model: of one rank."""
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


def default_block_size(model: ModelConfig, target: Target, kv_dtype: str, max_model_len: int) -> int:
    """Tokens of a KV block if the user does not say.

    A block has one state of each layer with a state, however few its tokens are. So it has as many tokens as make keys
    and values of the other layers take no fewer bytes, within limits: a power of two from the usual size to 1024, so
    that the prefix cache still finds prompts, and not beyond the first one that holds max_model_len.
    """
    states = state_layers(model)
    if not states:
        return DEFAULT_BLOCK_SIZE
    whole_text = max(DEFAULT_BLOCK_SIZE, 1 << (max_model_len - 1).bit_length())
    most = min(_MOST_WITH_STATES, MAX_BLOCK_SIZE, whole_text)
    size = DEFAULT_BLOCK_SIZE
    while size < most:
        records = kv_layer_records(model, target, size, kv_dtype)
        state_bytes = sum(records[layer].block_bytes for layer in states)
        if sum(record.block_bytes for record in records) >= 2 * state_bytes:
            break
        size *= 2
    return size
