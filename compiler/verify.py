"""The IR spec, checked between phases. An error names the node, the op, the argument, what it is and what it should be.

After lowering every call is an llmc op with a kernel template or a legalised function of rows; after binding every
tensor of an llmc op has the dtype of its graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relax

from llmc.compiler import dtypes
from llmc.compiler.config import CompileError
from llmc.compiler.graph import Site
from llmc.compiler.lowered import SITE_PREFIX, Lowered
from llmc.compiler.passes.fuse import PROGRAM

PACKED_INPUTS: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("linear", "linear_quant", "gated_linear", "gated_linear_quant", "quantize_rows"), ("x",)
)
"""The arguments of an llmc op that are packed activations."""
PACKED_OUTPUTS = frozenset({"rms_norm", "paged_attention", "gated_linear", "gated_linear_quant"})
"""The llmc ops whose result is a packed activation."""

F32, I32, ANY_FLOAT = (dtypes.F32.long_name,), (dtypes.I32.long_name,), tuple(dtypes.FLOATS_BY_LONG_NAME)
SPEC: dict[str, dict[str, tuple[int, tuple[str, ...]]]] = {
    "embedding": {"ids": (1, I32), "weight": (2, ANY_FLOAT)},
    "rms_norm": {"x": (2, F32), "weight": (1, F32)},
    "linear": {"x": (2, ANY_FLOAT), "weight": (2, ANY_FLOAT), "bias": (1, F32), "residual": (2, F32)},
    "gated_linear": {"x": (2, ANY_FLOAT), "weight": (2, ANY_FLOAT), "bias": (1, F32)},
    "rope_kv_write": {
        "qkv": (2, F32),
        "q_norm": (1, F32),
        "k_norm": (1, F32),
        "cos_sin": (2, F32),
        "positions": (1, I32),
        "slot_mapping": (1, I32),
    },
    "paged_attention": {
        "q": (2, F32),
        "block_tables": (2, I32),
        "context_lens": (1, I32),
        "query_start": (1, I32),
        "token_seq": (1, I32),
        "positions": (1, I32),
    },
    "gather_rows": {"x": (2, F32), "index": (1, I32)},
}
"""Rank and dtypes of every tensor of every llmc op."""


def verify_site(op: str, node: str, tensors: Mapping[str, Any]) -> None:
    """Checks the tensors of an llmc op while it is lowered. tensors: Relax variables by argument name."""
    if op not in SPEC:
        return  # it has no template, which is said elsewhere
    for name, tensor in tensors.items():
        rank, allowed = SPEC[op][name]
        found, shape = str(tensor.ty.dtype), tensor.ty.shape
        if found not in allowed or len(shape) != rank:
            raise CompileError(
                f"node {node}: argument {name} of llmc::{op} is {found} {list(map(str, shape))}; "
                f"it must be {' or '.join(allowed)} of rank {rank}"
            )


def verify_operand(site: Site, name: str, dtype: str, act_dtype: str) -> None:
    """Checks that a packed activation of an llmc op has the graph's activation dtype, or is words of int8."""
    packed = name in PACKED_INPUTS.get(site.op, ()) or (name == "out" and site.op in PACKED_OUTPUTS)
    int8 = (name == "x" and site.attributes.get("int8")) or (name == "out" and "int8_group_size" in site.attributes)
    wanted = dtypes.FLOATS[act_dtype].long_name
    if packed and dtype != (dtypes.I32.long_name if int8 else wanted):
        raise CompileError(
            f"tensor {name} of llmc::{site.op} is {dtype} in a graph of {act_dtype} activations; "
            f"convert it with .to(torch.{wanted}) in the model"
        )


def verify_lowered(lowered: Lowered) -> None:
    """Checks that nothing is left in the module but llmc ops at known sites and functions of rows."""
    main = lowered.module["main"]
    for block in main.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, (relax.Var, relax.TupleGetItem)):
                continue
            name = binding.var.name
            if not isinstance(value, relax.Call):
                raise CompileError(f"{name} is a {type(value).__name__}, which is no op")
            callee = value.args[0]
            if value.op == tvm.ir.Op.get("relax.call_tir"):
                if PROGRAM not in (lowered.module[callee].attrs or {}):
                    raise CompileError(f"{name} calls {callee.name_hint}, which is no function of rows")
                continue
            if value.op != tvm.ir.Op.get("relax.call_dps_packed"):
                raise CompileError(f"{name} is a call of {value.op}, which was not legalised")
            number = str(callee.global_symbol).removeprefix(SITE_PREFIX)
            if not number.isdigit() or int(number) >= len(lowered.sites):
                raise CompileError(f"{name} calls {callee.global_symbol}, which is no site of this model")
