"""Writes the quantized checkpoint: config.json, the weights, and the other files, copied."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmc.compiler.calibration.tensor_files import byte_count, write_tensors
from llmc.manifest import MAX_COPIED_BYTES
from llmc.models.rank_prompts import MODEL_CARD
from llmc.models.sentence_model import MODULES, SENTENCE_FILES
from llmc.models.sources.base import ModelFiles
from llmc.quantize.checkpoints import StoredTensor

SHARD_BYTES = 4 << 30
TAKEN_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    MODEL_CARD,
    MODULES,
    *(name for name in SENTENCE_FILES if "*" not in name),
)


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    files: ModelFiles,
    on_shard: Callable[[int, int], None],
) -> int:
    """Writes a checkpoint; returns the bytes of all tensors. config: of the model. settings: its
    quantization_config."""
    told = {**config, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for name in TAKEN_FILES:
        if files.has(name):
            (folder / name).parent.mkdir(exist_ok=True)
            with files.open(name) as file:
                (folder / name).write_bytes(file.read(MAX_COPIED_BYTES))
    shards = _shards(tensors)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(folder / name, shard)
        places |= dict.fromkeys(shard, name)
        on_shard(number, len(shards))
    total = sum(map(byte_count, tensors.values()))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def _shards(tensors: Mapping[str, StoredTensor]) -> list[dict[str, StoredTensor]]:
    """Splits tensors, in order of name, into shards of at most SHARD_BYTES; a larger tensor gets its own."""
    shards: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for name, tensor in sorted(tensors.items()):
        count = byte_count(tensor)
        if shards[-1] and size + count > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += count
    return shards
