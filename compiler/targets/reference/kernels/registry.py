"""The plain kernels by exact op name."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from llmc.compiler.kernel_spec import KernelSpec, KernelSpecError
from llmc.compiler.ops.registry import brought_template
from llmc.compiler.targets.reference.kernels.adapters import (
    adapter_expand,
    adapter_pairs,
    adapter_pick,
    adapter_samples,
    adapter_shrink,
)
from llmc.compiler.targets.reference.kernels.attention import paged_attention, rope_kv_write
from llmc.compiler.targets.reference.kernels.delta import delta_rule, short_conv
from llmc.compiler.targets.reference.kernels.embedding import embedding, embedding_quant
from llmc.compiler.targets.reference.kernels.experts import (
    expert_activate,
    expert_combine,
    expert_gather,
    expert_linear,
    expert_order,
)
from llmc.compiler.targets.reference.kernels.fused import fused
from llmc.compiler.targets.reference.kernels.latent import head_linear, latent_attention, latent_kv_write
from llmc.compiler.targets.reference.kernels.linear import linear, linear_quant
from llmc.compiler.targets.reference.kernels.mamba import selective_state
from llmc.compiler.targets.reference.kernels.rows import (
    activate,
    gather_rows,
    permute_columns,
    quantize_rows,
    rms_norm,
)

KIND = "reference"
KERNELS: dict[str, Callable[[KernelSpec], tirx.PrimFunc]] = {
    "embedding": embedding,
    "embedding_quant": embedding_quant,
    "rms_norm": rms_norm,
    "linear": linear,
    "linear_quant": linear_quant,
    "adapter_shrink": adapter_shrink,
    "adapter_expand": adapter_expand,
    "adapter_samples": adapter_samples,
    "adapter_pairs": adapter_pairs,
    "adapter_pick": adapter_pick,
    "activate": activate,
    "quantize_rows": quantize_rows,
    "permute_columns": permute_columns,
    "rope_kv_write": rope_kv_write,
    "paged_attention": paged_attention,
    "latent_kv_write": latent_kv_write,
    "latent_attention": latent_attention,
    "short_conv": short_conv,
    "delta_rule": delta_rule,
    "selective_state": selective_state,
    "head_linear": head_linear,
    "packed_head_linear": head_linear,
    "gather_rows": gather_rows,
    "expert_order": expert_order,
    "expert_gather": expert_gather,
    "expert_linear": expert_linear,
    "expert_linear_quant": expert_linear,
    "expert_quantize": quantize_rows,
    "expert_activate": expert_activate,
    "expert_combine": expert_combine,
    "fused": fused,
}


def build_kernel(spec: KernelSpec) -> tirx.PrimFunc:
    """The TIR of a kernel; its global symbol is spec.symbol(). Raises KernelSpecError."""
    build = KERNELS.get(spec.op) or brought_template(spec.op, KIND)
    if build is None:
        raise KernelSpecError(f"no kernel for op {spec.op!r}; known ops: {', '.join(sorted(KERNELS))}")
    try:
        func: tirx.PrimFunc = build(spec)
    except KeyError as error:
        raise KernelSpecError(f"op {spec.op!r} needs the parameter {error}; given: {spec.as_dict()}") from error
    return func
