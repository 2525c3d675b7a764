"""rank_sum adds the parts of ranks in their order, then bias, then residual, as the host's sum does."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.targets.gpu.cuda import cuda_text
from llmc.graphs_format import ADDS_BIAS, ADDS_RESIDUAL

from support.cuda import host_library

RANKS, ROWS, WIDTH = 3, 5, 70  # more than the items of a group


def test_terms_are_added_in_the_order_of_ranks(tmp_path: Path) -> None:
    every = (0, ADDS_BIAS, ADDS_RESIDUAL, ADDS_BIAS | ADDS_RESIDUAL)
    specs = {a: KernelSpec.of("other", "rank_sum", rows=2, ranks=RANKS, width=WIDTH, adds=a) for a in every}
    library = ctypes.CDLL(str(host_library([cuda_text(spec) for spec in specs.values()], tmp_path)))
    random = np.random.default_rng(1)
    # Their sum depends on the order.
    parts = (
        random.standard_normal((ROWS, RANKS, WIDTH)) * 10.0 ** random.integers(-4, 8, (ROWS, RANKS, WIDTH))
    ).astype("f")
    bias, residual = random.standard_normal(WIDTH).astype("f"), random.standard_normal((ROWS, WIDTH)).astype("f")
    scalars = np.array([0, 0, ROWS - 1, 0, 0, 0, 0, 0], "i4")  # num_samples: one row less than there is room for
    for adds, spec in specs.items():
        wanted = parts[:, 0].copy()
        for rank in range(1, RANKS):
            wanted += parts[:, rank]
        if adds & ADDS_BIAS:
            wanted += bias
        if adds & ADDS_RESIDUAL:
            wanted += residual
        added = ([bias] if adds & ADDS_BIAS else []) + ([residual] if adds & ADDS_RESIDUAL else [])
        for groups in (1, 3):
            out = np.full((ROWS, WIDTH), -1, "f")
            buffers = [parts, *added, out]
            values = [ctypes.c_uint64(b.ctypes.data) for b in buffers]
            offsets = [ctypes.c_int32(0) for _ in buffers]
            given = [*values, *offsets, ctypes.c_uint64(scalars.ctypes.data)]
            pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(one) for one in given))
            getattr(library, f"run_{spec.symbol()}")(pointers, groups, 64)
            np.testing.assert_array_equal(out[:-1], wanted[:-1])
            assert (out[-1] == -1).all()
