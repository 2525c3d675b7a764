"""Logits of a drafting head's few tokens, among all tokens of its model."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.registry import resolve_target

pytestmark = pytest.mark.native


@pytest.mark.parametrize("name", ["native", "reference"])
def test_spread_logits(name: str, tmp_path: Path) -> None:
    """Of a vocabulary that is no whole number of pieces; a token without a place cannot be drawn."""
    rng, target = np.random.default_rng(0), resolve_target(name)
    spec = KernelSpec.of("other", "spread_logits", dim=37, out=600)
    target.link([target.compile(spec, None)], tmp_path / "kernels.so")
    kernel = ctypes.CDLL(str(tmp_path / "kernels.so"))[spec.symbol()]
    x, places = rng.standard_normal((4, 37)).astype(np.float32), np.full(600, -1, np.float32)
    places[rng.permutation(600)[:37]] = np.arange(37)
    expected = np.where(places < 0, np.float32(-1e30), x[:, places.astype(np.int32)])
    scalars = (ctypes.c_int64 * 8)(9, 9, 3)
    for tasks in (1, 2, 5):
        out = np.full((4, 600), np.nan, np.float32)
        buffers = [ctypes.c_void_p(array.ctypes.data) for array in (x, places, out)]
        for task in range(tasks):
            kernel(*buffers, scalars, ctypes.c_int32(task), ctypes.c_int32(tasks))
        np.testing.assert_array_equal(out[:3], expected[:3])
        assert np.isnan(out[3:]).all()
