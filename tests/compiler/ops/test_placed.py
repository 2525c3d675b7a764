"""Ops that read the buffer of states, and gather consecutive rows: what kernels of each target copy, and what torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec
from llmc.models import ops, states_ops
from llmc.models.reference import ReferenceStates, use_states

from support.row_kernels import NAMES, ROWS, run

pytestmark = pytest.mark.native


def random(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def states_of(rows: NDArray[np.float32]) -> ReferenceStates:
    states = ReferenceStates()
    states.rows = torch.from_numpy(rows)
    return states


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dim", "parts", "part"), [(37, 1, 0), (96, 1, 0), (37, 3, 2), (64, 2, 1)])
@pytest.mark.parametrize("added", [False, True])
def test_placed_rows(name: str, dim: int, parts: int, part: int, added: bool, tmp_path: Path) -> None:
    """The buffer's rows of tokens may be anything, NaN too: nobody wrote them."""
    ids, x, states = np.array([3, -1, 0, -1, 2, -1, 1], np.int32), random(ROWS, dim), random(ROWS, parts * dim)
    states[ids >= 0] = np.nan
    width, first = parts * dim, part * dim
    with use_states(states_of(states)):
        made = states_ops.placed_rows(torch.from_numpy(x), torch.from_numpy(ids), width, first, added).numpy()
    own = states[:, first : first + dim]
    np.testing.assert_array_equal(made, np.where(ids[:, None] < 0, x + own if added else own, x))
    spec = KernelSpec.of("other", "placed_rows", dim=dim, width=width, first=first, added=added)
    run(name, spec, [x, ids, states, made], dim, tmp_path)


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
