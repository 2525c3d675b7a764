"""Keys and values as numbers of 8 bits with scales: every byte that rope_kv_write stores, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.target import Target

from support.kernel_harness import run, targets_here
from support.kv_pools import SCALED, key_pool, pair_rows, rounded, value_pool

pytestmark = pytest.mark.native

Array = NDArray[Any]
CPUS = targets_here("cooperlake", "x86-64-v4", "x86-64-v3")
HEADS, KV_HEADS, BLOCK, BLOCKS = 3, 2, 16, 3
ROWS = BLOCKS * BLOCK  # every place of every block


def scale_bytes(pool: Array) -> Array:
    """The scales of every head's part, float32 [blocks, heads, block]."""
    return np.ascontiguousarray(pool[..., -4 * BLOCK :]).view(np.float32)


def with_stated(x: Array, scales: Array, kv: str) -> Array:
    """A pool whose numbers are [blocks, heads, rows, columns] divided by stated scales, [heads]."""
    numbers = pair_rows(rounded(x / scales[None, :, None, None], kv)).reshape(len(x), len(scales), -1)
    behind = np.ascontiguousarray(np.broadcast_to(scales[None, :, None], (len(x), len(scales), BLOCK)))
    return np.concatenate([numbers, behind.view(np.uint8)], axis=2)


@pytest.mark.parametrize("target", CPUS, ids=lambda t: t.name)
@pytest.mark.parametrize("kv", list(SCALED))
@pytest.mark.parametrize(("dim", "rotary", "stated"), [(80, 20, False), (64, 64, True), (12, 6, False)])
def test_every_byte(target: Target, kv: str, dim: int, rotary: int, stated: bool) -> None:
    """At position 0 nothing is rotated, so that keys are known to the bit."""
    rng = np.random.default_rng(3)
    padded, heads = -(-dim // 16) * 16, HEADS + 2 * KV_HEADS
    qkv = (rng.standard_normal((ROWS, heads, dim)) * 10.0 ** rng.integers(-4, 5, (ROWS, heads, 1))).astype(np.float32)
    qkv[1, HEADS] = 0
    qkv[4, HEADS] *= np.float32(1e-33)
    slots = rng.permutation(ROWS).astype(np.int32)
    scales = rng.uniform(0.01, 0.3, 2 * KV_HEADS).astype(np.float32)
    keys = np.zeros((BLOCKS, KV_HEADS, dim, BLOCK), np.float32)
    values = np.zeros((BLOCKS, KV_HEADS, BLOCK, padded), np.float32)
    for row, slot in enumerate(slots):
        keys[slot // BLOCK, :, :, slot % BLOCK] = qkv[row, HEADS : HEADS + KV_HEADS]
        values[slot // BLOCK, :, slot % BLOCK, :dim] = qkv[row, HEADS + KV_HEADS :]
    k_pool, v_pool = key_pool(keys, kv), value_pool(values, dim, kv)
    if stated:
        k_pool, v_pool = with_stated(keys, scales[:KV_HEADS], kv), with_stated(values, scales[KV_HEADS:], kv)
    params: dict[str, Any] = dict(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=dim,
        rotary_dim=rotary,
        qk_norm=False,
        norm_eps=0.0,
        kv_dtype=kv,
        block_size=BLOCK,
        **({"kv_scales": True} if stated else {}),
    )
    spec = KernelSpec.of("rope", "rope_kv_write", **params)
    arrays = {
        "qkv": qkv.reshape(ROWS, -1),
        **({"kv_scales": scales} if stated else {}),
        "cos_sin": np.concatenate([np.ones((1, rotary // 2)), np.zeros((1, rotary // 2))], 1).astype(np.float32),
        "positions": np.zeros(ROWS, np.int32),
        "slot_mapping": slots,
        "k_pool": np.zeros_like(k_pool),
        "v_pool": np.zeros_like(v_pool),
        "q_out": np.zeros((ROWS, HEADS * dim), np.float32),
    }
    written = ("k_pool", "v_pool", "q_out")
    found = run(spec, target, arrays, written=written, scalars={0: ROWS}, num_tasks=3)
    np.testing.assert_array_equal(found["q_out"].reshape(ROWS, HEADS, dim), qkv[:, :HEADS])
    np.testing.assert_array_equal(found["k_pool"], k_pool)
    np.testing.assert_array_equal(found["v_pool"], v_pool)

    # What is not finite is told by its scale, and by no other.
    spoilt = qkv.copy()
    spoilt[2, HEADS + KV_HEADS, 3], spoilt[3, HEADS + 1, 0] = np.nan, -np.inf
    arrays["qkv"] = spoilt.reshape(ROWS, -1)
    found = run(spec, target, arrays, written=written, scalars={0: ROWS}, num_tasks=2)
    for name, row, head in (("v_pool", 2, 0), ("k_pool", 3, 1)):
        finite = np.isfinite(scale_bytes(found[name]))
        assert not finite[slots[row] // BLOCK, head, slots[row] % BLOCK]
        assert finite.sum() == finite.size - 1
