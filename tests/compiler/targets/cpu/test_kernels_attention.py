"""Rope, KV write and paged attention against numpy in float64, and the bits of a token in every company."""

from __future__ import annotations

import ctypes
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.codegen import compile_object, llvm_text
from llmc.compiler.targets.cpu.kernels.ir import bf16, vector
from llmc.compiler.targets.cpu.kernels.registry import build_kernel
from llmc.compiler.targets.cpu.target import TARGETS, Target, native_target
from llmc.compiler.targets.elf.link import link_shared

from support.kernel_harness import Guarded, Tolerance, run, targets_here
from support.kv_pools import pair_rows, unpair_rows
from support.marks import mostly_highest, on_levels, rare, spread
from support.paged_attention import (
    NUMPY,
    attention_params,
    check_attention,
    check_bad_token,
    check_split_context,
    random,
    same_bits,
    tolerance_of,
)

pytestmark = pytest.mark.native

Array = NDArray[Any]
NATIVE = native_target()
CPUS = targets_here("cooperlake", "x86-64-v4", "x86-64-v3")
on_cpus = on_levels(CPUS)


def rms(x: Array, weight: Array, eps: float) -> Array:
    out: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return out


def rotate(x: Array, cos: Array, sin: Array, rotary: int) -> Array:
    half = rotary // 2
    low, high, rest = x[..., :half], x[..., half:rotary], x[..., rotary:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], -1)


@spread(
    "heads, kv_heads, dim, rotary, norm, kv",
    CPUS,
    [
        (7, 1, 20, 20, "before"),
        (6, 2, 80, 20, "none"),
        (2, 2, 64, 64, "before"),
        (1, 1, 12, 6, "none"),
        (7, 1, 20, 12, "behind"),
        (2, 1, 40, 40, "unit"),
    ],
    ["f32", "bf16", "f16"],
)
def test_rope_kv_write(target: Target, kv: str, heads: int, kv_heads: int, dim: int, rotary: int, norm: str) -> None:
    """norm: of heads: before or behind the rotation; "unit" is behind it, too, without weights."""
    rows, seen, block, blocks, longest, eps = 9, 7, 16, 5, 40, 1e-6
    padded = -(-dim // 16) * 16
    qkv = random(rows, (heads + 2 * kv_heads) * dim)
    angles = np.outer(np.arange(longest), 10000.0 ** (-np.arange(rotary // 2) * 2 / rotary))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    rng = np.random.default_rng(5)
    positions = rng.integers(0, longest, rows).astype(np.int32)
    slots = rng.permutation(np.arange(block, blocks * block))[:rows].astype(np.int32)
    weighed = norm in ("before", "behind")
    norms = {"q_norm": random(dim, seed=1), "k_norm": random(dim, seed=2)} if weighed else {}
    spec = KernelSpec.of(
        "rope",
        "rope_kv_write",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rotary_dim=rotary,
        qk_norm=weighed,
        norm_eps=eps,
        kv_dtype=kv,
        block_size=block,
        interleaved=False,
        **({"norm_rotated": True} if norm in ("behind", "unit") else {}),
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
    if norm == "before":
        q, key = rms(q, norms["q_norm"], eps), rms(key, norms["k_norm"], eps)
    cos, sin = np.split(cos_sin[positions].astype(np.float64)[:, None], 2, axis=-1)
    q, key = rotate(q, cos, sin, rotary), rotate(key, cos, sin, rotary)
    if norm in ("behind", "unit"):
        ones = np.ones(dim)
        q, key = rms(q, norms.get("q_norm", ones), eps), rms(key, norms.get("k_norm", ones), eps)
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


@mostly_highest(
    "heads, kv_heads, dim, act, kv, block, window",
    CPUS,
    [
        (7, 1, 20, "f32", "f32", 16, 0),
        (14, 2, 64, "bf16", "bf16", 32, 0),
        (6, 2, 24, "bf16", "f16", 16, 40),
        (6, 2, 24, "f32", "int8", 48, 40),
        (4, 2, 64, "f32", "fp8_e4m3", 32, 40),
    ],
    [
        (4, 1, 128, "f32", "f32", 32, 17),
    ],
    [
        (3, 1, 8, "bf16", "bf16", 32, 0),
        (2, 2, 80, "f32", "bf16", 64, 0),
        (6, 2, 24, "bf16", "f32", 32, 40),
        (2, 1, 64, "bf16", "bf16", 16, 300),
        (16, 1, 16, "f32", "bf16", 32, 0),
        (14, 2, 64, "f32", "f16", 32, 0),
        (7, 1, 20, "f32", "int8", 16, 0),
        (14, 2, 64, "bf16", "int8", 32, 0),
        (4, 4, 128, "f32", "int8", 32, 300),
        (7, 1, 20, "bf16", "fp8_e4m3", 16, 0),
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


@mostly_highest(
    "heads, kv_heads, dim, act, kv, block, window",
    CPUS,
    [
        (4, 2, 16, "bf16", "int8", 16, 1100),
    ],
    [
        (4, 2, 16, "bf16", "f32", 16, 0),
    ],
    [
        (7, 1, 20, "f32", "bf16", 32, 0),
        (2, 2, 32, "f32", "f32", 32, 1100),
        (13, 1, 8, "f32", "bf16", 48, 0),
        (4, 1, 16, "f32", "f16", 16, 1100),
        (7, 1, 20, "f32", "int8", 32, 0),
        (4, 2, 16, "f32", "fp8_e4m3", 16, 0),
        (2, 2, 32, "f32", "fp8_e5m2", 48, 1100),
        (4, 2, 16, "f16", "f16", 16, 0),
    ],
)
def test_split_context(
    target: Target, heads: int, kv_heads: int, dim: int, act: str, kv: str, block: int, window: int
) -> None:
    check_split_context(target, heads, kv_heads, dim, act, kv, block, window)


@mostly_highest(
    "heads, kv_heads, dim, act, kv, block, window",
    CPUS,
    [
        (4, 2, 20, "f32", "int8", 32, 65),
    ],
    [
        (4, 4, 20, "f32", "f32", 32, 0),
    ],
    [
        (6, 2, 24, "bf16", "bf16", 32, 9),
        (4, 4, 64, "bf16", "bf16", 32, 0),
        (4, 4, 16, "f32", "f32", 16, 300),
        (3, 3, 16, "f16", "f16", 32, 9),
    ],
)
def test_keys_behind_a_token(
    target: Target, heads: int, kv_heads: int, dim: int, act: str, kv: str, block: int, window: int
) -> None:
    tolerance = tolerance_of(target, act, kv)
    check_attention(target, heads, kv_heads, dim, act, kv, block, window, tolerance, both_ways=True)


@on_cpus
@pytest.mark.parametrize(("kv", "window"), [rare("f32", 0), rare("bf16", 1100), rare("int8", 0)])
def test_keys_behind_a_token_in_split_contexts(target: Target, kv: str, window: int) -> None:
    check_split_context(target, 2, 2, 32, "f32", kv, 32, window, both_ways=True)


@mostly_highest(
    "heads, kv_heads, dim, kv, window, bad",
    CPUS,
    [
        (6, 2, 24, "bf16", 9, np.nan),
        (6, 2, 24, "int8", 9, np.nan),
        (3, 1, 20, "fp8_e4m3", 6, np.nan),
        (3, 1, 20, "f32", 6, -np.inf),
    ],
    [
        (6, 6, 16, "f32", 0, np.nan),
    ],
    [
        (6, 6, 16, "bf16", 0, np.inf),
        (6, 2, 24, "f16", 9, np.inf),
        (6, 6, 16, "int8", 0, np.inf),
        (6, 2, 24, "fp8_e5m2", 0, -np.inf),
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
    ("heads", "kv_heads", "dim", "block", "window"), [rare(7, 1, 20, 16, 0), rare(2, 2, 80, 64, 0), (6, 2, 24, 32, 41)]
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


@on_levels([t for t in TARGETS.values() if t.bf16_dot])
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
