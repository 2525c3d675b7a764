"""The kernels of layers with a state against numpy in float64, and the bits of a sequence in every division into
steps."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.cpu.target import Target

from support.kernel_harness import run, targets_here
from support.marks import on_levels, rare
from support.state_layers import Array, Call, delta_rule_case, selective_state_case, short_conv_case

pytestmark = pytest.mark.native

on_cpus = on_levels(targets_here("x86-64-v4", "x86-64-v3"))


def _call(spec: KernelSpec, target: Target, pool: str) -> Call:
    def call(arrays: dict[str, Array], scalars: Mapping[int, int], tasks: int) -> dict[str, Array]:
        return run(spec, target, arrays, written=(pool, "out"), scalars=scalars, num_tasks=tasks)

    return call


@on_cpus
@pytest.mark.parametrize(
    ("channels", "stride", "taps", "bias", "activation"),
    [
        (300, 310, 4, False, "silu"),
        (8, 8, 3, False, "silu"),
        (512, 530, 2, False, "silu"),
        (273, 280, 6, False, "silu"),
        (300, 310, 4, True, "silu"),
        (273, 273, 3, False, "none"),
        (40, 50, 3, True, "none"),
        rare(16, 17, 1, False, "silu"),
        rare(16, 17, 1, True, "none"),
    ],
)
def test_short_conv(target: Target, channels: int, stride: int, taps: int, bias: bool, activation: str) -> None:
    case = short_conv_case(channels, stride, taps, bias, activation)
    case.check(_call(case.spec, target, "v_pool"), 3e-6)


@on_cpus
@pytest.mark.parametrize(
    ("heads", "key_heads", "key_dim", "value_dim", "tiled"),
    [
        (4, 2, 8, 8, True),
        (2, 1, 24, 40, False),
        (3, 3, 13, 37, False),
        (6, 2, 128, 128, False),
        (2, 2, 3, 16, False),
        rare(2, 1, 40, 65, False),
    ],
)
def test_delta_rule(target: Target, heads: int, key_heads: int, key_dim: int, value_dim: int, tiled: bool) -> None:
    case = delta_rule_case(heads, key_heads, key_dim, value_dim, tiled)
    case.check(_call(case.spec, target, "k_pool"), 3e-6)


@on_cpus
@pytest.mark.parametrize(
    ("heads", "head_dim", "groups", "state_size"),
    [(4, 16, 2, 16), (6, 24, 2, 40), (3, 37, 1, 13), (4, 64, 4, 128), (2, 3, 2, 3), rare(4, 65, 1, 256)],
)
def test_selective_state(target: Target, heads: int, head_dim: int, groups: int, state_size: int) -> None:
    case = selective_state_case(heads, head_dim, groups, state_size)
    case.check(_call(case.spec, target, "k_pool"), 1e-5)
