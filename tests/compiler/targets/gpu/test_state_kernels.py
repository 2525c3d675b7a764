"""Kernels of layers with a state on GPUs: against numpy in float64, with the same bits in every division into steps,
for any number of items that run in step, and on OpenCL."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.compiler.targets.gpu.launch import launch_of
from llmc.compiler.targets.gpu.opencl import PRELUDE, OpenClTarget
from llmc.compiler.targets.gpu.state_tiles import ITEMS, StateTile
from llmc.runtime.binding import Device

from support.cuda import host_library, pointers
from support.kernel_harness import Guarded
from support.opencl import needs_opencl
from support.opencl_kernels import Program
from support.paged_attention import same_bits
from support.state_layers import (
    LENGTHS,
    TOGETHER,
    Array,
    Call,
    Case,
    delta_rule_case,
    selective_state_case,
    short_conv_case,
)

_DELTA = {
    "one piece": (4, 2, 8, 8, True),
    "few pieces": (2, 1, 24, 40, False),
    "an odd size and odd lines": (3, 3, 13, 37, False),
    "three pieces an item": (2, 2, 96, 24, False),
    "as models have it": (4, 2, 128, 128, False),
    "more items": (2, 1, 256, 20, True),
    "32 items": (1, 1, 320, 10, False),
}
"""heads, key_heads, key_dim, value_dim, tiled."""
_SELECTIVE = {
    "one piece": (4, 16, 2, 16),
    "few pieces": (6, 24, 2, 40),
    "an odd size and odd lines": (3, 37, 1, 13),
    "two pieces an item": (2, 64, 1, 64),
    "as models have it": (4, 64, 2, 128),
    "more items": (2, 18, 1, 256),
    "32 items": (2, 5, 1, 320),
}
"""heads, head_dim, groups, state_size."""
_CONVOLUTIONS = {
    "as gated delta nets have it": (40, 50, 4, False, "silu"),
    "as models have it": (75, 75, 3, True, "none"),
}
"""channels, stride, taps, bias, activation."""
_CASES: dict[str, tuple[Callable[..., Case], tuple[Any, ...]]] = {
    **{f"delta rule, {name}": (delta_rule_case, sizes) for name, sizes in _DELTA.items()},
    **{f"selective state, {name}": (selective_state_case, sizes) for name, sizes in _SELECTIVE.items()},
    **{f"short convolution, {name}": (short_conv_case, sizes) for name, sizes in _CONVOLUTIONS.items()},
}
_LANES = (32, 16, 4, 1)
_TOLERANCE = {"delta_rule": 3e-6, "selective_state": 1e-5, "short_conv": 3e-6}


def _case(name: str) -> Case:
    build, sizes = _CASES[name]
    return build(*sizes)


def _text(spec: KernelSpec, lanes: int) -> str:
    """As if so many items ran in step; the name says how many."""
    text = cuda_text(spec).replace("llmc_lanes()", str(lanes))
    return text.replace(f" {spec.symbol()}(", f" {spec.symbol()}_{lanes}(", 1)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    texts = [_text(_case(name).spec, lanes) for name in _CASES for lanes in _LANES]
    return ctypes.CDLL(str(host_library(texts, tmp_path_factory.mktemp("states"))))


def _names(spec: KernelSpec) -> list[str]:
    return [name for _, name, _ in pointers(cuda_text(spec))[:-1]]


def _scalars(given: Mapping[int, int]) -> Array:
    return np.array([given.get(i, 0) for i in range(8)], np.int32)


def _on_host(library: ctypes.CDLL, spec: KernelSpec, lanes: int = 32) -> Call:
    names = _names(spec)
    pool = next(name for name in names if name.endswith("_pool"))

    def call(arrays: dict[str, Array], given: Mapping[int, int], groups: int) -> dict[str, Array]:
        guarded = {name: Guarded(np.ascontiguousarray(arrays[name])) for name in names}
        scalars = _scalars(given)
        arguments: list[Any] = [ctypes.c_void_p(one.address) for one in guarded.values()]
        arguments += [ctypes.c_int32(0) for _ in names] + [ctypes.c_void_p(scalars.ctypes.data)]
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        library[f"run_{spec.symbol()}_{lanes}"](addresses, groups, launch_of(spec).items)
        for name, one in guarded.items():
            one.check(name)
            if name not in (pool, "out"):
                assert same_bits(one.array, np.ascontiguousarray(arrays[name]))
        return {name: guarded[name].array.copy() for name in (pool, "out")}

    return call


@pytest.mark.parametrize("name", list(_CASES))
def test_sequences_have_the_same_bits_in_all_steps(name: str, library: ctypes.CDLL) -> None:
    case = _case(name)
    out, pool = case.check(_on_host(library, case.spec), _TOLERANCE[case.spec.op])
    for lanes in _LANES[1:]:
        again, left = case.layer.pass_steps(_on_host(library, case.spec, lanes), [TOGETHER], 2, case.given)
        assert same_bits(again, out), lanes
        assert same_bits(left, pool), lanes


@pytest.mark.parametrize("name", [name for name in _CASES if "convolution" not in name])
def test_what_is_no_number_stays_in_its_sequence(name: str, library: ctypes.CDLL) -> None:
    """One group computes all sequences in turn. The first one begins with NaN."""
    case = _case(name)
    call = _on_host(library, case.spec)
    expected, _ = case.layer.pass_steps(call, [TOGETHER], 1, case.given)
    case.layer.rows[next(iter(case.layer.rows))][0][0] = np.nan
    found, _ = case.layer.pass_steps(call, [TOGETHER], 1, case.given)
    assert np.isnan(found[: LENGTHS[0]]).all()
    assert same_bits(found[LENGTHS[0] :], expected[LENGTHS[0] :])


@needs_opencl
@pytest.mark.parametrize(
    "name",
    [
        name if name.endswith(("as models have it", "odd lines")) else pytest.param(name, marks=pytest.mark.slow)
        for name in _CASES
    ],
)
def test_opencl_has_these_bits(name: str, library: ctypes.CDLL) -> None:
    case = _case(name)
    with Device("opencl") as device:
        lanes = int(device.facts.get("lanes", "1"))
    spec, program = case.spec, Program(PRELUDE + OpenClTarget().text(case.spec), lanes)

    def call(arrays: dict[str, Array], given: Mapping[int, int], groups: int) -> dict[str, Array]:
        operands = {name: np.array(arrays[name], order="C") for name in _names(spec)}
        program.run(spec.symbol(), list(operands.values()), _scalars(given), groups, launch_of(spec).items)
        return {name: operands[name] for name in (case.layer.pool, "out")}

    out, pool = case.check(call, _TOLERANCE[spec.op])
    on_host, left = case.layer.pass_steps(_on_host(library, spec), [TOGETHER], 2, case.given)
    assert same_bits(out, on_host)
    assert same_bits(pool, left)


@pytest.mark.parametrize("size", [1, 4, 8, 13, 16, 24, 64, 96, 128, 129, 256, 320, 512, 1000])
@pytest.mark.parametrize("lines", [1, 16, 37, 128])
def test_tiles_have_every_element_once(size: int, lines: int) -> None:
    tile = StateTile(size, lines)
    assert tile.sharing in (8, 16, 32)
    assert tile.sharing * tile.teams == ITEMS
    assert size <= tile.padded < size + 4 * tile.sharing
    assert tile.tiles * tile.tile_lines - tile.tile_lines < lines <= tile.tiles * tile.tile_lines


def test_one_sequence_has_work_for_a_gpu() -> None:
    """A group has 16 columns or rows of a state with 128 elements."""
    delta = KernelSpec.of("attention", "delta_rule", heads=32, key_heads=16, key_dim=128, value_dim=128, tiled=False)
    selective = KernelSpec.of("attention", "selective_state", heads=64, head_dim=64, groups=8, state_size=128)
    assert launch_of(delta).groups == launch_of(selective).groups == 256
    assert launch_of(delta).items == 64
