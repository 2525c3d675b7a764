"""The kernels of permute_columns, called directly on every target of this machine."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.ops.permute import permute_spec
from llmc.compiler.targets.cpu.backend import CpuTarget
from llmc.compiler.targets.cpu.packing import pack_activation
from llmc.compiler.targets.registry import resolve_target

from support.kernel_harness import Guarded
from support.kernel_harness import targets_here as cpus_here
from support.new_family import targets_here

pytestmark = pytest.mark.native
ROWS = 19
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
TARGETS = [(name, 1) for name in targets_here() if name.startswith("reference")]
TARGETS += [(cpu.name, tile) for cpu in cpus_here("x86-64-v4", "x86-64-v3") for tile in (1, 2, cpu.row_tile)]


def call(function: Any, packed: NDArray[Any], columns: NDArray[np.int32], rows: int, tasks: int) -> NDArray[Any]:
    """What a kernel writes; what it does not write is not a number."""
    arrays = {"x": packed, "columns": columns, "out": np.full_like(packed, np.nan)}
    buffers = {name: Guarded(array) for name, array in arrays.items()}
    places = [ctypes.c_void_p(buffer.address) for buffer in buffers.values()]
    scalars = (ctypes.c_int64 * 8)(rows)
    for task in reversed(range(tasks)):
        function(*places, scalars, ctypes.c_int32(task), ctypes.c_int32(tasks))
    for name, buffer in buffers.items():
        buffer.check(name)
        assert name == "out" or buffer.array.tobytes() == arrays[name].tobytes(), name
    return buffers["out"].array


@pytest.mark.parametrize("act", DTYPES)
@pytest.mark.parametrize(("target", "tile"), TARGETS)
def test_columns_are_put_in_order(target: str, tile: int, act: str, tmp_path: Path) -> None:
    found = resolve_target(target)
    params = {"row_tile": tile} if isinstance(found, CpuTarget) else {}
    for k in (1, 31, 96, 1031):
        spec, path, rng = permute_spec(k, act, rows=0, **params), tmp_path / f"{k}.so", np.random.default_rng(k)
        found.link([found.compile(spec, None)], path)
        function = ctypes.CDLL(str(path))[spec.symbol()]
        function.restype = None
        x, columns = rng.standard_normal((ROWS, k)).astype(DTYPES[act]), rng.permutation(k).astype(np.int32)
        for rows, tasks in ((ROWS, 1), (ROWS, 3), (1, 1), (3, 2), (8, 40)):
            # Padding of a row is zero; rows behind the last one are moved along.
            out = call(function, pack_activation(x[:rows], tile), columns, rows, tasks)
            assert out.tobytes() == pack_activation(x[:rows, columns], tile).tobytes(), (k, rows, tasks)
