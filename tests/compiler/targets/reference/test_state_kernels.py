"""The plain kernels of layers with a state and torch's ops, against numpy in float64 and with the same bits in every
division into steps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llmc.compiler.graph.commands import Site
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.delta import SHORT_CONV
from llmc.compiler.targets.elf.codegen import compile_object
from llmc.compiler.targets.reference.backend import named
from llmc.compiler.targets.reference.kernels.delta import delta_rule, short_conv
from llmc.compiler.targets.reference.kernels.mamba import selective_state
from llmc.models import delta_ops, mamba_ops
from llmc.models.reference import ReferenceCache, use_cache

from support.kernel_harness import Guarded
from support.paged_attention import same_bits
from support.state_layers import CHUNKS, Array, Call, Case, delta_rule_case, selective_state_case, short_conv_case

REFERENCE = named("reference")
KERNELS = {"short_conv": short_conv, "delta_rule": delta_rule, "selective_state": selective_state}
INPUTS = {
    "short_conv": ("x", "weight"),
    "delta_rule": ("qkv", "gates"),
    "selective_state": ("xbc", "steps", "skip"),
}
OF_SEQUENCES = ("state_slots", "query_start", "positions")
CASES: dict[str, tuple[Callable[..., Case], tuple[Any, ...]]] = {
    "short convolution": (short_conv_case, (13, 17, 3, False, "silu")),
    "short convolution, bias": (short_conv_case, (13, 17, 4, True, "silu")),
    "short convolution, no activation": (short_conv_case, (13, 13, 3, False, "none")),
    "short convolution, bias, no activation": (short_conv_case, (13, 17, 2, True, "none")),
    "short convolution of one tap": (short_conv_case, (13, 17, 1, False, "silu")),
    "delta rule": (delta_rule_case, (4, 2, 7, 5, False)),
    "delta rule, tiled": (delta_rule_case, (4, 2, 7, 5, True)),
    "selective state": (selective_state_case, (6, 5, 2, 7)),
}
every_case = pytest.mark.parametrize("name", CASES)


def case_of(name: str) -> Case:
    build, sizes = CASES[name]
    return build(*sizes)


@every_case
@pytest.mark.skipif(not REFERENCE.runs_here(), reason="the reference target's code is of another machine")
def test_the_plain_kernel(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    spec, pool = case.spec, case.layer.pool
    code = compile_object(KERNELS[spec.op](spec), "x86_64-unknown-linux-gnu", "x86-64")
    REFERENCE.link([code], tmp_path / "f.so")
    kernel = ctypes.CDLL(str(tmp_path / "f.so"))[spec.symbol()]
    bias = ("bias",) if "bias" in case.given else ()
    names = (*INPUTS[spec.op], *bias, *OF_SEQUENCES, pool, "out")

    def call(arrays: dict[str, Array], given: Mapping[int, int], tasks: int) -> dict[str, Array]:
        guarded = {name: Guarded(np.ascontiguousarray(arrays[name])) for name in names}
        scalars = np.array([given.get(i, 0) for i in range(8)], np.int64)
        for task in range(tasks):
            addresses = (ctypes.c_void_p(one.address) for one in guarded.values())
            kernel(*addresses, ctypes.c_void_p(scalars.ctypes.data), task, tasks)
        for name, one in guarded.items():
            one.check(name)
            if name not in (pool, "out"):
                assert same_bits(one.array, np.ascontiguousarray(arrays[name]))
        return {name: guarded[name].array.copy() for name in (pool, "out")}

    case.check(call, 1e-5)


def eager(case: Case) -> Call:
    """torch's op. Its cache has what the pool has."""
    p, layer = case.spec.as_dict(), case.layer
    kind, shape = "heads", tuple[int, ...]()
    match case.spec.op:
        case "short_conv":
            kind, shape = "window", (int(p["taps"]) - 1, int(p["channels"]))
        case "delta_rule":
            shape = (int(p["heads"]), int(p["key_dim"]), int(p["value_dim"]))
        case "selective_state":
            shape = (int(p["heads"]), int(p["head_dim"]), int(p["state_size"]))

    def op(arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        given: list[Any] = [arrays[name] for name in (*INPUTS[case.spec.op], *OF_SEQUENCES)]
        match case.spec.op:
            case "short_conv":
                activation = str(p.get("activation", "silu"))
                given += [0, int(p["taps"]), arrays.get("bias"), activation]
                return delta_ops.short_conv(*given)
            case "delta_rule":
                given += [0, int(p["key_heads"]), int(p["key_dim"]), bool(p["tiled"])]
                return delta_ops.delta_rule(*given)
        given += [0, int(p["groups"]), int(p["state_size"])]
        return mamba_ops.selective_state(*given)

    def call(arrays: dict[str, Array], given: Mapping[int, int], tasks: int) -> dict[str, Array]:
        rows, pool, out = given[0], arrays[layer.pool].copy(), arrays["out"].copy()
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(array[:rows] if name in layer.rows else array))
            for name, array in arrays.items()
        }
        cache = ReferenceCache([(1, 1)], 1, 1)
        cache.states = {(kind, 0, slot): torch.from_numpy(state.reshape(shape)) for slot, state in enumerate(pool)}
        with use_cache(cache):
            out[:rows] = op(tensors).numpy()
        pool = np.stack([cache.states[kind, 0, slot].reshape(-1).numpy() for slot in range(len(pool))])
        return {layer.pool: pool, "out": out}

    return call


@every_case
def test_the_op(name: str) -> None:
    case = case_of(name)
    if case.spec.op == "short_conv" and "activation" not in case.spec.as_dict():
        # torch's exponential has other bits in tensors of other sizes.
        out, _ = case.layer.pass_steps(eager(case), CHUNKS, 1, case.given)
        np.testing.assert_allclose(out, np.concatenate(case.outputs), rtol=1e-5, atol=1e-5)
    else:
        case.check(eager(case), 1e-5)


CHANNELS, STRIDE, TAPS = 13, 17, 3


def spec_of(bias: bool, activation: str, alone: bool = False) -> tuple[KernelSpec, tuple[str, ...]]:
    """The kernel of the op, and its buffers."""
    shapes = {"weight": (TAPS * CHANNELS,), **({"bias": (CHANNELS,)} if bias else {})}
    widths = {"x": STRIDE}
    attributes = {"taps": TAPS, "activation": activation, "alone": alone, "weight_shapes": shapes, "widths": widths}
    site = Site("short_conv", attributes, ("x", *shapes))
    graph: Any = SimpleNamespace()
    (call,) = SHORT_CONV.kernels(site, graph)
    return call.spec, call.buffers


def test_what_gated_delta_nets_have_is_not_said() -> None:
    assert not {"bias", "activation"} & spec_of(False, "silu")[0].as_dict().keys()
    spec, buffers = spec_of(True, "none")
    assert spec.as_dict().items() >= {"bias": True, "activation": "none"}.items()
    assert buffers.index("bias") == 2


def test_the_state_lies_in_the_first_pool_where_no_heads_have_any() -> None:
    beside, alone = spec_of(False, "none"), spec_of(False, "none", alone=True)
    assert beside[0] == alone[0]
    assert [set(buffers) & {"<k_pool>", "<v_pool>"} for _, buffers in (beside, alone)] == [{"<v_pool>"}, {"<k_pool>"}]
