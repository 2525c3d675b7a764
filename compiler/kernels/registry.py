"""Kernel templates by exact op name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import ModuleType

from tvm import tirx

from llmc.compiler.kernels import (
    activation,
    attention,
    builder,
    embedding,
    gather,
    linear,
    norm,
    pipeline,
    rope,
    vector_ir,
)
from llmc.compiler.kernels import spec as spec_module
from llmc.compiler.kernels.builder import KernelSpecError
from llmc.compiler.kernels.spec import KernelSpec
from llmc.compiler.targets.cpu import Target

TEMPLATES: dict[str, ModuleType] = {
    "embedding": embedding,
    "rms_norm": norm,
    "linear": linear,
    "rope_kv_write": rope,
    "paged_attention": attention,
    "silu_mul": activation,
    "gather_rows": gather,
}
_SHARED = (builder, pipeline, vector_ir, spec_module)


def _template(op: str) -> ModuleType:
    if op not in TEMPLATES:
        raise KernelSpecError(f"no kernel template for op {op!r}; known ops: {', '.join(sorted(TEMPLATES))}")
    return TEMPLATES[op]


def build_kernel(spec: KernelSpec, target: Target) -> tirx.PrimFunc:
    """The TIR of a kernel; its global symbol is spec.symbol(). Raises KernelSpecError."""
    template = _template(spec.op)
    try:
        func: tirx.PrimFunc = template.build(spec, target)
    except KeyError as error:
        raise KernelSpecError(f"op {spec.op!r} needs the parameter {error}; given: {spec.as_dict()}") from error
    return func


def kernel_buffers(spec: KernelSpec) -> tuple[str, ...]:
    """Names of the buffers in operand order; the output comes last, or is named so by the template."""
    names: tuple[str, ...] = _template(spec.op).buffers(spec)
    return names


def source_digest(op: str) -> str:
    """sha256 of the sources that decide a kernel's code: the template and what all templates share."""
    digest = hashlib.sha256()
    for module in (_template(op), *_SHARED):
        data = Path(str(module.__file__)).read_bytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
