"""Bytes of the pools that kernels of layers with a state read and write."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmc.compiler.kernel_spec import KernelSpec, Param
from llmc.compiler.ops.delta import DELTA_RULE, SHORT_CONV
from llmc.compiler.ops.mamba import SELECTIVE_STATE

_SLOT_BYTES: dict[str, Callable[[Mapping[str, Param]], int]] = {
    SHORT_CONV.name: lambda p: 4 * (int(p["taps"]) - 1) * int(p["channels"]),
    DELTA_RULE.name: lambda p: 4 * int(p["heads"]) * int(p["key_dim"]) * int(p["value_dim"]),
    SELECTIVE_STATE.name: lambda p: 4 * int(p["heads"]) * int(p["head_dim"]) * int(p["state_size"]),
}


def state_slot_bytes(spec: KernelSpec) -> int:
    """Bytes of a slot of the pool of a kernel of a layer with a state; 0 for other kernels."""
    return _SLOT_BYTES[spec.op](spec.as_dict()) if spec.op in _SLOT_BYTES else 0
