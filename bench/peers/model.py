"""Operations and bytes moved of a decoder like Llama or Qwen2, from its config.json alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmc.buckets.cost import ModelShape


def read_shape(directory: Path) -> ModelShape:
    """The shape in `directory`/config.json."""
    path = directory / "config.json"
    return ModelShape.from_config(json.loads(path.read_text()), str(path))


def prefill_ops(shape: ModelShape, tokens: int) -> int:
    """Operations of a prompt: causal attention included, logits of the last token only; a multiply-add is two."""
    pairs = tokens * (tokens + 1) // 2
    return 2 * shape.layer_weights * tokens + 2 * shape.head_weights + shape.ops_per_pair * pairs


def decode_ops(shape: ModelShape, batch: int, context: int) -> int:
    """Operations of one step of `batch` sequences that see `context` tokens each."""
    return 2 * (shape.layer_weights + shape.head_weights) * batch + shape.ops_per_pair * batch * context


def kv_bytes(shape: ModelShape, positions: int, element_bytes: int = 2) -> int:
    """Bytes of the keys and values of `positions` tokens."""
    return shape.kv_elements * positions * element_bytes


@dataclass(frozen=True)
class Work:
    """Work of one measured step: operations, and bytes that must come from memory."""

    ops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.ops / self.bytes


def work_of(shape: ModelShape, kind: str, size: int, context: int, weight_bytes: int) -> Work:
    """Work of a step. kind "prefill": a prompt of `size` tokens; "decode": `size` sequences with `context` tokens each.

    weight_bytes: size of the engine's file of weights. Weights are read once per step, of experts only those in use.
    Embeddings tied to lm_head are read whole for the logits.
    """
    weight_bytes = round(weight_bytes * read_share(shape, size))
    if kind == "prefill":
        return Work(prefill_ops(shape, size), weight_bytes + kv_bytes(shape, size))
    return Work(decode_ops(shape, size, context), weight_bytes + kv_bytes(shape, size * context))


def read_share(shape: ModelShape, rows: int) -> float:
    """Share of all weights that a step of `rows` rows reads; 1 without experts."""
    read, whole = shape.layer_weights_read(np.array([rows, np.inf])).tolist()
    return float((read + shape.head_weights) / (whole + shape.head_weights))
