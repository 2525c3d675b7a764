"""Relax passes that turn the symbolic module into one bucket's straight line of calls."""

from __future__ import annotations

import tvm
from tvm import relax


def bind_bucket(module: tvm.IRModule, tokens: int, samples: int) -> tvm.IRModule:
    """Binds the numbers of token and sample rows, plans memory, and leaves a straight line of storages and calls."""
    params = module["main"].params
    symbols = {
        str(params[0].ty.shape[0].name): tokens,
        str(params[6].ty.shape[0].name): samples,
    }
    t = relax.transform
    passes = [
        t.BindSymbolicVars(symbols),
        t.DeadCodeElimination(),
        t.ToNonDataflow(),
        t.RemovePurityChecking(),
        t.CallTIRRewrite(),
        t.StaticPlanBlockMemory(),
    ]
    return tvm.ir.transform.Sequential(passes)(module)
