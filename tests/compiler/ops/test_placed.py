"""Ops that read the buffer of states, and gather consecutive rows: what kernels of each target copy, and what torch."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.registry import resolve_target
from llmc.models import ops, states_ops
from llmc.models.reference import ReferenceStates, use_states

from support.kernel_harness import targets_here

pytestmark = pytest.mark.native
NAMES = [*(target.name for target in targets_here("cooperlake", "x86-64-v4", "x86-64-v3")), "reference"]
ROWS, USED = 7, 5


def run(name: str, spec: KernelSpec, inputs: list[NDArray[np.generic]], width: int, folder: Path) -> None:
    """Compares rows of a kernel with the last of `inputs`, which is what it should write; it writes no others."""
    target = resolve_target(name)
    target.link([target.compile(spec, None)], folder / "kernels.so")
    kernel = ctypes.CDLL(str(folder / "kernels.so"))[spec.symbol()]
    *read, expected = inputs
    scalars = (ctypes.c_int64 * 8)(USED, 1, USED)
    for tasks in (1, 2, 6):
        out = np.full((ROWS, width), np.nan, np.float32)
        buffers = [ctypes.c_void_p(array.ctypes.data) for array in (*read, out)]
        for task in range(tasks):
            kernel(*buffers, scalars, ctypes.c_int32(task), ctypes.c_int32(tasks))
        np.testing.assert_array_equal(out[:USED], expected[:USED])
        assert np.isnan(out[USED:]).all()


def random(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def states_of(rows: NDArray[np.float32]) -> ReferenceStates:
    states = ReferenceStates()
    states.rows = torch.from_numpy(rows)
    return states


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [37, 96])
def test_placed_rows(name: str, dim: int, tmp_path: Path) -> None:
    """The buffer's rows of tokens may be anything, NaN too: nobody wrote them."""
    ids, x, states = np.array([3, -1, 0, -1, 2, -1, 1], np.int32), random(ROWS, dim), random(ROWS, dim)
    states[ids >= 0] = np.nan
    with use_states(states_of(states)):
        expected = states_ops.placed_rows(torch.from_numpy(x), torch.from_numpy(ids)).numpy()
    np.testing.assert_array_equal(expected, np.where(ids[:, None] < 0, states, x))
    run(name, KernelSpec.of("other", "placed_rows", dim=dim), [x, ids, states, expected], dim, tmp_path)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [50, 64])
def test_read_states(name: str, width: int, tmp_path: Path) -> None:
    states = random(ROWS, width)
    with use_states(states_of(states)):
        expected = states_ops.read_states(torch.zeros(ROWS, dtype=torch.int32), width).numpy()
    np.testing.assert_array_equal(expected, states)
    run(name, KernelSpec.of("other", "read_states", dim=width), [states, expected], width, tmp_path)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dim", "count"), [(37, 4), (32, 9), (20, 1)])
def test_consecutive_rows(name: str, dim: int, count: int, tmp_path: Path) -> None:
    x, index = random(20, dim), np.array([11, 0, 4, 4, 3, 8, 2], np.int32)
    expected = ops.gather_rows(torch.from_numpy(x), torch.from_numpy(index), count).numpy()
    np.testing.assert_array_equal(expected, np.stack([x[i : i + count].ravel() for i in index]))
    several = {"count": count} if count > 1 else {}
    spec = KernelSpec.of("gather", "gather_rows", dim=dim, **several)
    run(name, spec, [x, index, expected], dim * count, tmp_path)
