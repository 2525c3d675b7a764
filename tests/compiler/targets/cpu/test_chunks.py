"""How tasks share row tiles × panels: every unit once, nearly equal work, whatever the numbers are."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.targets.cpu.kernels import builder as b
from llmc.compiler.targets.cpu.kernels.codegen import compile_object
from llmc.compiler.targets.cpu.kernels.ir import vector
from llmc.compiler.targets.cpu.kernels.linear.chunks import Chunks
from llmc.compiler.targets.cpu.target import native_target
from llmc.compiler.targets.elf.link import link_shared

pytestmark = pytest.mark.native

PANELS, MOST = 19, 12


@pytest.fixture(scope="module", params=[1, 4])
def shares(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Any]:
    """(unit, kernel that tells of each of its units the first row tile, their number and the panel)."""
    target, unit = native_target(), request.param
    kernel = b.Kernel("shares", [("out", "int32"), ("count", "int32")], vector.helpers(target.mcpu))
    with kernel as k:
        from tvm.script.ir_builder import tirx as T

        chunks = Chunks(k, k.scalar(0), PANELS, MOST, unit)
        first, end = chunks.bounds()
        b.store(k["count"], end - first, 0)
        with T.serial(first, end) as work:
            tile, size = chunks.span(b.let(T.truncdiv(work, PANELS)))
            for i, value in enumerate((tile, size, T.truncmod(work, PANELS))):
                b.store(k["out"], value, (work - first) * 3 + i)
    path = tmp_path_factory.mktemp("chunks") / "shares.so"
    link_shared([compile_object(kernel.function(), target)], Path(path))
    return unit, ctypes.CDLL(str(path)).shares


@pytest.mark.parametrize("tasks", [1, 2, 3, 7])
def test_every_unit_once_and_equal_work(shares: tuple[int, Any], tasks: int) -> None:
    unit, kernel = shares
    for tiles in [*range(1, 40), 64, 75, 125, 129, 1000]:
        seen, work = np.zeros((tiles, PANELS), int), []
        for task in range(tasks):
            out, count = np.zeros(3 * 4096, np.int32), np.zeros(1, np.int32)
            scalars = (ctypes.c_int64 * 8)(tiles)
            kernel(out.ctypes.data_as(ctypes.c_void_p), count.ctypes.data_as(ctypes.c_void_p), scalars, task, tasks)
            units = out[: 3 * count[0]].reshape(-1, 3)
            for tile, size, panel in units:
                assert 0 < size <= MOST
                assert tile % unit == 0
                assert size % unit == 0 or tile + size == tiles
                seen[tile : tile + size, panel] += 1
            work.append(int(units[:, 1].sum()))
        assert (seen == 1).all(), tiles
        assert max(work) - min(work) <= 2 * MOST, (tiles, work)
