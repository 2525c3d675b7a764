"""Runs kernels that write a row for each token or sample, outside a graph."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.registry import resolve_target

from support.kernel_harness import targets_here

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
        out = np.full((ROWS, width), -(2**20), expected.dtype)
        buffers = [ctypes.c_void_p(array.ctypes.data) for array in (*read, out)]
        for task in range(tasks):
            kernel(*buffers, scalars, ctypes.c_int32(task), ctypes.c_int32(tasks))
        np.testing.assert_array_equal(out[:USED], expected[:USED])
        assert (out[USED:] == -(2**20)).all()
