"""The plain kernel of Mamba-2's states and torch's op, both against numpy in float64, in steps of any length."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.elf.codegen import compile_object
from llmc.compiler.targets.reference.backend import named
from llmc.compiler.targets.reference.kernels.mamba import selective_state
from llmc.models import mamba_ops
from llmc.models.reference import ReferenceCache, use_cache

REFERENCE = named("reference")

HEADS, HEAD_DIM, GROUPS, STATE, BLOCK, LENGTH = 6, 5, 2, 7, 4, 11
SIZE = HEADS * HEAD_DIM
STEPS = ((0, 6), (6, 7), (7, 11))
TABLE = np.array([[3, 1, 2]], np.int32)
RNG = np.random.default_rng(6)
XBC = RNG.standard_normal((LENGTH, SIZE + 2 * GROUPS * STATE)).astype(np.float32)
GATES = RNG.uniform(0.1, 1.0, (LENGTH, 2 * HEADS)).astype(np.float32)
SKIP = RNG.standard_normal(HEADS).astype(np.float32)


def expected() -> tuple[np.ndarray, np.ndarray]:
    """float64 [T, H head_dim], and the states behind all tokens [T, H, head_dim, state_size]."""
    state, found, states = np.zeros((HEADS, HEAD_DIM, STATE)), [], []
    for row, (step, kept) in zip(XBC.astype(np.float64), GATES.astype(np.float64).reshape(-1, 2, HEADS), strict=True):
        x = row[:SIZE].reshape(HEADS, HEAD_DIM)
        writes, reads = row[SIZE:].reshape(2, GROUPS, STATE).repeat(HEADS // GROUPS, axis=1)
        state = state * kept[:, None, None] + np.einsum("hp,hn->hpn", x * step[:, None], writes)
        found.append((np.einsum("hpn,hn->hp", state, reads) + x * SKIP[:, None]).reshape(-1))
        states.append(state)
    return np.stack(found), np.stack(states)


@pytest.mark.skipif(not REFERENCE.runs_here(), reason="the reference target's code is of another machine")
def test_the_plain_kernel(tmp_path: Path) -> None:
    sizes = {"heads": HEADS, "head_dim": HEAD_DIM, "groups": GROUPS, "state_size": STATE}
    spec = KernelSpec.of("attention", "selective_state", **sizes, block_size=BLOCK)
    REFERENCE.link([compile_object(selective_state(spec), "x86_64-unknown-linux-gnu", "x86-64")], tmp_path / "f.so")
    kernel = ctypes.CDLL(str(tmp_path / "f.so"))[spec.symbol()]
    pool, found = np.full((4, HEADS, HEAD_DIM, STATE), np.nan, np.float32), []
    for start, end in STEPS:
        out = np.full((end - start, SIZE), np.nan, np.float32)
        query_start, token_seq = np.array([0, end - start], np.int32), np.zeros(end - start, np.int32)
        positions = np.arange(start, end, dtype=np.int32)
        xbc, gates = np.ascontiguousarray(XBC[start:end]), np.ascontiguousarray(GATES[start:end])
        arrays = (xbc, gates, SKIP, TABLE, query_start, token_seq, positions, pool, out)
        scalars = np.array([end - start, 1, 0, TABLE.shape[1], 4, 0, 0, 0], np.int64)
        for task in range(2):
            kernel(*(ctypes.c_void_p(array.ctypes.data) for array in (*arrays, scalars)), task, 2)
        found.append(out)
    outputs, states = expected()
    np.testing.assert_allclose(np.concatenate(found), outputs, rtol=1e-5, atol=1e-5)
    for number, block in enumerate(TABLE[0]):
        behind = min(number * BLOCK + BLOCK, LENGTH) - 1
        np.testing.assert_allclose(pool[block], states[behind], rtol=1e-5, atol=1e-5)


def test_the_op() -> None:
    cache, found = ReferenceCache([(1, 1)], 4, BLOCK), []
    with use_cache(cache):
        for start, end in STEPS:
            out = mamba_ops.selective_state(
                torch.from_numpy(XBC[start:end]),
                torch.from_numpy(GATES[start:end]),
                torch.from_numpy(SKIP),
                torch.from_numpy(TABLE),
                torch.tensor([0, end - start]),
                torch.zeros(end - start, dtype=torch.int32),
                torch.arange(start, end),
                0,
                GROUPS,
                STATE,
            )
            found.append(out.numpy())
    outputs, states = expected()
    np.testing.assert_allclose(np.concatenate(found), outputs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(cache.states["heads", 0, 2].numpy(), states[-1], rtol=1e-5, atol=1e-5)
