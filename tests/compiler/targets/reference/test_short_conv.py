"""The plain kernel of a short convolution and torch's op, both against numpy in float64, in steps of any length."""

from __future__ import annotations

import ctypes
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
from llmc.compiler.targets.reference.kernels.delta import short_conv
from llmc.models import delta_ops
from llmc.models.reference import ReferenceCache, use_cache

REFERENCE = named("reference")
pytestmark = pytest.mark.skipif(not REFERENCE.runs_here(), reason="the reference target's code is of another machine")

CHANNELS, STRIDE, TAPS, BLOCK, LENGTH = 13, 17, 3, 4, 11
STEPS = ((0, 6), (6, 7), (7, 11))
TABLE = np.array([[3, 1, 2]], np.int32)
RNG = np.random.default_rng(6)
X = RNG.standard_normal((LENGTH, STRIDE)).astype(np.float32)
WEIGHT = RNG.standard_normal((TAPS, CHANNELS)).astype(np.float32)
BIAS = RNG.standard_normal(CHANNELS).astype(np.float32)
every_form = pytest.mark.parametrize(
    ("bias", "activation"), [(False, "silu"), (True, "silu"), (False, "none"), (True, "none")]
)


def expected(bias: bool, activation: str) -> np.ndarray:
    """float64 [T, C]."""
    inputs = np.concatenate([np.zeros((TAPS - 1, CHANNELS)), X[:, :CHANNELS].astype(np.float64)])
    total = sum((inputs[tap : tap + LENGTH] * WEIGHT[tap] for tap in range(TAPS)), BIAS * float(bias))
    return total / (1 + np.exp(-total)) if activation == "silu" else total


def spec_of(bias: bool, activation: str, alone: bool = False) -> tuple[KernelSpec, tuple[str, ...]]:
    """The kernel of the op, and its buffers."""
    shapes = {"weight": (TAPS * CHANNELS,), **({"bias": (CHANNELS,)} if bias else {})}
    widths = {"x": STRIDE}
    attributes = {"taps": TAPS, "activation": activation, "alone": alone, "weight_shapes": shapes, "widths": widths}
    site = Site("short_conv", attributes, ("x", *shapes))
    graph: Any = SimpleNamespace(block_size=BLOCK)
    (call,) = SHORT_CONV.kernels(site, graph)
    return call.spec, call.buffers


@every_form
def test_the_plain_kernel(bias: bool, activation: str, tmp_path: Path) -> None:
    spec, buffers = spec_of(bias, activation)
    REFERENCE.link([compile_object(short_conv(spec), "x86_64-unknown-linux-gnu", "x86-64")], tmp_path / "f.so")
    kernel = ctypes.CDLL(str(tmp_path / "f.so"))[spec.symbol()]
    pool, found = np.full((4, TAPS - 1, CHANNELS), np.nan, np.float32), []
    for start, end in STEPS:
        out = np.full((end - start, CHANNELS), np.nan, np.float32)
        arrays = {
            "x": X[start:end].copy(),
            "weight": WEIGHT,
            "bias": BIAS,
            "block_tables": TABLE,
            "query_start": np.array([0, end - start], np.int32),
            "token_seq": np.zeros(end - start, np.int32),
            "positions": np.arange(start, end, dtype=np.int32),
            "<v_pool>": pool,
            "out": out,
        }
        scalars = np.array([end - start, 1, 0, TABLE.shape[1], 4, 0, 0, 0], np.int64)
        pointers = [ctypes.c_void_p(arrays[name].ctypes.data) for name in buffers]
        kernel(*pointers, ctypes.c_void_p(scalars.ctypes.data), 0, 1)
        found.append(out)
    np.testing.assert_allclose(np.concatenate(found), expected(bias, activation), rtol=3e-6, atol=3e-6)
    assert (pool[TABLE[0, -1]] == X[LENGTH - TAPS + 1 :, :CHANNELS]).all()


@every_form
def test_the_op(bias: bool, activation: str) -> None:
    cache, found = ReferenceCache([(1, 1)], 4, BLOCK), []
    with use_cache(cache):
        for start, end in STEPS:
            at = torch.arange(start, end, dtype=torch.int32)
            of_sequence = (torch.from_numpy(TABLE), torch.tensor([0, len(at)]), torch.zeros_like(at), at)
            x, weight = torch.from_numpy(X[start:end]), torch.from_numpy(WEIGHT.reshape(-1))
            added = torch.from_numpy(BIAS) if bias else None
            found.append(delta_ops.short_conv(x, weight, *of_sequence, 0, TAPS, added, activation))
    np.testing.assert_allclose(torch.cat(found).numpy(), expected(bias, activation), rtol=3e-6, atol=3e-6)


def test_what_gated_delta_nets_have_is_not_said() -> None:
    assert not {"bias", "activation"} & spec_of(False, "silu")[0].as_dict().keys()
    spec, buffers = spec_of(True, "none")
    assert spec.as_dict().items() >= {"bias": True, "activation": "none"}.items()
    assert buffers.index("bias") == 2


def test_the_state_lies_in_the_first_pool_where_no_heads_have_any() -> None:
    beside, alone = spec_of(False, "none"), spec_of(False, "none", alone=True)
    assert beside[0] == alone[0]
    assert [set(buffers) & {"<k_pool>", "<v_pool>"} for _, buffers in (beside, alone)] == [{"<v_pool>"}, {"<k_pool>"}]
