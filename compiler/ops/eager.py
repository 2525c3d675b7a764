"""Registers with torch the ops that bring a torch implementation; `models/ops.py` registers the others."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from llmc.compiler.dtypes import F32, FLOATS
from llmc.compiler.ops.definition import Call, OpDef
from llmc.compiler.ops.registry import OPS


def define_ops() -> None:
    """Defines `torch.ops.llmc.NAME` for each op; call it before a model is traced or run. Known ops are skipped."""
    for op in OPS.values():
        if op.eager is not None and not hasattr(torch.ops.llmc, op.name):
            _define(op)


def _define(op: OpDef) -> None:
    assert op.eager is not None
    made = torch.library.custom_op(f"llmc::{op.name}", op.eager.function, mutates_args=(), schema=op.eager.schema)
    signature = inspect.signature(op.eager.function)

    # The shape rule is the graph's own, so that it is stated once.
    def fake(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        tensors = {name: value for name, value in bound.arguments.items() if isinstance(value, torch.Tensor)}
        values = {name: value for name, value in bound.arguments.items() if name not in tensors}
        act = FLOATS[values.get("act_dtype", F32.name)]
        shape, dtype = op.result(Call({name: value.shape for name, value in tensors.items()}, values, act, eager=True))
        return next(iter(tensors.values())).new_empty(tuple(shape), dtype=getattr(torch, dtype))

    made.register_fake(fake)
