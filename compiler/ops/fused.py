"""Kernels of generic ops: fused functions of rows (`passes/fuse.py`)."""

from __future__ import annotations

import json

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.definition import NUM_SAMPLES, NUM_TOKENS, GraphParams


def fused_spec(name: str, program: str, layouts: tuple[str, ...], graph: GraphParams) -> KernelSpec:
    """The kernel of a row program (`rowwise.py`, JSON).

    name: its ops, for display. layouts: per tensor, "packed", "weight" or another operand kind.
    """
    value = json.loads(program)
    on_samples = value.pop("rows") == "samples"
    for tensor, layout in zip([*value["inputs"], *value["outputs"]], layouts, strict=True):
        tensor["packed"] = layout == "packed"
        if layout == "weight":
            tensor["dtype"] = "f32"  # as weights that no linear or embedding reads are stored
    return KernelSpec.of(
        "other",
        "fused",
        name=name,
        program=json.dumps(value, separators=(",", ":"), sort_keys=True),
        rows=NUM_SAMPLES if on_samples else NUM_TOKENS,
        **graph.row_params(on_samples=on_samples),
    )
