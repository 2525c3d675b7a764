"""Decode kernels of an 8B model have as many bytes of the weight in flight as the memory of each GPU needs."""

from __future__ import annotations

import pytest

from bench.gpu.in_flight import GPUS, SCHEMES, kernels, rows

_MOST_REGISTERS, _SHARED_BYTES = 255, 48 << 10  # that a kernel can use
_SOME_BYTES = 28 << 10
"""In flight on a B200 with more than 8 rows, of mxfp4, of bytes in short groups, and beside a normed row: sums of
groups, or rows, leave less, and so do few deep stages."""


def test_groups_of_a_processor() -> None:
    """As NVIDIA's occupancy calculator has them for compute capability 9.0."""
    gpu = GPUS["sm_90a"]
    assert gpu.resident(255, 0, 128) == 2
    assert gpu.resident(168, 0, 128) == 3
    assert gpu.resident(128, 48 << 10, 128) == 4
    assert gpu.resident(32, 1 << 10, 128) == 16


@pytest.mark.parametrize("architecture", list(GPUS))
def test_each_layer_keeps_the_memory_busy(architecture: str) -> None:
    gpu, specs = GPUS[architecture], kernels()
    found = list(rows(gpu, dict.fromkeys(specs, (_MOST_REGISTERS, _SHARED_BYTES))))
    normed = {key for key, spec in specs.items() if spec.op.startswith("normed_")}
    assert len(normed) == 27
    # Spans of bytes leave no room beside a row where a warp has two parts.
    assert {scheme for scheme, name in normed if name.startswith("qkv")} == set(SCHEMES) - {"mxfp4"}
    assert {scheme for scheme, name in normed if name.startswith("gate")} == set(SCHEMES) - {"Q5_K", "Q6_K"}
    assert len(found) == 2 * len(specs) - len(normed)
    for row in found:
        less = architecture == "sm_100" and (row.most != 8 or row.scheme in ("mxfp4", "Q5_K", "Q6_K"))
        assert row.in_flight >= (_SOME_BYTES if less else gpu.needed_bytes), row
        # All groups run at once, or there are many turns; widths are chosen for GPUs of this size.
        if architecture == "sm_90a":
            assert row.last_wave == 1.0 or row.groups > 5 * row.resident * gpu.processors, row
