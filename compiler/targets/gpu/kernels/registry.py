"""The GPU kernels by exact op name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.ops.registry import brought_template
from llmc.compiler.targets.gpu.kernels.adapters import adapter_expand, adapter_shrink
from llmc.compiler.targets.gpu.kernels.attention import paged_attention, rotated_attention
from llmc.compiler.targets.gpu.kernels.attention_merge import merge_attention
from llmc.compiler.targets.gpu.kernels.choice import choose_experts
from llmc.compiler.targets.gpu.kernels.delta_rule import delta_rule
from llmc.compiler.targets.gpu.kernels.elementary import SINGLE
from llmc.compiler.targets.gpu.kernels.expert_order import expert_order
from llmc.compiler.targets.gpu.kernels.fused import fused
from llmc.compiler.targets.gpu.kernels.groups import Groups
from llmc.compiler.targets.gpu.kernels.kv_write import latent_kv_write, rope_kv_write
from llmc.compiler.targets.gpu.kernels.latent_attention import latent_attention
from llmc.compiler.targets.gpu.kernels.linear import expert_linear, head_linear, linear
from llmc.compiler.targets.gpu.kernels.rank_sum import rank_sum
from llmc.compiler.targets.gpu.kernels.rows import quantize_rows, rms_norm
from llmc.compiler.targets.gpu.kernels.sampling import (
    sample_best,
    sample_draw,
    sample_edit,
    sample_feed,
    sample_mask,
    sample_scan,
    sample_sum,
)
from llmc.compiler.targets.gpu.kernels.sampling_top import sample_rank, sample_top
from llmc.compiler.targets.gpu.kernels.selective_state import selective_state
from llmc.compiler.targets.gpu.kernels.tensor_adapters import tensor_adapter_shrink
from llmc.compiler.targets.gpu.kernels.tensor_attention import tensor_attention
from llmc.compiler.targets.gpu.kernels.tensor_linear import tensor_linear
from llmc.compiler.targets.gpu.launch import EXPERT_ORDER, launch_of
from llmc.compiler.targets.gpu.tensor_attention import ITEMS as ATTENTION_ITEMS
from llmc.compiler.targets.gpu.tensor_attention import tensor_attention as attention_on_tensor_cores
from llmc.compiler.targets.gpu.tensor_cores import ITEMS, shrinks_on_tensor_cores, tensor_layer
from llmc.compiler.targets.gpu.wgmma import OFF
from llmc.compiler.targets.reference.kernels.frame import called
from llmc.compiler.targets.reference.kernels.functions import computed_by
from llmc.compiler.targets.reference.kernels.registry import build_kernel as build_plain

KIND = "gpu"
KERNELS: dict[str, Callable[[KernelSpec], Any]] = {
    "linear": linear,
    "linear_quant": linear,
    "choose_experts": choose_experts,
    "expert_linear": expert_linear,
    "expert_linear_quant": expert_linear,
    "head_linear": head_linear,
    "packed_head_linear": head_linear,
    "rms_norm": rms_norm,
    "quantize_rows": quantize_rows,
    "expert_quantize": quantize_rows,
    "rope_kv_write": rope_kv_write,
    "latent_kv_write": latent_kv_write,
    "paged_attention": paged_attention,
    "rotated_attention": rotated_attention,
    "latent_attention": latent_attention,
    "merge_attention": merge_attention,
    "delta_rule": delta_rule,
    "selective_state": selective_state,
    "fused": fused,
    "rank_sum": rank_sum,
    "adapter_shrink": adapter_shrink,
    "adapter_expand": adapter_expand,
    "sample_mask": sample_mask,
    "sample_edit": sample_edit,
    "sample_scan": sample_scan,
    "sample_sum": sample_sum,
    "sample_best": sample_best,
    "sample_draw": sample_draw,
    "sample_top": sample_top,
    "sample_rank": sample_rank,
    "sample_feed": sample_feed,
}
"""Kernels in which several items work on a unit; all other ops use the reference kernel, one unit per item."""


def build_kernel(spec: KernelSpec, *, tensor_cores: bool = False, wgmma: str = OFF) -> Any:
    """The TIR of a kernel, a PrimFunc with thread bindings.

    tensor_cores: whether the target has them. wgmma: for which rows it is used (`wgmma.py`). Raises KernelSpecError.
    """
    with computed_by(SINGLE):
        return _build(spec, tensor_cores, wgmma)


def _build(spec: KernelSpec, tensor_cores: bool, wgmma: str) -> Any:
    if tensor_cores and (layer := tensor_layer(spec)) is not None:
        with called(partial(Groups, ITEMS)):
            return tensor_linear(spec, layer, wgmma)
    if tensor_cores and (attention := attention_on_tensor_cores(spec)) is not None:
        with called(partial(Groups, ATTENTION_ITEMS)):
            return tensor_attention(spec, attention)
    if tensor_cores and shrinks_on_tensor_cores(spec):
        with called(partial(Groups, ITEMS)):
            return tensor_adapter_shrink(spec)
    if tensor_cores and spec.op == EXPERT_ORDER:
        with called(Groups):
            return expert_order(spec)
    build = KERNELS.get(spec.op) or brought_template(spec.op, KIND) or build_plain
    with called(partial(Groups, launch_of(spec).items)):
        return build(spec)
