"""The steps by which every code generator makes loops over flat memory of TIR; each has others before and behind."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx

Step = Callable[[tvm.IRModule], tvm.IRModule]


def flattened() -> tuple[Step, ...]:
    """Buffers become flat, indices 32 bits wide, vector loops vectors, and what is unrolled straight lines."""
    return (
        tirx.transform.FlattenBuffer(),
        tirx.transform.NarrowDataType(32),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.StorageRewrite(),
        tirx.transform.UnrollLoop(),
        tirx.transform.StmtSimplify(),
        tirx.transform.RemoveNoOp(),
    )
