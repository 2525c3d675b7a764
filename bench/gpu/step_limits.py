"""What a GPU can do at most, measured through torch: copies, products of bf16 matrices, and copies of the host's pinned
memory. And what a step needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from bench.shapes import named

_COPIED_BYTES, _MATRIX = 1 << 30, 8192


@dataclass(frozen=True)
class Limits:
    """bytes_s: read and written by a copy. flops: of a product of bf16 matrices, two operations per multiply-add.
    upload_bytes_s: copied from pinned memory of the host to the device."""

    bytes_s: float
    flops: float
    upload_bytes_s: float


def measured_limits(device: str, seconds_of: Callable[[Callable[[], object]], float]) -> Limits:
    """seconds_of: seconds of the fastest of some calls."""
    on_gpu = torch.device(device).type == "cuda"
    small = 1 if on_gpu else 1 << 6  # a CPU stands in for a GPU in tests
    source = torch.ones(_COPIED_BYTES // small, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    side = _MATRIX // small
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))

    def seconds(work: Callable[[], object]) -> float:
        def until_done() -> None:
            work()
            if on_gpu:
                torch.cuda.synchronize()

        return seconds_of(until_done)

    copied, multiplied = seconds(lambda: target.copy_(source)), seconds(lambda: a @ b)
    pinned = torch.ones(source.numel(), dtype=torch.uint8, pin_memory=on_gpu)
    uploaded = seconds(lambda: target.copy_(pinned, non_blocking=True))
    return Limits(2 * source.numel() / copied, 2 * side**3 / multiplied, source.numel() / uploaded)


@dataclass(frozen=True)
class Model:
    """What a step of a model needs. Sizes in bytes.

    weights: that every step reads: all but an embedding of their own. of_token: of the KV cache, all layers.
    products: multiply-adds of a token's linear layers; head: of a row of logits; pairs: of a query and a key.
    """

    weights: int
    of_token: int
    products: int
    head: int
    pairs: int

    @classmethod
    def of(cls, shape: Mapping[str, Any], weight_bytes: int, kv_token_bytes: int) -> Model:
        """weight_bytes: of all weights as the artifact has them. Embeddings count as bf16."""
        shapes = {name: size for name, size in named(dict(shape)) if len(size) > 1}
        sizes = {name: prod(size) for name, size in shapes.items()}
        table = sizes["model.embed_tokens.weight"]
        head = sizes.get("lm_head.weight", table)
        # A step reads some rows of each.
        tables = sizes.get("model.embed_tokens_per_layer.weight", 0) + (0 if shape["tie_word_embeddings"] else table)
        attended = sum(
            size[1] for name, size in shapes.items() if name.endswith(("o_proj.weight", "attn.dense.weight"))
        )
        return cls(
            weight_bytes - 2 * tables,
            kv_token_bytes,
            sum(size for name, size in sizes.items() if name.startswith("model.layers.")),
            head,
            2 * attended,
        )

    def least_s(self, limits: Limits, parts: Sequence[tuple[int, int]]) -> float:
        """Seconds of a step at the limits. parts: of each sequence, (new tokens, position of the first)."""
        read = self.weights + self.of_token * sum(first + count for count, first in parts)
        pairs = sum(count * first + count * (count + 1) // 2 for count, first in parts)
        tokens = sum(count for count, _ in parts)
        operations = 2 * (tokens * self.products + len(parts) * self.head + pairs * self.pairs)
        return max(read / limits.bytes_s, operations / limits.flops)
