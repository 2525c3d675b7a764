"""Relax passes that turn the symbolic module into one bucket's straight line of calls."""

from __future__ import annotations

import tvm
from tvm import relax

from llmc.graphs_format import INPUTS


def row_symbol(module: tvm.IRModule, name: str) -> str:
    """The name of the symbol that counts the rows of graph input `name`."""
    return str(module["main"].params[INPUTS.index(name)].ty.shape[0].name)


def bind_bucket(module: tvm.IRModule, tokens: int, samples: int) -> tvm.IRModule:
    """Binds the counts of token and sample rows, plans memory, and leaves a straight line of storages and calls."""
    symbols = {row_symbol(module, "input_ids"): tokens, row_symbol(module, "sample_index"): samples}
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
