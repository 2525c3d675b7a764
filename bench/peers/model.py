"""What a decoder of Llama's or Qwen2's form computes and moves, from its config.json alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. Operations count a multiply-add as two."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def read(cls, directory: Path) -> Shape:
        """From `directory`/config.json."""
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
        )

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of all layers."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Elements of lm_head."""
        return self.hidden * self.vocab

    def prefill_ops(self, tokens: int) -> int:
        """Of a prompt of `tokens`, causal attention included, logits of its last token only."""
        pairs = tokens * (tokens + 1) // 2
        return 2 * self.layer_weights * tokens + 2 * self.head_weights + self._attention_ops(pairs)

    def decode_ops(self, batch: int, context: int) -> int:
        """Of one step of `batch` sequences that see `context` tokens each."""
        return 2 * (self.layer_weights + self.head_weights) * batch + self._attention_ops(batch * context)

    def kv_bytes(self, positions: int, element_bytes: int = 2) -> int:
        """Keys and values of `positions` tokens."""
        return 2 * self.layers * self.kv_heads * self.head_dim * positions * element_bytes

    def _attention_ops(self, pairs: int) -> int:
        """`pairs`: of a query and a key it sees."""
        return 4 * self.layers * self.heads * self.head_dim * pairs


@dataclass(frozen=True)
class Work:
    """Of one measured step: operations, and bytes that must come from memory."""

    ops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.ops / self.bytes


def work_of(shape: Shape, kind: str, size: int, context: int, weight_bytes: int) -> Work:
    """kind "prefill": a prompt of `size` tokens; "decode": a step of `size` sequences with `context` tokens each.

    Weights are read once a step; embeddings tied to lm_head are read whole for the logits, so `weight_bytes` is what
    the engine's file of weights holds.
    """
    if kind == "prefill":
        return Work(shape.prefill_ops(size), weight_bytes + shape.kv_bytes(size))
    return Work(shape.decode_ops(size, context), weight_bytes + shape.kv_bytes(size * context))
