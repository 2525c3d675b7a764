"""What expert kernels read of their weights: each page of an expert in use once a step, and nothing of the others."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.cpu.target import Target, native_target

from support.expert_layers import EXPERT_COUNT, TOP_K, Compiled, Layer
from support.kernel_harness import targets_here
from support.page_watch import PAGE_BYTES, WatchedArrays, built

pytestmark = pytest.mark.native
ROWS = 64
SIZE = 512
"""Of rows and of columns of an expert's matrices: every panel is whole pages, so tasks share none."""
CACHE_PAGES = 32
"""128 KiB, of which every core has more, and no more than a matrix of 4-bit numbers."""
WEIGHTS = ("gate_up", "down")
SCHEMES = ("w8a8", "w4a16", "w4a8", "fp8", "mxfp4")
HERE, OFTEN = native_target(), ("w8a8", "w4a16")
OTHERS = [
    pytest.param(target, scheme, id=f"{target.name}-{scheme}", marks=pytest.mark.exhaustive)
    for target in targets_here("x86-64-v4", "x86-64-v3")
    for scheme in (None, *SCHEMES)
    if target != HERE or scheme not in (None, *OFTEN)
]


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(tmp_path_factory.mktemp("watch"))


def once(chosen: NDArray[np.int32], pages: int) -> NDArray[np.uint32]:
    """One fetch of each page of the chosen experts, of all pages of a weight."""
    in_use = np.isin(np.arange(EXPERT_COUNT), chosen)
    return np.repeat(in_use, pages // EXPERT_COUNT).astype(np.uint32)


def test_a_page_that_left_the_cache_is_fetched_again(watch: ctypes.CDLL) -> None:
    arrays = WatchedArrays(watch, {"weight": np.arange(3 * PAGE_BYTES, dtype=np.uint8)})
    with arrays.watched(2):
        found = [ctypes.string_at(arrays.addresses["weight"] + page * PAGE_BYTES + 7, 1) for page in (0, 1, 0, 2, 0)]
    assert found == [b"\7"] * 5
    assert arrays.fetches["weight"].tolist() == [2, 1, 1]


@pytest.mark.parametrize(("target", "scheme"), [*((HERE, scheme) for scheme in (None, *OFTEN)), *OTHERS])
def test_a_step_reads_each_expert_in_use_once(
    target: Target, scheme: str | None, watch: ctypes.CDLL, tmp_path: Path
) -> None:
    """By a cache that holds less than an expert, for any number of rows and of tasks."""
    layer = Layer(ROWS, SIZE, SIZE, "bf16", scheme=scheme)
    graph, rng = Compiled(layer, target.name, ROWS, tmp_path / "kernels.so"), np.random.default_rng(1)
    arrays = WatchedArrays(watch, {name: graph.stored[name] for name in WEIGHTS})
    for rows in (2, 16, ROWS):
        for num_tasks in (1, 5):
            order = rng.permutation(ROWS)[:rows]
            with arrays.watched(CACHE_PAGES):
                graph.run(order, num_tasks, arrays.addresses, arrays.forget)
            for name, fetches in arrays.fetches.items():
                wanted = once(layer.chosen[order, :TOP_K], len(fetches))
                assert 0 in wanted
                assert np.array_equal(fetches, wanted), (name, rows, num_tasks)
