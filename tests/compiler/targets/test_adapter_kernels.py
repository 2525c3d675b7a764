"""The kernels of adapters, called directly on every target of this machine."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.adapter_slot import padded
from llmc.compiler.ops.adapters import adapter_spec, shrunk_width, spec_slot
from llmc.compiler.targets.cpu.packing import pack_activation
from llmc.compiler.targets.registry import resolve_target
from llmc.models.convert import DTYPES

from support.adapter_pools import NUMBERS, slot_bytes, tiles_of
from support.kernel_harness import Guarded
from support.kernel_harness import targets_here as cpus_here
from support.marks import rare
from support.new_family import targets_here

pytestmark = pytest.mark.native
Array = NDArray[Any]
TARGETS = [name for name in targets_here() if name.startswith("reference")]
TARGETS += [cpu.name for cpu in cpus_here("x86-64-v4", "x86-64-v3")]


def call(spec: Any, target: Any, folder: Path, buffers: list[Guarded], num_tasks: int) -> None:
    library = folder / f"{spec.symbol()}.so"
    if not library.exists():
        target.link([target.compile(spec, None)], library)
    function = ctypes.CDLL(str(library))[spec.symbol()]
    function.restype = None
    for task in reversed(range(num_tasks)):
        function(*(ctypes.c_void_p(buffer.address) for buffer in buffers), (ctypes.c_int64 * 8)(), task, num_tasks)
    for buffer in buffers:
        buffer.check(spec.symbol())


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "columns", "rows", "rank"),
    [
        ("f32", 37, (21, 5), 19),
        ("f32", 24, (40,), 100),
        ("bf16", 96, (64, 16, 16), 256),
        ("bf16", 37, (21, 5), 19),
        rare("bf16", 40, (24, 8), 128),
        ("f16", 8, (130,), 3),
        rare("f16", 33, (17,), 64),
    ],
)
def test_kernels(name: str, dtype: str, columns: int, rows: tuple[int, ...], rank: int, tmp_path: Path) -> None:
    """Every number of rows of a tile, parts without an adapter, ranks below the slot's, and rows without an adapter."""
    target, rng = resolve_target(name), np.random.default_rng(columns)
    slot = target.adapter_slot(columns, rows, rank, dtype)
    count, n, width = 40, sum(rows), shrunk_width(slot)

    def floats(*shape: int) -> Array:
        numbers = rng.standard_normal(shape).astype(np.float32).astype(NUMBERS[dtype])
        return np.asarray(numbers, np.float32)

    def matrices(ranks: tuple[int, ...]) -> dict[int, tuple[Array, Array, float]]:
        return {part: (floats(r, columns), floats(rows[part], r), 0.5 + part) for part, r in enumerate(ranks) if r}

    slots = {0: matrices((rank,) * len(rows)), 2: matrices((0, 1, rank - 1)[: len(rows)] or (1,)), 3: matrices((2,))}
    pool = np.concatenate([slot_bytes(slot, slots.get(i, {}), dtype) for i in range(4)])
    order = [int(i) for i in rng.permutation(count)]
    of_slot = {3: order[:1], 0: order[1:18], 2: order[18:29]}
    x, y = floats(count, columns), rng.standard_normal((count, n)).astype(np.float32)
    expected = y.astype(np.float64)
    for number, some in of_slot.items():
        for part, (a, b, scale) in slots[number].items():
            first = sum(rows[:part])
            made = scale * (x[some].astype(np.float64) @ a.T.astype(np.float64)) @ b.T.astype(np.float64)
            expected[some, first : first + rows[part]] += made
    layout = target.graph_shape(count, 1, 64, 64, 16).token_layout
    unit = target.row_unit(layout)
    if target.layout == "tiles":
        lying = pack_activation(x.astype(DTYPES[dtype]), unit)
    else:
        lying = np.zeros((count, -(-columns // lanes_of(dtype)) * lanes_of(dtype)), DTYPES[dtype])
        lying[:, :columns] = x.astype(DTYPES[dtype])
    shrink = adapter_spec("adapter_shrink", slot, act_dtype=dtype, **target.row_params(layout))
    expand = adapter_spec("adapter_expand", slot, act_dtype=dtype)
    results = []
    for num_tasks in (1, 3, 7):
        tiles, of_pool = Guarded(tiles_of(of_slot, count)), Guarded(pool)
        shrunk, out = Guarded(np.full((count, width), np.nan, np.float32)), Guarded(y)
        call(shrink, target, tmp_path, [Guarded(lying), tiles, of_pool, shrunk], num_tasks)
        call(expand, target, tmp_path, [shrunk, tiles, of_pool, out], num_tasks)
        results.append(out.array.copy())
        np.testing.assert_array_equal(of_pool.array, pool)
    without = sorted(set(range(count)) - {row for some in of_slot.values() for row in some})
    np.testing.assert_array_equal(results[0][without], y[without])
    np.testing.assert_allclose(results[0], expected, rtol=1e-4, atol=1e-3)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    # A row has the same bits alone in a tile, in another slot and in a larger pool.
    row = of_slot[0][5]
    moved = np.concatenate([pool, pool[: slot.bytes]])
    alone = Guarded(y)
    shrunk = Guarded(np.full((count, width), np.nan, np.float32))
    for spec, operands in ((shrink, [Guarded(lying), shrunk]), (expand, [shrunk, alone])):
        source, written = operands
        tiles = Guarded(tiles_of({4: [row]}, count))
        call(spec, target, tmp_path, [source, tiles, Guarded(moved), written], 2)
    np.testing.assert_array_equal(alone.array[row], results[0][row])


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("own", "dtype", "heads", "columns", "rows", "rank"),
    [
        ("a", "bf16", 5, 12, 40, 3),
        ("b", "bf16", 3, 18, 21, 19),
        ("a", "f32", 2, 34, 130, 40),
        rare("b", "f32", 3, 18, 21, 19),
        rare("a", "f16", 3, 18, 21, 19),
        rare("b", "f16", 2, 34, 130, 40),
        rare("a", "bf16", 20, 40, 24, 128),
        rare("b", "bf16", 20, 40, 24, 128),
    ],
)
def test_kernels_of_heads(
    name: str, own: str, dtype: str, heads: int, columns: int, rows: int, rank: int, tmp_path: Path
) -> None:
    """Each head has an A of its own, or a B. Heads of x are further apart than their inputs, and what is between them
    is not read."""
    target, rng = resolve_target(name), np.random.default_rng(columns)
    of_a, of_b = (heads if own == which else 1 for which in "ab")
    lying_a, lying_b = (of * padded(n) if of > 1 else n for of, n in ((of_a, columns), (of_b, rows)))
    slot = target.adapter_slot(lying_a, (lying_b,), rank, dtype)
    count, stride, width = 21, columns + 6, shrunk_width(slot, heads)

    def floats(*shape: int) -> Array:
        return np.asarray(rng.standard_normal(shape).astype(np.float32).astype(NUMBERS[dtype]), np.float32)

    x = floats(count, heads, stride)
    x[..., columns:] = np.nan
    y = rng.standard_normal((count, heads * rows)).astype(np.float32)
    expected, slots = y.astype(np.float64).reshape(count, heads, rows), {}
    of_slot = {1: [3], 0: [0, 5, 20, 7, 8, 9, 10, 11, 12, 13], 2: [14, 15, 16]}
    for number, some in of_slot.items():
        r, scale = (rank, 1, max(1, rank - 2))[number], 0.5 + number
        a, b = floats(of_a, r, columns), floats(of_b, rows, r)
        whole_a, whole_b = np.zeros((r, lying_a), np.float32), np.zeros((lying_b, r), np.float32)
        for h in range(of_a):
            whole_a[:, h * padded(columns) :][:, :columns] = a[h]
        for h in range(of_b):
            whole_b[h * padded(rows) :][:rows] = b[h]
        slots[number] = {0: (whole_a, whole_b, scale)}
        for h in range(heads):
            first, last = a[h % of_a].astype(np.float64), b[h % of_b].astype(np.float64)
            expected[some, h] += scale * x[some, h, :columns].astype(np.float64) @ first.T @ last.T
    pool = np.concatenate([slot_bytes(slot, slots[i], dtype) for i in range(3)])
    of_heads = {"heads": heads, "own": own, "act_dtype": dtype}
    shrink = adapter_spec("adapter_shrink", slot, columns, (rows,), stride=stride, **of_heads)
    expand = adapter_spec("adapter_expand", slot, columns, (rows,), **of_heads)
    assert spec_slot(shrink, target) == spec_slot(expand, target) == slot

    def run(tiles: Array, num_tasks: int) -> Array:
        of_tiles, of_pool, out = Guarded(tiles), Guarded(pool), Guarded(y)
        shrunk = Guarded(np.full((count, width), np.nan, np.float32))
        call(shrink, target, tmp_path, [Guarded(x.reshape(count, -1)), of_tiles, of_pool, shrunk], num_tasks)
        call(expand, target, tmp_path, [shrunk, of_tiles, of_pool, out], num_tasks)
        return np.asarray(out.array.copy())

    results = [run(tiles_of(of_slot, count), num_tasks) for num_tasks in (1, 3, 7)]
    without = sorted(set(range(count)) - {row for some in of_slot.values() for row in some})
    np.testing.assert_array_equal(results[0][without], y[without])
    np.testing.assert_allclose(results[0].reshape(expected.shape), expected, rtol=1e-4, atol=1e-3)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    np.testing.assert_array_equal(run(tiles_of({0: [9]}, count), 2)[9], results[0][9])


def lanes_of(dtype: str) -> int:
    return 1 if dtype == "f32" else 2
