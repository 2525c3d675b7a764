"""The ops by exact name. To add an op, add its definition, which may bring its kernels, and a line here."""

from __future__ import annotations

import inspect
from pathlib import Path

from llmc.compiler.config import CompileError
from llmc.compiler.ops.activate import ACTIVATE
from llmc.compiler.ops.attention import PAGED_ATTENTION
from llmc.compiler.ops.axes import ROPE_ROWS, ROW_NUMBERS
from llmc.compiler.ops.choose import CHOOSE_EXPERTS
from llmc.compiler.ops.collective import ALL_GATHER, ALL_REDUCE
from llmc.compiler.ops.definition import OpDef, Template
from llmc.compiler.ops.delta import DELTA_RULE, SHORT_CONV
from llmc.compiler.ops.embedding import EMBEDDING, EMBEDDING_QUANT
from llmc.compiler.ops.experts import EXPERTS
from llmc.compiler.ops.gather import GATHER_ROWS
from llmc.compiler.ops.held import HELD_EXPERTS
from llmc.compiler.ops.latent import HEAD_LINEAR, LATENT_ATTENTION, LATENT_KV_WRITE, PACKED_HEAD_LINEAR
from llmc.compiler.ops.linear import (
    ACTIVATED_LINEAR,
    ACTIVATED_LINEAR_QUANT,
    GATED_LINEAR,
    GATED_LINEAR_QUANT,
    LINEAR,
    LINEAR_QUANT,
    QUANTIZE_ROWS,
)
from llmc.compiler.ops.mamba import SELECTIVE_STATE
from llmc.compiler.ops.norm import RMS_NORM
from llmc.compiler.ops.normed import NORMED
from llmc.compiler.ops.permute import PERMUTE_COLUMNS
from llmc.compiler.ops.placed import PLACED_ROWS
from llmc.compiler.ops.pool import POOL_ROWS
from llmc.compiler.ops.rope import ROPE_KV_WRITE
from llmc.compiler.ops.rotated_attention import ROTATED_ATTENTION
from llmc.compiler.ops.spread import SPREAD_LOGITS
from llmc.compiler.ops.states import BESIDE_STATES, GATHER_ROWS_LEAVING, READ_STATES

OPS: dict[str, OpDef] = {
    op.name: op
    for op in (
        EMBEDDING,
        EMBEDDING_QUANT,
        RMS_NORM,
        LINEAR,
        LINEAR_QUANT,
        GATED_LINEAR,
        GATED_LINEAR_QUANT,
        ACTIVATED_LINEAR,
        ACTIVATED_LINEAR_QUANT,
        ACTIVATE,
        QUANTIZE_ROWS,
        PERMUTE_COLUMNS,
        ROPE_KV_WRITE,
        PAGED_ATTENTION,
        GATHER_ROWS,
        POOL_ROWS,
        GATHER_ROWS_LEAVING,
        BESIDE_STATES,
        READ_STATES,
        PLACED_ROWS,
        ROPE_ROWS,
        ROW_NUMBERS,
        SPREAD_LOGITS,
        CHOOSE_EXPERTS,
        HELD_EXPERTS,
        EXPERTS,
        HEAD_LINEAR,
        PACKED_HEAD_LINEAR,
        LATENT_KV_WRITE,
        LATENT_ATTENTION,
        SHORT_CONV,
        DELTA_RULE,
        SELECTIVE_STATE,
        ALL_REDUCE,
        ALL_GATHER,
    )
}
JOINED: dict[str, OpDef] = {op.name: op for op in (*NORMED.values(), ROTATED_ATTENTION)}
"""Ops that stand for several others, in graphs of targets that compute them as one. Models need none of them."""


def get_op(name: str) -> OpDef:
    """The op called `name`. Raises CompileError for an unknown one."""
    if name in JOINED:
        return JOINED[name]
    if name not in OPS:
        raise CompileError(f"op llmc::{name} has no kernel template; known: {', '.join(sorted(OPS))}")
    return OPS[name]


def brought_template(op: str, kind: str) -> Template | None:
    """The kernel template that an op brings for targets of a kind; None if it brings none."""
    return OPS[op].templates.get(kind) if op in OPS else None


def brought_sources(op: str, kind: str) -> tuple[Path, ...]:
    """The file of such a template, on which its code depends besides the target's shared templates."""
    template = brought_template(op, kind)
    return () if template is None else (Path(inspect.getfile(template)),)
