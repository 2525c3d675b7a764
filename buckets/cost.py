"""The cost of a step in a bucket, by which planned ladders are compared.

It has three parts: `cost`, which depends on the bucket alone; `load`, on the step's sequences and the bucket's batch;
`step`, on the step alone. If padding is computed, only `cost` is non-zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .bucket import Bucket, BucketError
from .cost_table import read_json

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Lengths = Ints | Floats
"""Context lengths in tokens; shares of a total need not be integers."""


class CostModel(Protocol):
    """Costs of steps. All arguments are arrays that broadcast; results have the broadcast shape and are at least 0."""

    @property
    def unit(self) -> str:
        """The unit of the costs, for tables."""
        ...

    def cost(self, phase: str, batch: Ints, seq: Lengths) -> Floats:
        """The part that depends only on the buckets (batch, seq)."""
        ...

    def load(self, phase: str, batch: Ints, sequences: Ints) -> Floats:
        """The part for `sequences` sequences in buckets of `batch`."""
        ...

    def step(self, phase: str, sequences: Ints, length: Lengths) -> Floats:
        """The part for `sequences` sequences of length `length`, equal in every bucket."""
        ...


class BucketCost:
    """Base of models in which a step costs what its bucket costs."""

    def load(self, phase: str, batch: Ints, sequences: Ints) -> Floats:
        return np.zeros(np.broadcast_shapes(batch.shape, sequences.shape))

    def step(self, phase: str, sequences: Ints, length: Lengths) -> Floats:
        return np.zeros(np.broadcast_shapes(sequences.shape, length.shape))


@dataclass(frozen=True, slots=True)
class TotalCost:
    """Costs of decode buckets and steps whose lengths are totals of contexts.

    Taken from another model for equally long contexts, because the same number of keys is read.
    """

    model: CostModel

    @property
    def unit(self) -> str:
        return self.model.unit

    def cost(self, phase: str, batch: Ints, seq: Lengths) -> Floats:
        return self.model.cost(phase, batch, _shared(seq, batch))

    def load(self, phase: str, batch: Ints, sequences: Ints) -> Floats:
        return self.model.load(phase, batch, sequences)

    def step(self, phase: str, sequences: Ints, length: Lengths) -> Floats:
        return self.model.step(phase, sequences, _shared(length, sequences))


def _shared(total: Lengths, sequences: Ints) -> Floats:
    """Each sequence's share of a total."""
    return np.asarray(total / sequences, np.float64)


class TokensCost(BucketCost):
    """batch × seq: prompt tokens computed or context tokens read, padding included."""

    unit = "tokens"

    def cost(self, phase: str, batch: Ints, seq: Lengths) -> Floats:
        return np.asarray(batch * seq.astype(np.float64), np.float64)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K, _SHARED = ("num_experts_per_tok", "moe_k"), ("n_shared_experts", "moe_num_shared_experts")


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Dimensions of latent attention, in elements.

    query_rank: vector that queries are projected from; 0: the token itself. rank: latent vector. plain, rotated: parts
    of a query without and with rotary positions. value: a head's result.
    """

    query_rank: int
    rank: int
    plain: int
    rotated: int
    value: int

    def weights(self, hidden: int, heads: int) -> int:
        """Elements of the attention matrices of a layer."""
        queries = heads * (self.plain + self.rotated)
        to_queries = self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        of_heads = heads * (self.plain + self.value) * self.rank
        return to_queries + hidden * (self.rank + self.rotated) + of_heads + heads * self.value * hidden


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a decoder that determine its arithmetic and memory traffic. weight_bytes, kv_bytes: per
    element.

    With experts, intermediate is the total width that one token uses. experts: per layer. top_k: per token.
    expert_intermediate: width of one expert. Every layer counts as having experts. With latent attention, kv_heads and
    head_dim are unused.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    latent: LatentShape | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "config.json") -> ModelShape:
        """Reads the usual names of a Hugging Face config. Raises BucketError for a missing or implausible value."""

        def number(key: str, default: int | None = None) -> int:
            value = config.get(key)
            value = default if value is None else value
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 32:
                raise BucketError(f"{name} has {key} {value!r}: a whole number is needed to estimate costs")
            return value

        def first(keys: tuple[str, ...], default: int | None = None) -> int:
            return number(next((key for key in keys if config.get(key) is not None), keys[0]), default)

        heads, hidden = number("num_attention_heads"), number("hidden_size")
        mixture: dict[str, int] = {}
        if any(config.get(key) is not None for key in _EXPERTS):
            inner, top_k = first(("moe_intermediate_size", "intermediate_size")), first(_TOP_K)
            shared = [key for key in _SHARED if config.get(key)]
            always = number("shared_expert_intermediate_size") if config.get("shared_expert_intermediate_size") else 0
            always += number(shared[0]) * inner if shared else 0
            mixture = {"experts": first(_EXPERTS), "top_k": top_k, "expert_intermediate": inner}
        latent = None
        if config.get("kv_lora_rank"):
            names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            latent = LatentShape(number("q_lora_rank") if config.get("q_lora_rank") else 0, *map(number, names))
        wide = config.get("torch_dtype", config.get("dtype")) == "float32"
        return cls(
            hidden=hidden,
            intermediate=top_k * inner + always if mixture else number("intermediate_size"),
            layers=number("num_hidden_layers"),
            heads=heads,
            kv_heads=number("num_key_value_heads", heads),
            head_dim=number("head_dim", max(1, hidden // heads)),
            vocab=number("vocab_size"),
            weight_bytes=4.0 if wide else 2.0,
            kv_bytes=4.0 if wide else 2.0,
            **mixture,
            latent=latent,
        )

    @property
    def layer_weights(self) -> int:
        """Matrix elements of all layers that one token uses, without embedding and output matrix."""
        if self.latent is not None:
            attention = self.latent.weights(self.hidden, self.heads)
        else:
            attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    def layer_weights_read(self, rows: Floats) -> Floats:
        """Expected matrix elements of all layers read for `rows` rows that choose experts at random."""
        others = np.zeros_like(rows)
        if self.experts:
            others = self.experts * (1 - (1 - self.top_k / self.experts) ** np.maximum(rows, 1)) - self.top_k
        return self.layer_weights + self.layers * 3 * self.hidden * self.expert_intermediate * others

    @property
    def head_weights(self) -> int:
        """Elements of the output matrix."""
        return self.hidden * self.vocab

    @property
    def ops_per_pair(self) -> int:
        """Operations per (query, visible key) pair in all layers; a multiply-add counts as two."""
        if self.latent is not None:
            return 2 * self.layers * self.heads * (2 * self.latent.rank + self.latent.rotated)
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def kv_elements(self) -> int:
        """Elements of one token's keys and values in all layers."""
        if self.latent is not None:
            return self.layers * (self.latent.rank + self.latent.rotated)
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def arena_bytes_per_token(self) -> float:
        """Estimated scratch bytes per token row: residual rows, query, key and value, inputs of linear layers.

        Storage is reused within a dtype: f32 models share all rows, bf16 models hold inputs of linear layers
        separately. Int8 activations take about two thirds more than bf16.
        """
        residual, qkv = (2 + self.top_k) * self.hidden, self.head_dim * (self.heads + 2 * self.kv_heads)
        if self.latent is not None:
            # Queries before and after projection to the latent space, and attention's result.
            qkv = self.heads * (self.latent.plain + 2 * self.latent.rotated + 2 * self.latent.rank)
        if self.weight_bytes >= 4:
            return 4.0 * (residual + max(qkv, self.intermediate))
        return 4.0 * (residual + qkv) + 2.0 * (self.hidden + self.intermediate)


@dataclass(frozen=True, slots=True)
class FlopsCost(BucketCost):
    """A roofline: overhead_s + the larger of arithmetic / flops_per_s and traffic / bytes_per_s. Seconds.

    Arithmetic: two operations per weight and row, causal attention in prefill, the output matrix for one row per
    sequence. Traffic: every weight once; in decode also the context's keys and values.
    """

    shape: ModelShape
    flops_per_s: float = 1e12
    bytes_per_s: float = 5e10
    overhead_s: float = 50e-6
    unit: str = "s"

    def cost(self, phase: str, batch: Ints, seq: Lengths) -> Floats:
        m = self.shape
        sequences, length = batch.astype(np.float64), seq.astype(np.float64)
        rows = sequences * length if phase == "prefill" else sequences + 0 * length
        # Query · key and weight · value; a prompt token sees half the prompt on average.
        pairs = sequences * length * (length / 2 if phase == "prefill" else 1)
        flops = 2 * m.layer_weights * rows + m.ops_per_pair * pairs + 2 * m.head_weights * sequences
        traffic = (m.layer_weights_read(rows) + m.head_weights) * m.weight_bytes
        if phase == "decode":
            traffic = traffic + m.kv_elements * m.kv_bytes * sequences * length
        return self.overhead_s + np.maximum(flops / self.flops_per_s, traffic / self.bytes_per_s)


class MeasuredCost(BucketCost):
    """A table {bucket: seconds}, interpolated: along seq for each measured batch, then along batch.

    Beyond the last measured size the last slope continues (for a single size: proportionally). Below the first size its
    time holds, so no cost is extrapolated to zero.
    """

    unit = "s"

    def __init__(self, table: Mapping[Bucket, float]) -> None:
        """Raises BucketError for a time that is not positive and finite."""
        self._rows: dict[str, list[tuple[int, Floats, Floats]]] = {}
        for bucket, seconds in table.items():
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
                raise BucketError(f"cost of {bucket} is {seconds!r}: a table needs seconds, more than 0")
        for phase in {bucket.phase for bucket in table}:
            # For a total, each context's share serves as the length.
            sizes = {(b.batch, b.each): b for b in sorted(table, reverse=True) if b.phase == phase}
            by_batch: dict[int, list[Bucket]] = {}
            for (batch, _), bucket in sorted(sizes.items()):
                by_batch.setdefault(batch, []).append(bucket)
            self._rows[phase] = [
                (
                    batch,
                    np.array([bucket.each for bucket in ordered], np.float64),
                    np.array([table[bucket] for bucket in ordered]),
                )
                for batch, ordered in by_batch.items()
            ]

    @classmethod
    def read(cls, path: Path) -> MeasuredCost:
        """Reads a cost table in short form, {"prefill:1x128": 0.0031, …}. Raises BucketError naming the fault."""
        data = read_json(path)
        if not isinstance(data, dict) or not data:
            raise BucketError(f'cost table {path} must map buckets to seconds, as in {{"prefill:1x128": 0.0031}}')
        return cls({Bucket.parse(name): seconds for name, seconds in data.items()})

    def cost(self, phase: str, batch: Ints, seq: Lengths) -> Floats:
        rows = self._rows.get(phase)
        if rows is None:
            raise BucketError(f"the cost table has no {phase} bucket: measure at least one")
        batch, seq = np.broadcast_arrays(batch, seq)
        lengths = seq.astype(np.float64)
        at_batch = np.stack([_interpolate(lengths, sizes, seconds) for _, sizes, seconds in rows])
        known = np.array([row[0] for row in rows], np.float64)
        if len(rows) == 1:
            return np.asarray(at_batch[0] * np.maximum(1.0, batch / known[0]), np.float64)
        right = np.clip(np.searchsorted(known, batch), 1, len(known) - 1)
        share = (batch - known[right - 1]) / (known[right] - known[right - 1])
        below = np.take_along_axis(at_batch, (right - 1)[None], 0)[0]
        above = np.take_along_axis(at_batch, right[None], 0)[0]
        # Beyond the largest measured batch a falling slope would reach zero.
        inside = below + np.clip(share, 0, 1) * (above - below)
        return np.asarray(inside + np.maximum(share - 1, 0) * np.maximum(above - below, 0), np.float64)


def _interpolate(lengths: Floats, sizes: Floats, seconds: Floats) -> Floats:
    if len(sizes) == 1:
        return np.asarray(seconds[0] * np.maximum(1.0, lengths / sizes[0]), np.float64)
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
    return np.asarray(np.interp(lengths, sizes, seconds) + slope * np.maximum(0, lengths - sizes[-1]), np.float64)
