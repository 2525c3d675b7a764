"""Which linear layers norm their row of x themselves. Imports no tvm.

A norm of one row is one group: as a kernel of its own it costs a launch and two trips to memory, while the GPU idles. A
layer that norms does the same in each of its groups, while its ring fills with weights.
"""

from __future__ import annotations

from dataclasses import replace

from llmc.compiler.dtypes import HALVES
from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.targets.gpu.linear_forms import PLACES, FewForm, few_forms, few_groups
from llmc.compiler.targets.gpu.tensor_cores import TensorLayer, tensor_layer
from llmc.compiler.targets.gpu.wgmma import ALL, takes
from llmc.quantize.formats.registry import format_of_kernel

MOST_NORMED_ROWS = 1
"""Rows of a graph whose layers norm. Each group reads all of x as floats, and the norm's weight: with one row, 264
groups read 8 MB of the L2 cache for 4096 columns, about as long as their rings take to fill. Each further row adds half
of that, and takes as much again of the ring's memory."""
_NEEDED_BYTES = 3_840_000
"""Of weights in flight, for the bandwidth of an H200: 4.8 TB/s, at a latency of 800 ns."""
_PARAMS = {"dim", "act_dtype", "eps", "rows"}
"""Of a norm that such layers compute; of one that makes int8, also those of sums."""


def norms_inside(norm: KernelSpec, linear: KernelSpec, way: str) -> bool:
    """Whether a linear layer on tensor cores norms the one row that it reads. way: which rows use wgmma (`wgmma.py`),
    whose products may have other bits."""
    of_norm, layer = norm.as_dict(), tensor_layer(linear)
    if layer is None or layer.experts or (way == ALL and takes(layer)):
        return False
    wanted: dict[str, Param] = {"act_dtype": layer.dtype, "rows": linear.as_dict()["rows"]}
    if layer.dtype not in HALVES:
        sums = format_of_kernel(linear.as_dict()).sums
        assert sums is not None
        wanted |= {"group_size": sums.group_size, "sum_factor": sums.factor}
    if of_norm.keys() != _PARAMS | wanted.keys() or any(of_norm[name] != value for name, value in wanted.items()):
        return False
    # Where groups take turns, later ones would norm while others could use the memory.
    return few_groups(layer) <= PLACES and _keeps_memory_busy(layer)


def _keeps_memory_busy(layer: TensorLayer) -> bool:
    """Whether the ring, beside the row, still has what the bandwidth needs; of a small layer, most of what it had."""
    normed = replace(layer, normed=True)
    (form,) = few_forms(normed)
    if not form.is_deep:
        return False
    return _in_flight(form) >= min(_NEEDED_BYTES, _in_flight(few_forms(layer)[0]) * 2 // 3)


def _in_flight(form: FewForm) -> int:
    return few_groups(form.layer) * form.in_flight_bytes
