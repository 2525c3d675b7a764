"""The kernels of latent attention against numpy in float64, and the bits of a token in every company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.ops.latent import head_linear_spec
from llmc.compiler.targets.cpu.kernels.registry import build_kernel
from llmc.compiler.targets.cpu.packing import pack_activation, pack_linear, unpack_activation
from llmc.compiler.targets.cpu.target import Target, native_target

from support.kernel_harness import run, targets_here
from support.kv_pools import SCALED, latent_pool, unpair_rows
from support.latent_attention import LatentCache
from support.marks import on_levels, rare
from support.paged_attention import (
    LENGTHS,
    LONG_LENGTHS,
    NUMPY,
    check_companies,
    check_segments,
    random,
    same_bits,
    tolerance_of,
)

pytestmark = pytest.mark.native

Array = NDArray[Any]
on_cpus = on_levels(targets_here("x86-64-v4", "x86-64-v3"))


def tolerance(target: Target, kv: str) -> Any:
    """Of float32 results; keys are as they are kept."""
    return tolerance_of(target, "f32", kv)


@on_cpus
@pytest.mark.parametrize(
    ("heads", "rank", "rotated", "kv"),
    [
        (16, 32, 8, "bf16"),
        (5, 34, 6, "f32"),
        (5, 20, 8, "int8"),
        (6, 32, 4, "fp8_e4m3"),
        rare(5, 20, 8, "fp8_e5m2"),
        rare(6, 20, 8, "f16"),
        rare(5, 34, 6, "bf16"),
        rare(16, 32, 8, "f32"),
    ],
)
def test_attention(target: Target, heads: int, rank: int, rotated: int, kv: str) -> None:
    cache = LatentCache(LENGTHS, heads, rank, rotated, 16, kv)
    check_companies(cache, target, cache.params(), tolerance(target, kv))


@on_cpus
@pytest.mark.parametrize(("heads", "block", "kv"), [(4, 32, "bf16"), rare(3, 16, "f32")])
def test_contexts_in_segments(target: Target, heads: int, block: int, kv: str) -> None:
    cache = LatentCache(LONG_LENGTHS, heads, 24, 8, block, kv)
    check_segments(cache, target, cache.params(), tolerance(target, kv))


@on_cpus
@pytest.mark.parametrize(("bad", "kv"), [(np.nan, "f32"), (np.inf, "f32"), (np.nan, "int8")])
def test_a_bad_token_spoils_those_that_see_it(target: Target, bad: float, kv: str) -> None:
    cache = LatentCache([530, 33], 4, 24, 8, 16, kv)
    chunks = [(0, 488, 530), (1, 20, 33)]
    clean = cache.attend(target, cache.params(), chunks, target.row_tile, 2)
    for position in (495, 501):
        place = cache.tables[0, position // 16], 0, slice(None), position % 16
        saved = cache.pool[place].copy()
        cache.pool[place] = bad
        found = cache.attend(target, cache.params(), chunks, target.row_tile, 2)
        cache.pool[place] = saved
        sees = np.array([t >= position for t in range(488, 530)] + [False] * 13)
        assert same_bits(found[~sees], clean[~sees])
        assert not np.isfinite(found[sees]).any()


def test_latent_vectors_are_whole_words() -> None:
    params = {**LatentCache([1], 4, 22, 6, 16, "f32").params(), "kv_dtype": "fp8_e4m3", "segments": 0}
    with pytest.raises(KernelSpecError, match="multiple of 4 and blocks"):
        build_kernel(KernelSpec.of("attention", "latent_attention", **params), native_target())


@on_cpus
@pytest.mark.parametrize("dtype", ["f32", "bf16", rare("f16")])
@pytest.mark.parametrize(("heads", "n", "k", "stride"), [(3, 50, 12, 20), rare(2, 96, 64, 64), (5, 6, 30, 30)])
def test_head_linear(target: Target, dtype: str, heads: int, n: int, k: int, stride: int) -> None:
    """Rows and activations, in every row tile; what lies behind the leading elements of a head is not read."""
    count, held = 7, 8
    x = random(held, heads, stride)
    x[..., k:] = np.nan
    x[count:] = np.nan
    weight = random(heads * n, k, seed=1).astype(NUMPY[dtype])
    expected = np.einsum(
        "thk,hnk->thn", x[:count, :, :k].astype(np.float64), weight.astype(np.float64).reshape(heads, n, k)
    )
    packed = pack_linear(weight, target.panel_columns, heads)
    stored = packed if dtype == "f32" else packed.view(np.int32)
    found = []
    for tile in (1, target.row_tile):
        spec = head_linear_spec(dtype, "", heads=heads, k=k, n=heads * n, stride=stride, rows=0, row_tile=tile)
        for tasks in (1, 3):
            out = np.full((held, heads * n), np.nan, np.float32)
            arrays = {"x": x.reshape(held, -1), "weight": stored, "out": out}
            made = run(spec, target, arrays, written=("out",), scalars={0: count}, num_tasks=tasks)["out"][:count]
            np.testing.assert_allclose(made.astype(np.float64), expected.reshape(count, -1), rtol=2e-5, atol=3e-5)
            found.append(made)
        spec = head_linear_spec(dtype, dtype, heads=heads, k=k, n=heads * n, stride=stride, rows=0, row_tile=tile)
        room = pack_activation(np.full((held, heads * n), np.nan, NUMPY[dtype]), tile)
        given = room if dtype == "f32" else room.view(np.int32)
        arrays = {"x": x.reshape(held, -1), "weight": stored, "out": given}
        made = run(spec, target, arrays, written=("out",), scalars={0: count}, num_tasks=2)["out"]
        unpacked = unpack_activation(made.view(NUMPY[dtype]).reshape(room.shape), count, heads * n)
        assert same_bits(unpacked, found[0].astype(NUMPY[dtype]))
    assert all(same_bits(made, found[0]) for made in found)


@on_cpus
@pytest.mark.parametrize(
    ("heads", "rank", "rotary", "kv"),
    [(3, 34, 6, "f32"), (2, 32, 16, "bf16"), (3, 36, 8, "int8"), rare(3, 20, 8, "f16"), rare(2, 32, 16, "fp8_e4m3")],
)
def test_latent_kv_write(target: Target, heads: int, rank: int, rotary: int, kv: str) -> None:
    rows, seen, block, blocks, longest, plain, eps = 9, 7, 16, 5, 40, 10, 1e-6
    q, key, norm = random(rows, heads, plain + rotary), random(rows, rank + rotary, seed=1), random(rank, seed=2)
    angles = np.outer(np.arange(longest), 10000.0 ** (-np.arange(rotary // 2) * 2 / rotary))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    rng = np.random.default_rng(5)
    positions = rng.integers(0, longest, rows).astype(np.int32)
    slots = rng.permutation(np.arange(block, blocks * block))[:rows].astype(np.int32)
    spec = KernelSpec.of(
        "rope",
        "latent_kv_write",
        num_heads=heads,
        num_kv_heads=1,
        head_dim=rank + rotary,
        rank=rank,
        key_scales=2,
        rotary_dim=rotary,
        query_dim=plain + rotary,
        norm_eps=eps,
        kv_dtype=kv,
        block_size=block,
    )
    before = random(blocks, 1, rank + rotary, block, seed=3).astype(NUMPY.get(kv, np.dtype(np.float32)))
    key[:, rank:] *= 40
    pool = before if kv == "f32" else latent_pool(before, rank, kv).view(np.int32)
    arrays = {
        "q": q.reshape(rows, -1),
        "kv": key,
        "norm": norm,
        "cos_sin": cos_sin,
        "positions": positions,
        "slot_mapping": slots,
        "k_pool": pool,
        "out": np.full((rows, heads * rotary), np.nan, np.float32),
    }
    found = run(spec, target, arrays, written=("k_pool", "out"), scalars={0: seen}, num_tasks=3)
    again = run(spec, target, arrays, written=("k_pool", "out"), scalars={0: seen}, num_tasks=1)
    assert all(same_bits(found[name], again[name]) for name in found)

    def turned(x: Array) -> Array:
        cos, sin = np.split(cos_sin[positions].astype(np.float64), 2, -1)
        cos, sin = (part.reshape(rows, *(1,) * (x.ndim - 2), -1) for part in (cos, sin))
        low, high = np.split(x.astype(np.float64), 2, -1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    np.testing.assert_allclose(
        found["out"][:seen].reshape(seen, heads, rotary), turned(q[..., plain:])[:seen], rtol=1e-5, atol=1e-6
    )
    wide = key[:, :rank].astype(np.float64)
    latent = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * norm
    wanted, kept = before.astype(np.float64), np.concatenate([latent, turned(key[:, rank:])], -1)
    for row in range(seen):
        wanted[slots[row] // block, 0, :, slots[row] % block] = kept[row]
    if kv in SCALED:
        # A number may round to its neighbour; scales differ in their last bits.
        expected = latent_pool(wanted.astype(np.float32), rank, kv)
        lying = found["k_pool"].view(np.uint8).reshape(expected.shape)
        numbers = (rank + rotary) * block
        assert np.abs(lying[..., :numbers].astype(int) - expected[..., :numbers]).max() <= 1
        scales, wanted_scales = (x[..., numbers:].view(np.float32) for x in (lying, expected))
        np.testing.assert_allclose(scales, wanted_scales, rtol=1e-5)
        return
    lying = found["k_pool"].view(NUMPY[kv])
    after = lying if kv == "f32" else unpair_rows(lying.reshape(*before.shape[:2], (rank + rotary) // 2, block, 2))
    bound = {"f32": 1e-5, "bf16": 2.0**-8, "f16": 2.0**-10}[kv]
    np.testing.assert_allclose(after.astype(np.float64), wanted, rtol=bound, atol=1e-6)
