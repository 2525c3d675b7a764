"""Which file holds which kernel template, and the digest of what decides a kernel's code. Imports no tvm."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from llmc.compiler import kernel_spec
from llmc.compiler.kernel_spec import KernelSpecError
from llmc.compiler.ops.registry import brought_sources

KIND = "cpu"
TEMPLATE_FILES: dict[str, str] = {
    "embedding": "embedding",
    "embedding_quant": "embedding_quant",
    "rms_norm": "norm",
    "linear": "linear",
    "linear_quant": "linear_quant",
    "quantize_rows": "quantize_rows",
    "rope_kv_write": "rope",
    "paged_attention": "attention",
    "merge_attention": "attention_merge",
    "gather_rows": "gather",
    "fused": "fused",
}
"""Module of this package by exact op name."""
_EXTRA = {
    "fused": ("vector_math",),
    "linear": ("schedule", "chunks", "widening", "linear_amx", "linear_layer", "sums", "tile_registers", "tile_ir"),
    "linear_quant": (
        "schedule",
        "chunks",
        "quant_layer",
        "quant_place",
        "quant_tile",
        "quant_weight",
        "quant_steps",
        "quant_streams",
        "quant_widened",
        "widening",
        "quant_amx",
        "sums",
        "quant_ir",
        "tile_registers",
        "tile_ir",
    ),
    "paged_attention": ("attention_split", "attention_fetch", "attention_state"),
    "merge_attention": ("attention_split", "attention_state"),
    "quantize_rows": ("quant_ir",),
    "rms_norm": ("quantize_rows", "quant_ir"),
}
"""Further modules that a template is made of."""
_SHARED = ("builder", "pipeline", "vector_ir", "ir_text")


def template_file(op: str) -> str:
    """The module that holds the template of `op`. Raises KernelSpecError."""
    if op not in TEMPLATE_FILES:
        raise KernelSpecError(f"no kernel template for op {op!r}; known ops: {', '.join(sorted(TEMPLATE_FILES))}")
    return TEMPLATE_FILES[op]


def template_modules(op: str) -> tuple[str, ...]:
    """The modules of this package that decide a kernel's code: the template and what it is made of."""
    return (template_file(op), *_EXTRA.get(op, ()), *_SHARED)


@cache
def source_digest(op: str, folder: Path = Path(__file__).parent) -> str:
    """sha256 of the sources that decide a kernel's code: the template and what all templates share."""
    brought = () if op in TEMPLATE_FILES else brought_sources(op, KIND)
    modules = _SHARED if brought else template_modules(op)
    digest = hashlib.sha256()
    for file in (Path(kernel_spec.__file__), *(folder / f"{name}.py" for name in modules), *brought):
        data = file.read_bytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
