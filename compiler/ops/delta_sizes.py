"""Bytes of a KV block of a layer with a state, as its kernels address it."""

from __future__ import annotations

from llmc.compiler.kernel_spec import KernelSpec

SHORT_CONV_OP, DELTA_RULE_OP = "short_conv", "delta_rule"


def state_block_bytes(spec: KernelSpec) -> int:
    """Of the pool that a kernel of such a layer reads and writes; 0 for other kernels."""
    p = spec.as_dict()
    if spec.op == SHORT_CONV_OP:
        return 4 * (int(p["taps"]) - 1) * int(p["channels"])
    return 4 * int(p["heads"]) * int(p["key_dim"]) * int(p["value_dim"]) if spec.op == DELTA_RULE_OP else 0
