"""Mamba-2 mixers as llama.cpp's files have them: names of their tensors, and what metadata say of their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmc.models.mamba_layout import MambaLayout
from llmc.models.sources.gguf.part_names import layers_with
from llmc.models.sources.gguf.reader import Reader

LAYOUT = MambaLayout(taps_only=True, decays=True, columns=True, normed_groups=True)
OF_LAYERS = {
    **{
        f"{theirs}.{kind}": f"{LAYOUT.block}.{ours}.{kind}"
        for theirs, ours in (("ssm_in", "in_proj"), ("ssm_conv1d", "conv1d"), ("ssm_out", "out_proj"))
        for kind in ("weight", "bias")
    },
    "ssm_a": f"{LAYOUT.block}.A_log",
    "ssm_d": f"{LAYOUT.block}.D",
    "ssm_dt.bias": f"{LAYOUT.block}.dt_bias",
    "ssm_norm.weight": f"{LAYOUT.block}.norm.weight",
}
"""Tensors of a layer, theirs to those of a checkpoint."""
OF_EACH = "ssm_out.weight"
"""A tensor that every mixer has."""
SIZES = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count")


@dataclass(frozen=True)
class Sizes:
    """As in `Mamba2`. inner: elements of all heads."""

    heads: int
    head_dim: int
    inner: int
    state_size: int
    groups: int
    taps: int
    conv_bias: bool
    bias: bool


def read_sizes(read: Reader) -> Sizes:
    """Raises ModelError."""
    heads, inner = read.integer("ssm.time_step_rank"), read.integer("ssm.inner_size")
    if inner % heads:
        raise read.metadata.wrong(read.key("ssm.inner_size"), f"a multiple of the {heads} heads of ssm.time_step_rank")
    return Sizes(
        heads=heads,
        head_dim=inner // heads,
        inner=inner,
        state_size=read.integer("ssm.state_size"),
        groups=read.integer("ssm.group_count"),
        taps=read.integer("ssm.conv_kernel"),
        conv_bias=bool(layers_with("ssm_conv1d.bias", iter(read.shapes))),
        bias=bool(layers_with("ssm_in.bias", iter(read.shapes))),
    )


def fields_of(net: Sizes) -> dict[str, Any]:
    """By the field names of Bamba and its relatives."""
    return {
        "mamba_n_heads": net.heads,
        "mamba_d_head": net.head_dim,
        "mamba_d_state": net.state_size,
        "mamba_n_groups": net.groups,
        "mamba_d_conv": net.taps,
        "mamba_conv_bias": net.conv_bias,
        "mamba_proj_bias": net.bias,
    }
