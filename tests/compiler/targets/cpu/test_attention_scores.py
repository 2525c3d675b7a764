"""What some models do to scores: each by the same promises as plain attention, whole and in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.compiler.targets.cpu.target import Target

from support.kernel_harness import targets_here
from support.marks import on_levels, rare
from support.paged_attention import check_attention, check_bad_token, check_split_context, tolerance_of

pytestmark = pytest.mark.native

CPUS = targets_here("cooperlake", "x86-64-v4", "x86-64-v3")
on_cpus = on_levels(CPUS)

Case = tuple[int, int, int, str, str, int, int, dict[str, Any]]
CAP = {"score_cap": 3.0}
SINKS = {"sinks": True}
RARE = pytest.mark.exhaustive
CASES = (
    (4, 2, 16, "f32", "f32", 32, 0, {"chunk": 5, **CAP, **SINKS}),
    (5, 1, 16, "bf16", "int8", 16, 0, {"bias": "rounded"}),
    pytest.param((7, 1, 20, "f32", "f32", 16, 0, CAP), marks=RARE),
    pytest.param((6, 2, 24, "bf16", "bf16", 32, 40, {"bias": "distance", **CAP}), marks=RARE),
    pytest.param((4, 2, 16, "f32", "int8", 32, 0, CAP), marks=RARE),
    pytest.param((4, 2, 16, "f32", "fp8_e4m3", 16, 40, {"bias": "rounded"}), marks=RARE),
    pytest.param((6, 2, 24, "f32", "fp8_e5m2", 32, 0, {"chunk": 6, **CAP}), marks=RARE),
    pytest.param((5, 1, 16, "bf16", "f16", 16, 0, {"bias": "distance", **CAP}), marks=RARE),
    pytest.param((4, 1, 16, "f32", "int8", 16, 300, {"chunk": 510, **SINKS}), marks=RARE),
    pytest.param((12, 12, 20, "f32", "bf16", 48, 0, {"chunk": 3, "bias": "distance", **SINKS}), marks=RARE),
)
SPLIT = (
    (4, 2, 16, "f32", "f32", 16, 0, {"chunk": 2050, "bias": "distance", **CAP, **SINKS}),
    pytest.param((4, 2, 16, "f32", "bf16", 32, 1100, {"bias": "distance", **CAP}), marks=RARE),
    pytest.param((2, 1, 32, "bf16", "int8", 16, 0, {"chunk": 1030, "bias": "rounded", **SINKS}), marks=RARE),
    pytest.param((2, 1, 32, "f32", "fp8_e4m3", 16, 0, {"chunk": 2049, **CAP, **SINKS}), marks=RARE),
)


@on_cpus
@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_any_company(target: Target, case: Case) -> None:
    heads, kv_heads, dim, act, kv, block, window, more = case
    tolerance = tolerance_of(target, act, kv)
    check_attention(target, heads, kv_heads, dim, act, kv, block, window, tolerance, **more)


@pytest.mark.parametrize("target", [rare(cpu) if cpu in CPUS[1:] else cpu for cpu in CPUS], ids=lambda t: t.name)
@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_split_context(target: Target, case: Case) -> None:
    heads, kv_heads, dim, act, kv, block, window, more = case
    check_split_context(target, heads, kv_heads, dim, act, kv, block, window, **more)


@RARE
@on_cpus
@pytest.mark.parametrize(
    ("kv", "window", "bad", "more"),
    [
        ("f32", 0, np.nan, {"chunk": 6, **CAP, **SINKS}),
        ("bf16", 9, np.inf, CAP),
        ("int8", 9, np.nan, {"bias": "distance", **CAP}),
        ("fp8_e4m3", 0, -np.inf, {"chunk": 4, "bias": "rounded", **SINKS}),
    ],
)
def test_a_token_that_is_not_finite(target: Target, kv: str, window: int, bad: float, more: dict[str, Any]) -> None:
    check_bad_token(target, 6, 2, 24, kv, window, bad, **more)
