"""The steps by which every code generator makes straight lines of TIR; each has others before and behind."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx

Step = Callable[[tvm.IRModule], tvm.IRModule]


def straight() -> tuple[Step, ...]:
    """Vector loops become vectors, and what is unrolled straight lines with simple indices."""
    return (
        tirx.transform.VectorizeLoop(True),
        tirx.transform.StorageRewrite(),
        tirx.transform.UnrollLoop(),
        tirx.transform.StmtSimplify(),
    )
