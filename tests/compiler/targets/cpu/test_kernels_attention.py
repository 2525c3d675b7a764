"""Rope, KV write and paged attention against numpy in float64, and the bits of a token in every company."""

from __future__ import annotations

import ctypes
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.attention_split import num_segments, partial_floats
from llmc.compiler.targets.cpu.kernels.codegen import compile_object, llvm_text
from llmc.compiler.targets.cpu.kernels.ir import bf16, vector
from llmc.compiler.targets.cpu.kernels.registry import build_kernel
from llmc.compiler.targets.cpu.packing import pack_activation, unpack_activation
from llmc.compiler.targets.cpu.target import TARGETS, Target, native_target
from llmc.compiler.targets.elf.link import link_shared

from support.kernel_harness import Guarded, Tolerance, run, targets_here
from support.kv_pools import key_pool, pair_rows, stands_for, unpair_rows, value_pool

pytestmark = pytest.mark.native

Array = NDArray[Any]
NATIVE = native_target()
CPUS = targets_here("cooperlake", "x86-64-v4", "x86-64-v3")
NUMPY = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
on_cpus = pytest.mark.parametrize("target", CPUS, ids=lambda t: t.name)


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def same_bits(a: Array, b: Array) -> bool:
    return bool((np.ascontiguousarray(a).view(np.uint8) == np.ascontiguousarray(b).view(np.uint8)).all())


def rms(x: Array, weight: Array, eps: float) -> Array:
    out: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return out


def rotate(x: Array, cos: Array, sin: Array, rotary: int) -> Array:
    half = rotary // 2
    low, high, rest = x[..., :half], x[..., half:rotary], x[..., rotary:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], -1)


@on_cpus
@pytest.mark.parametrize("kv", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "norm"),
    [(7, 1, 20, 20, True), (6, 2, 80, 20, False), (2, 2, 64, 64, True), (1, 1, 12, 6, False)],
)
def test_rope_kv_write(target: Target, kv: str, heads: int, kv_heads: int, dim: int, rotary: int, norm: bool) -> None:
    rows, seen, block, blocks, longest, eps = 9, 7, 16, 5, 40, 1e-6
    padded = -(-dim // 16) * 16
    qkv = random(rows, (heads + 2 * kv_heads) * dim)
    angles = np.outer(np.arange(longest), 10000.0 ** (-np.arange(rotary // 2) * 2 / rotary))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    rng = np.random.default_rng(5)
    positions = rng.integers(0, longest, rows).astype(np.int32)
    slots = rng.permutation(np.arange(block, blocks * block))[:rows].astype(np.int32)
    norms = {"q_norm": random(dim, seed=1), "k_norm": random(dim, seed=2)} if norm else {}
    spec = KernelSpec.of(
        "rope",
        "rope_kv_write",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rotary_dim=rotary,
        qk_norm=norm,
        norm_eps=eps,
        kv_dtype=kv,
        block_size=block,
        interleaved=False,
    )
    arrays = {
        "qkv": qkv,
        **norms,
        "cos_sin": cos_sin,
        "positions": positions,
        "slot_mapping": slots,
        "k_pool": pair_rows(np.zeros((blocks, kv_heads, dim, block), NUMPY[kv])),
        "v_pool": pair_rows(np.zeros((blocks, kv_heads, block, padded), NUMPY[kv])),
        "q_out": np.full((rows, heads * dim), np.nan, np.float32),
    }
    results = [
        run(spec, target, arrays, written=("k_pool", "v_pool", "q_out"), scalars={0: seen}, num_tasks=tasks)
        for tasks in (1, 2, 3, 5)
    ]
    for other in results[1:]:
        assert all(same_bits(other[name], results[0][name]) for name in other)

    wide = qkv.astype(np.float64).reshape(rows, heads + 2 * kv_heads, dim)
    q, key, value = wide[:, :heads], wide[:, heads : heads + kv_heads], wide[:, heads + kv_heads :]
    if norm:
        q, key = rms(q, norms["q_norm"], eps), rms(key, norms["k_norm"], eps)
    cos, sin = np.split(cos_sin[positions].astype(np.float64)[:, None], 2, axis=-1)
    q, key = rotate(q, cos, sin, rotary), rotate(key, cos, sin, rotary)
    got = results[0]
    np.testing.assert_allclose(got["q_out"][:seen].reshape(seen, heads, dim), q[:seen], rtol=1e-5, atol=2e-6)
    assert np.isnan(got["q_out"][seen:]).all()
    want_k, want_v = np.zeros((blocks, kv_heads, dim, block)), np.zeros((blocks, kv_heads, block, padded))
    for t in range(seen):
        want_k[slots[t] // block, :, :, slots[t] % block] = key[t]
        want_v[slots[t] // block, :, slots[t] % block, :dim] = value[t]
    tolerance: Tolerance = {"rtol": 1e-5, "atol": 2e-6} if kv == "f32" else {"rtol": 2.0**-8, "atol": 2e-6}
    np.testing.assert_allclose(unpair_rows(got["k_pool"]).astype(np.float64), want_k, **tolerance)
    assert same_bits(unpair_rows(got["v_pool"]), want_v.astype(np.float32).astype(NUMPY[kv]))


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

    def expected(self, s: int, t: int, scale: float, window: int) -> Array:
        first = max(0, t - window + 1) if window else 0
        group = self.heads // self.kv_heads
        q = self.queries[s][t].astype(np.float64).reshape(self.kv_heads, group, self.dim)
        scores = np.einsum("hgd,khd->hgk", q, self.keys[s][first : t + 1]) * scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out: Array = np.einsum("hgk,khd->hgd", weights, self.values[s][first : t + 1])
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
        act, width = params["act_dtype"], self.heads * self.dim
        scalars = {0: rows, 1: len(chunks), 3: self.stride, 5: max(1, tasks // 2)}
        arrays = {
            "q": np.concatenate([self.queries[s][a:e] for s, a, e in chunks]),
            "block_tables": np.stack([self.tables[s] for s, _, _ in chunks]),
            "token_seq": np.concatenate([np.full(e - a, i, np.int32) for i, (_, a, e) in enumerate(chunks)]),
            "positions": np.concatenate([np.arange(a, e, dtype=np.int32) for _, a, e in chunks]),
            "k_pool": key_pool(self.k_pool, kv=self.kv),
            "v_pool": value_pool(self.v_pool, self.dim, kv=self.kv),
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
            arrays = {"positions": arrays["positions"], **result}
            result = run(merge, target, arrays, written=("out",), scalars=scalars, num_tasks=tasks)
        return unpack_activation(result["out"], rows, width)


def attention_params(heads: int, kv_heads: int, dim: int, act: str, kv: str, block: int, window: int) -> dict[str, Any]:
    """Of a spec, but for its row tile and its segments."""
    return dict(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        window=window,
        act_dtype=act,
        kv_dtype=kv,
        block_size=block,
    )


def merge_params(params: dict[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in ("num_heads", "head_dim", "window", "act_dtype", "block_size")}


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
) -> None:
    """Tokens of three sequences in several companies: the same bits, and close to float64."""
    lengths = [530, 33, 1]
    cache = Cache(lengths, heads, kv_heads, dim, block, kv)
    params = attention_params(heads, kv_heads, dim, act, kv, block, window)
    scale = params["scale"]
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

    want = [cache.expected(0, t, scale, window) for t in range(500, 530)]
    np.testing.assert_allclose(whole.astype(np.float64), np.stack(want), **tolerance)
    want = [cache.expected(1, t, scale, window) for t in range(33)]
    np.testing.assert_allclose(everything[:33].astype(np.float64), np.stack(want), **tolerance)


@on_cpus
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "act", "kv", "block", "window"),
    [
        (7, 1, 20, "f32", "f32", 16, 0),
        (3, 1, 8, "bf16", "bf16", 32, 0),
        (2, 2, 80, "f32", "bf16", 64, 0),
        (6, 2, 24, "bf16", "f32", 32, 40),
        (2, 1, 64, "bf16", "bf16", 16, 300),
        (14, 2, 64, "bf16", "bf16", 32, 0),
        (16, 1, 16, "f32", "bf16", 32, 0),
        (4, 1, 128, "f32", "f32", 32, 17),
        (6, 2, 24, "bf16", "f16", 16, 40),
        (14, 2, 64, "f32", "f16", 32, 0),
        (7, 1, 20, "f32", "int8", 16, 0),
        (14, 2, 64, "bf16", "int8", 32, 0),
        (6, 2, 24, "f32", "int8", 48, 40),
        (4, 4, 128, "f32", "int8", 32, 300),
        (7, 1, 20, "bf16", "fp8_e4m3", 16, 0),
        (4, 2, 64, "f32", "fp8_e4m3", 32, 40),
        (6, 2, 24, "f32", "fp8_e5m2", 32, 0),
        (14, 2, 64, "f16", "f16", 32, 0),
        (2, 1, 64, "f16", "bf16", 16, 300),
    ],
)
def test_paged_attention(
    target: Target, heads: int, kv_heads: int, dim: int, act: str, kv: str, block: int, window: int
) -> None:
    tolerance = tolerance_of(target, act, kv)
    check_attention(target, heads, kv_heads, dim, act, kv, block, window, tolerance)


@on_cpus
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "act", "kv", "block", "window"),
    [
        (7, 1, 20, "f32", "bf16", 32, 0),
        (4, 2, 16, "bf16", "f32", 16, 0),
        (2, 2, 32, "f32", "f32", 32, 1100),
        (13, 1, 8, "f32", "bf16", 48, 0),
        (4, 1, 16, "f32", "f16", 16, 1100),
        (7, 1, 20, "f32", "int8", 32, 0),
        (4, 2, 16, "bf16", "int8", 16, 1100),
        (4, 2, 16, "f32", "fp8_e4m3", 16, 0),
        (2, 2, 32, "f32", "fp8_e5m2", 48, 1100),
        (4, 2, 16, "f16", "f16", 16, 0),
    ],
)
def test_split_context(
    target: Target, heads: int, kv_heads: int, dim: int, act: str, kv: str, block: int, window: int
) -> None:
    """Segments on several threads, merged by a second command, against one thread that walks them all."""
    cache = Cache([2200, 1030, 40], heads, kv_heads, dim, block, kv)
    params = attention_params(heads, kv_heads, dim, act, kv, block, window)
    segments = num_segments(2200, block)
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
    want = np.stack([cache.expected(s, t, dim**-0.5, window) for s, t in tokens])
    tolerance = tolerance_of(target, act, kv)
    np.testing.assert_allclose(whole.astype(np.float64), want, **tolerance)


def check_bad_token(target: Target, heads: int, kv_heads: int, dim: int, kv: str, window: int, bad: float) -> None:
    """A token whose key and value are not finite spoils those that see it and leaves the bits of all others."""
    cache = Cache([530, 33], heads, kv_heads, dim, 16, kv)
    params = attention_params(heads, kv_heads, dim, "f32", kv, 16, window)
    chunks, tile = [(0, 488, 530), (1, 20, 33)], target.row_tile
    clean = cache.attend(target, params, chunks, tile, 2)
    for position in (501, 502):
        at, within = cache.tables[0, position // 16], position % 16
        saved = cache.k_pool[at].copy(), cache.v_pool[at].copy()
        cache.k_pool[at, :, :, within] = cache.v_pool[at, :, within, :dim] = bad
        got = cache.attend(target, params, chunks, tile, 2)
        cache.k_pool[at], cache.v_pool[at] = saved
        last = position + window - 1 if window else 529
        sees = np.array([position <= t <= last for t in range(488, 530)] + [False] * 13)
        assert same_bits(got[~sees], clean[~sees])
        assert not np.isfinite(got[sees]).any()


@on_cpus
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "kv", "window", "bad"),
    [
        (6, 6, 16, "f32", 0, np.nan),
        (6, 6, 16, "bf16", 0, np.inf),
        (6, 2, 24, "bf16", 9, np.nan),
        (6, 2, 24, "f16", 9, np.inf),
        (6, 2, 24, "int8", 9, np.nan),
        (6, 6, 16, "int8", 0, np.inf),
        (3, 1, 20, "fp8_e4m3", 6, np.nan),
        (6, 2, 24, "fp8_e5m2", 0, -np.inf),
        (3, 1, 20, "f32", 6, -np.inf),
    ],
)
def test_a_token_that_is_not_finite(
    target: Target, heads: int, kv_heads: int, dim: int, kv: str, window: int, bad: float
) -> None:
    check_bad_token(target, heads, kv_heads, dim, kv, window, bad)


# vdpbf16ps in terms of fused multiply-adds, the second product first; this machine may lack it.
_EMULATED_DOT = """
define linkonce_odr hidden <16 x float> @llmc_dot_bf16(<16 x float> %c, <16 x i32> %a, <16 x i32> %b) #0 {
  %al = call <16 x float> @llmc_bf16_low(<16 x i32> %a)
  %bl = call <16 x float> @llmc_bf16_low(<16 x i32> %b)
  %ah = call <16 x float> @llmc_bf16_high(<16 x i32> %a)
  %bh = call <16 x float> @llmc_bf16_high(<16 x i32> %b)
  %h = call <16 x float> @llvm.fma.v16f32(<16 x float> %ah, <16 x float> %bh, <16 x float> %c)
  %r = call <16 x float> @llvm.fma.v16f32(<16 x float> %al, <16 x float> %bl, <16 x float> %h)
  ret <16 x float> %r
}
define linkonce_odr hidden i32 @llmc_narrow_bf16(<16 x float> %v, ptr %p) #0 {
  %h = call <16 x i16> @llmc_round_bf16(<16 x float> %v)
  store <16 x i16> %h, ptr %p, align 32
  ret i32 0
}
"""


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "window"), [(7, 1, 20, 16, 0), (2, 2, 80, 64, 0), (6, 2, 24, 32, 41)]
)
def test_kernel_of_bf16_dots(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, dim: int, block: int, window: int
) -> None:
    """Everything but the instruction: queries and weights in bf16, pairs whose second key is not there yet."""
    base = TARGETS["x86-64-v4"] if NATIVE.isa_level > 1 else TARGETS["x86-64-v3"]
    target = replace(base, name=f"{base.name}-dot", instruction_sets=(*base.instruction_sets, "avx512bf16"))
    assert target.bf16_dot
    monkeypatch.setattr(bf16, "dot", lambda: _EMULATED_DOT)
    check_attention(target, heads, kv_heads, dim, "f32", "bf16", block, window, tolerance_of(target, "f32", "bf16"))


@pytest.mark.parametrize("target", [t for t in TARGETS.values() if t.bf16_dot], ids=lambda t: t.name)
def test_bf16_dots_are_used(target: Target) -> None:
    def assembly(kv: str) -> str:
        params = attention_params(8, 2, 64, "bf16", kv, 32, 0)
        spec = KernelSpec.of("attention", "paged_attention", **params, row_tile=8, segments=0)
        return llvm_text(build_kernel(spec, target), target, "asm")

    dots = assembly("bf16")
    # 12 rows × 2 vectors of a tile and 4 × 2 of one token for the scores, as many for each pair of columns.
    assert dots.count("vdpbf16ps") >= 3 * (12 + 4) * 2
    assert "vcvtneps2bf16" in dots
    assert "vdpbf16ps" not in assembly("f32")


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4", "znver5"])
def test_int8_is_multiplied_as_integers(name: str) -> None:
    target = TARGETS[name]
    params = attention_params(8, 2, 64, "f32", "int8", 32, 0)
    spec = KernelSpec.of("attention", "paged_attention", **params, row_tile=1, segments=0)
    code = llvm_text(build_kernel(spec, target), target, "asm")
    assert ("vpdpwssd" in code) == target.int8_dot
    assert "vpmaddwd" in code or target.int8_dot


@on_cpus
def test_powers_of_two(target: Target) -> None:
    """The weights of attention, by a kernel that does nothing else."""
    kernel = b.Kernel("powers", [("x", "float32"), ("y", "float32")], vector.helpers(target.mcpu))
    with kernel as k, T.serial(k.scalar(0)) as i:
        b.store_vector(k["y"], b.call("exp2", b.load_vector(k["x"], i * 16)), i * 16)
    x = -np.concatenate([np.linspace(0, 126, 100_000), [0, 126.99, 127, 128, 1e30, 3e38]]).astype(np.float32)
    x = np.resize(np.append(x, np.float32(np.nan)), -(-len(x) // 16) * 16 + 16)
    y = call_kernel(kernel.function(), target, x)
    normal = x >= -126
    np.testing.assert_allclose(y[normal], np.exp2(x[normal].astype(np.float64)), rtol=2e-7)
    assert (y[x == 0] == 1).all()
    assert (y[(x <= -127) | np.isnan(x)] == 0).all()
    assert (np.abs(y[(x < -126) & (x > -127)]) <= 2.0**-125).all()


def call_kernel(function: Any, target: Target, x: Array) -> Array:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.so"
        link_shared([compile_object(function, target)], path)
        entry = ctypes.CDLL(str(path))[str(function.attrs["global_symbol"])]
        before, after = Guarded(x), Guarded(np.full_like(x, np.nan))
        scalars = (ctypes.c_int64 * 8)(len(x) // 16)
        entry(ctypes.c_void_p(before.address), ctypes.c_void_p(after.address), scalars, 0, 1)
        after.check("y")
        return after.array.copy()
