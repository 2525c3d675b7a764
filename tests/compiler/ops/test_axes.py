"""Rotary angles by positions with axes: what kernels of each target pick, and what torch does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from llmc.compiler.kernel_spec import KernelSpec
from llmc.models import axes_ops

from support.row_kernels import NAMES, ROWS, run

pytestmark = pytest.mark.native
AXES = {
    "sections": "0" * 16 + "1" * 24 + "2" * 24,
    "uneven sections": "0" * 3 + "1" * 5 + "2" * 4,
    "by turns": "012" * 20 + "0" * 4,
    "one": "0",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_rope_rows(name: str, axes: str, tmp_path: Path) -> None:
    random = np.random.default_rng(len(axes))
    dim = 2 * len(axes)
    table = random.standard_normal((40, dim)).astype(np.float32)
    positions = random.integers(0, 40, (ROWS, 3)).astype(np.int32)
    picked = [[table[row[int(axes[i % len(axes)])], i] for i in range(dim)] for row in positions]
    made = axes_ops.rope_rows(torch.from_numpy(table), torch.from_numpy(positions), axes).numpy()
    np.testing.assert_array_equal(made, np.array(picked))
    run(name, KernelSpec.of("other", "rope_rows", dim=dim, axes=axes), [table, positions, made], dim, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_row_numbers(name: str, tmp_path: Path) -> None:
    positions = np.array([9, 4, 4, 7, 0, 1, 2], np.int32)
    numbers = axes_ops.row_numbers(torch.from_numpy(positions)).numpy()
    np.testing.assert_array_equal(numbers, np.arange(ROWS))
    run(name, KernelSpec.of("other", "row_numbers"), [positions, numbers[:, None]], 1, tmp_path)
