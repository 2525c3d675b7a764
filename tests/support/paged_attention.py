"""Paged attention by kernels of the CPU against numpy in float64: sequences in a paged pool, and what is promised."""

from __future__ import annotations

from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels.attention_split import num_segments, partial_floats
from llmc.compiler.targets.cpu.packing import pack_activation, unpack_activation
from llmc.compiler.targets.cpu.target import Target

from support.kernel_harness import Tolerance, run
from support.kv_pools import key_pool, stands_for, value_pool

Array = NDArray[Any]
NUMPY = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def same_bits(a: Array, b: Array) -> bool:
    return bool((np.ascontiguousarray(a).view(np.uint8) == np.ascontiguousarray(b).view(np.uint8)).all())


LENGTHS, LONG_LENGTHS = [530, 33, 1], [2200, 1030, 40]
"""Tokens of the sequences of a cache: of `check_companies`, and of `check_segments`."""


class Attends(Protocol):
    """A paged cache of sequences, and attention to it."""

    def expected(self, s: int, t: int, params: dict[str, Any]) -> Array: ...

    def attend(
        self,
        target: Target,
        params: dict[str, Any],
        chunks: list[tuple[int, int, int]],
        tile: int,
        tasks: int,
        segments: int = 0,
    ) -> Array: ...


class Cache:
    """Sequences of given lengths in a paged pool with shuffled blocks; block 0 and unused slots hold rubbish."""

    def __init__(self, lengths: list[int], heads: int, kv_heads: int, dim: int, block: int, kv: str) -> None:
        self.lengths, self.heads, self.kv_heads, self.dim, self.block = lengths, heads, kv_heads, dim, block
        padded = -(-dim // 16) * 16
        needed = [-(-n // block) for n in lengths]
        self.stride = max(needed) + 1
        order = np.random.default_rng(1).permutation(np.arange(1, sum(needed) + 1))
        self.tables = np.zeros((len(lengths), self.stride), np.int32)
        self.kv, kind = kv, NUMPY.get(kv, NUMPY["f32"])
        self.k_pool = (random(sum(needed) + 1, kv_heads, dim, block, seed=7) * 50).astype(kind)
        self.v_pool = np.zeros((sum(needed) + 1, kv_heads, block, padded), kind)
        self.v_pool[..., :dim] = np.nan  # a value nobody may see spoils every sum it enters
        self.keys, self.values, self.queries = [], [], []
        used = 0
        for s, n in enumerate(lengths):
            self.tables[s, : needed[s]] = order[used : used + needed[s]]
            used += needed[s]
            key = (random(n, kv_heads, dim, seed=10 + s) * 2).astype(kind)
            value = random(n, kv_heads, dim, seed=20 + s).astype(kind)
            for t in range(n):
                at = self.tables[s, t // block]
                self.k_pool[at, :, :, t % block] = key[t]
                self.v_pool[at, :, t % block, :dim] = value[t]
            self.keys.append(stands_for(key, kv))
            self.values.append(stands_for(value, kv))
            self.queries.append(random(n, heads * dim, seed=30 + s))
        self.sinks = random(heads, seed=41) * 2
        self.slopes = np.exp2(-np.arange(1, heads + 1) / 1.7).astype(np.float32)

    def expected(self, s: int, t: int, params: dict[str, Any]) -> Array:
        first, group = first_key(t, params), self.heads // self.kv_heads
        end = end_of_keys(t, self.lengths[s], params)
        q = self.queries[s][t].astype(np.float64).reshape(self.kv_heads, group, self.dim)
        scores = np.einsum("hgd,khd->hgk", q, self.keys[s][first:end]) * params["scale"]
        if cap := params.get("score_cap"):
            scores = np.tanh(scores / cap) * cap
        if bias := params.get("bias"):
            scores += self.bias(bias, np.arange(first, end), t, params["scale"])
        sinks = self.sinks.astype(np.float64).reshape(self.kv_heads, group, 1)
        most = np.maximum(scores.max(-1, keepdims=True), sinks)
        weights = np.exp(scores - most)
        weights /= weights.sum(-1, keepdims=True) + (np.exp(sinks - most) if params.get("sinks") else 0.0)
        out: Array = np.einsum("hgk,khd->hgd", weights, self.values[s][first:end])
        return out.reshape(-1)

    def bias(self, kind: str, keys: Array, position: int, scale: float) -> Array:
        """float64 [kv heads, group, keys]."""
        slopes = self.slopes.astype(np.float64).reshape(self.kv_heads, -1, 1)
        bf16 = NUMPY["bf16"]
        distance: Array = slopes * (keys - position)
        rounded: Array = (slopes.astype(bf16) * keys.astype(bf16)).astype(np.float64) * scale
        return distance if kind == "distance" else rounded

    def contexts(self, chunks: list[tuple[int, int, int]]) -> Array:
        """int32 [sequences of a step]: all tokens of each."""
        return np.array([self.lengths[s] for s, _, _ in chunks], np.int32)

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
        act, width = params["act_dtype"], self.heads * self.dim
        scalars = {0: rows, 1: len(chunks), 3: self.stride, 5: max(1, tasks // 2)}
        arrays = {
            "q": np.concatenate([self.queries[s][a:e] for s, a, e in chunks]),
            "block_tables": np.stack([self.tables[s] for s, _, _ in chunks]),
            "token_seq": np.concatenate([np.full(e - a, i, np.int32) for i, (_, a, e) in enumerate(chunks)]),
            "positions": np.concatenate([np.arange(a, e, dtype=np.int32) for _, a, e in chunks]),
            **({"context_lens": self.contexts(chunks)} if "both_ways" in params else {}),
            "k_pool": key_pool(self.k_pool, kv=self.kv),
            "v_pool": value_pool(self.v_pool, self.dim, kv=self.kv),
            **({"slopes": self.slopes} if "bias" in params else {}),
            **({"sinks": self.sinks} if "sinks" in params else {}),
            "out": pack_activation(np.full((-(-rows // tile) * tile, width), np.nan, NUMPY[act]), tile),
        }
        spec = KernelSpec.of("attention", "paged_attention", **params, row_tile=tile, segments=segments)
        if segments:
            floats = rows * self.heads * segments * partial_floats(self.dim)
            arrays["partials"] = np.full(floats, np.nan, np.float32)
        written = ("partials", "out") if segments else ("out",)
        result = run(spec, target, arrays, written=written, scalars=scalars, num_tasks=tasks)
        if segments:
            merge = KernelSpec.of(
                "attention", "merge_attention", **merge_params(params), row_tile=tile, segments=segments
            )
            read = ("positions", "token_seq", "context_lens") if "both_ways" in params else ("positions",)
            arrays = {name: arrays[name] for name in (*read, "sinks") if name in arrays} | result
            result = run(merge, target, arrays, written=("out",), scalars=scalars, num_tasks=tasks)
        return unpack_activation(result["out"], rows, width)


def first_key(t: int, params: dict[str, Any]) -> int:
    """The first key that a token at `t` sees."""
    start = t // params["chunk"] * params["chunk"] if "chunk" in params else 0
    return max(start, t - params["window"] + 1) if params["window"] else start


def end_of_keys(t: int, length: int, params: dict[str, Any]) -> int:
    """Behind the last key that a token at `t` sees, in a sequence of `length` tokens."""
    if "both_ways" not in params:
        return t + 1
    return min(length, t + params["window"]) if params["window"] else length


def attention_params(
    heads: int, kv_heads: int, dim: int, act: str, kv: str, block: int, window: int, **more: Any
) -> dict[str, Any]:
    """Of a spec, but for its row tile and its segments. more: of what only some models have."""
    return dict(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        window=window,
        act_dtype=act,
        kv_dtype=kv,
        block_size=block,
        **more,
    )


def merge_params(params: dict[str, Any]) -> dict[str, Any]:
    names = ("num_heads", "head_dim", "window", "act_dtype", "block_size", "chunk", "sinks", "both_ways")
    return {name: params[name] for name in names if name in params}


def tolerance_of(target: Target, act: str, kv: str) -> Tolerance:
    """bf16 dot products round queries and weights by up to 2^-9 each, and cancel."""
    if kv == "int8":
        # Queries are rounded by 2⁻¹⁶ of their largest element, weights by 2⁻¹⁶ of a partition's largest.
        return {"rtol": 2.0**-8, "atol": 1e-3}
    if kv == "bf16" and target.bf16_dot:
        return {"rtol": 2.0**-6, "atol": 2.0**-6}
    return {"rtol": {"f32": 2e-5, "bf16": 2.0**-8, "f16": 2.0**-11}[act], "atol": 3e-6 if act == "f32" else 1e-5}


def check_attention(
    target: Target,
    heads: int,
    kv_heads: int,
    dim: int,
    act: str,
    kv: str,
    block: int,
    window: int,
    tolerance: Tolerance,
    **more: Any,
) -> None:
    """Tokens of three sequences in several companies: the same bits, and close to float64."""
    cache = Cache(LENGTHS, heads, kv_heads, dim, block, kv)
    check_companies(cache, target, attention_params(heads, kv_heads, dim, act, kv, block, window, **more), tolerance)


def check_companies(cache: Attends, target: Target, params: dict[str, Any], tolerance: Tolerance) -> None:
    """Of a cache of sequences of LENGTHS."""
    tile = target.row_tile
    whole = cache.attend(target, params, [(0, 500, 530)], tile, 1)
    everything = cache.attend(target, params, [(1, 0, 33), (2, 0, 1), (0, 480, 530)], tile, 3)
    for tasks in (2, 3, 5):
        assert same_bits(cache.attend(target, params, [(0, 500, 530)], tile, tasks), whole)
    assert same_bits(everything[-30:], whole)
    for t in (500, 513, 529):
        assert same_bits(cache.attend(target, params, [(0, t, t + 1)], 1, 2)[0], whole[t - 500]), f"decode of {t}"
    together = cache.attend(target, params, [(0, 510, 511), (1, 32, 33), (2, 0, 1)], tile, 2)
    assert same_bits(together, np.stack([whole[10], everything[32], everything[33]]))
    assert same_bits(cache.attend(target, params, [(0, 503, 516), (1, 5, 9)], tile, 2)[:13], whole[3:16])

    want = [cache.expected(0, t, params) for t in range(500, 530)]
    np.testing.assert_allclose(whole.astype(np.float64), np.stack(want), **tolerance)
    want = [cache.expected(1, t, params) for t in range(33)]
    np.testing.assert_allclose(everything[:33].astype(np.float64), np.stack(want), **tolerance)


def check_split_context(
    target: Target, heads: int, kv_heads: int, dim: int, act: str, kv: str, block: int, window: int, **more: Any
) -> None:
    """Segments on several threads, merged by a second command, against one thread that walks them all."""
    cache = Cache(LONG_LENGTHS, heads, kv_heads, dim, block, kv)
    params = attention_params(heads, kv_heads, dim, act, kv, block, window, **more)
    check_segments(cache, target, params, tolerance_of(target, act, kv))


def check_segments(cache: Attends, target: Target, params: dict[str, Any], tolerance: Tolerance) -> None:
    """Of a cache of sequences of LONG_LENGTHS."""
    segments = num_segments(2200, params["block_size"])
    assert segments >= 2
    tile = target.row_tile
    # Tokens on both sides of the ends of segments.
    chunks = [(0, 2040, 2055), (1, 1020, 1030), (2, 39, 40), (2, 0, 3)]
    whole = cache.attend(target, params, chunks, tile, 1)
    for tasks in (1, 2, 3, 8, 61):
        assert same_bits(cache.attend(target, params, chunks, tile, tasks, segments), whole)
    assert same_bits(cache.attend(target, params, chunks, tile, 3, segments + 3), whole)
    tokens = [(s, t) for s, a, e in chunks for t in range(a, e)]
    alone = [(s, t, t + 1) for s, t in tokens[::3]]
    assert same_bits(cache.attend(target, params, alone, tile, 2, segments), whole[::3])
    assert same_bits(cache.attend(target, params, alone[1:2], 1, 5, segments)[0], whole[3])
    want = np.stack([cache.expected(s, t, params) for s, t in tokens])
    np.testing.assert_allclose(whole.astype(np.float64), want, **tolerance)


def check_bad_token(
    target: Target, heads: int, kv_heads: int, dim: int, kv: str, window: int, bad: float, **more: Any
) -> None:
    """A token whose key and value are not finite spoils those that see it and leaves the bits of all others."""
    cache = Cache([530, 33], heads, kv_heads, dim, 16, kv)
    params = attention_params(heads, kv_heads, dim, "f32", kv, 16, window, **more)
    chunks, tile = [(0, 488, 530), (1, 20, 33)], target.row_tile
    clean = cache.attend(target, params, chunks, tile, 2)
    for position in (501, 502):
        at, within = cache.tables[0, position // 16], position % 16
        saved = cache.k_pool[at].copy(), cache.v_pool[at].copy()
        cache.k_pool[at, :, :, within] = cache.v_pool[at, :, within, :dim] = bad
        got = cache.attend(target, params, chunks, tile, 2)
        cache.k_pool[at], cache.v_pool[at] = saved
        sees = np.array([first_key(t, params) <= position <= t for t in range(488, 530)] + [False] * 13)
        assert same_bits(got[~sees], clean[~sees])
        assert not np.isfinite(got[sees]).any()
