"""Latent attention by kernels of the CPU against numpy in float64: sequences in a paged pool of one key a token."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels.attention_split import partial_floats
from llmc.compiler.targets.cpu.target import Target

from support.kernel_harness import run
from support.kv_pools import latent_pool, stands_for
from support.paged_attention import NUMPY, random

Array = NDArray[Any]


class LatentCache:
    """Sequences of given lengths in shuffled blocks; block 0 and unused slots are no numbers."""

    def __init__(self, lengths: list[int], heads: int, rank: int, rotated: int, block: int, kv: str) -> None:
        self.heads, self.rank, self.rotated, self.block, self.kv = heads, rank, rotated, block, kv
        needed = [-(-n // block) for n in lengths]
        self.stride = max(needed) + 1
        order = np.random.default_rng(1).permutation(np.arange(1, sum(needed) + 1))
        self.tables = np.zeros((len(lengths), self.stride), np.int32)
        stored = NUMPY.get(kv, np.dtype(np.float32))
        self.pool = np.full((sum(needed) + 1, 1, rank + rotated, block), np.nan, stored)
        self.keys, self.queries, self.queries_rotated = [], [], []
        used = 0
        for s, n in enumerate(lengths):
            self.tables[s, : needed[s]] = order[used : used + needed[s]]
            used += needed[s]
            key = random(n, rank + rotated, seed=10 + s)
            key[:, rank:] *= 3  # the parts of a key have ranges of their own
            key = key.astype(stored)
            for t in range(n):
                self.pool[self.tables[s, t // block], 0, :, t % block] = key[t]
            self.keys.append(np.concatenate([stands_for(part, kv) for part in np.split(key, [rank], 1)], 1))
            self.queries.append(random(n, heads * rank, seed=30 + s))
            self.queries_rotated.append(random(n, heads * rotated, seed=40 + s))

    def params(self) -> dict[str, Any]:
        """Of a spec, but for its segments."""
        return {
            "num_heads": self.heads,
            "num_kv_heads": 1,
            "head_dim": self.rank + self.rotated,
            "rank": self.rank,
            "key_scales": 2,
            "scale": 0.7 * (self.rank + self.rotated) ** -0.5,
            "kv_dtype": self.kv,
            "block_size": self.block,
        }

    def expected(self, s: int, t: int, params: dict[str, Any]) -> Array:
        parts = self.queries[s][t].reshape(self.heads, -1), self.queries_rotated[s][t].reshape(self.heads, -1)
        keys = self.keys[s][: t + 1]
        scores = np.concatenate(parts, -1).astype(np.float64) @ keys.T * params["scale"]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out: Array = (weights / weights.sum(-1, keepdims=True)) @ keys[:, : self.rank]
        return out.reshape(-1)

    def attend(
        self,
        target: Target,
        params: dict[str, Any],
        chunks: list[tuple[int, int, int]],
        tile: int,
        tasks: int,
        segments: int = 0,
    ) -> Array:
        """Chunks are (sequence, first token, end) and make up one step. segments: of a graph that splits contexts."""
        rows = sum(end - start for _, start, end in chunks)
        scalars = {0: rows, 1: len(chunks), 3: self.stride, 5: max(1, tasks // 2)}
        pool = self.pool if self.kv == "f32" else latent_pool(self.pool, self.rank, self.kv).view(np.int32)
        arrays = {
            "q": np.concatenate([self.queries[s][a:e] for s, a, e in chunks]),
            "q_rotated": np.concatenate([self.queries_rotated[s][a:e] for s, a, e in chunks]),
            "block_tables": np.stack([self.tables[s] for s, _, _ in chunks]),
            "token_seq": np.concatenate([np.full(e - a, i, np.int32) for i, (_, a, e) in enumerate(chunks)]),
            "positions": np.concatenate([np.arange(a, e, dtype=np.int32) for _, a, e in chunks]),
            "k_pool": pool,
            "out": np.full((rows, self.heads * self.rank), np.nan, np.float32),
        }
        spec = KernelSpec.of("attention", "latent_attention", **params, segments=segments)
        if segments:
            floats = rows * self.heads * segments * partial_floats(self.rank)
            arrays["partials"] = np.full(floats, np.nan, np.float32)
        written = ("partials", "out") if segments else ("out",)
        result = run(spec, target, arrays, written=written, scalars=scalars, num_tasks=tasks)
        if segments:
            merge = KernelSpec.of(
                "attention",
                "merge_attention",
                num_heads=self.heads,
                head_dim=self.rank,
                window=0,
                act_dtype="f32",
                block_size=self.block,
                row_tile=1,
                segments=segments,
            )
            arrays = {"positions": arrays["positions"], **result}
            result = run(merge, target, arrays, written=("out",), scalars=scalars, num_tasks=tasks)
        return result["out"]
