"""Models with gated delta nets as llama.cpp's files have them: names of their tensors, and what their metadata say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llmc.models.config import ModelConfig
from llmc.models.delta_layout import DeltaLayout
from llmc.models.errors import ModelError
from llmc.models.families.delta_net import PERIOD
from llmc.models.families.layer_kinds import FULL, LINEAR
from llmc.models.families.qwen3_next import gate_first
from llmc.models.layout import Layout
from llmc.models.sources.gguf.architecture import Architecture
from llmc.models.sources.gguf.mixture_fields import qwen2moe
from llmc.models.sources.gguf.part_names import layers_with
from llmc.models.sources.gguf.reader import Reader

_OF_FILES = DeltaLayout(taps_only=True, decays=True)
LAYOUT = Layout(qkv_rows=gate_first, delta_net=_OF_FILES)
BY_KEY_HEAD = replace(LAYOUT, delta_net=replace(_OF_FILES, gates=("in_proj_ba",)))
"""Qwen3-Next's, whose gates of writes and decays lie side by side for each key head."""
OF_LAYERS = {
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
"""Tensors of a layer, theirs to those of a checkpoint."""
_JOINED = "ssm_in.weight"
_FLAGS, _PERIOD = "attention.recurrent_layers", "full_attention_interval"


def _dense(read: Reader) -> dict[str, Any]:
    """How positions are shared between time, height and width matters to images alone."""
    read.no_window()
    read.metadata.has(read.key("rope.dimension_sections"))
    return {**read.eps(), **_net(read)}


def _mixture(read: Reader) -> dict[str, Any]:
    """Every layer has experts, and one that all tokens share. A file may not say the width of layers without."""
    found = {**qwen2moe(read), **_dense(read), "norm_topk_prob": True}
    return {**found, "intermediate_size": read.integer("feed_forward_length", found["moe_intermediate_size"])}


def _net(read: Reader) -> dict[str, Any]:
    heads, inner = read.integer("ssm.time_step_rank"), read.integer("ssm.inner_size")
    if inner % heads:
        raise read.metadata.wrong(read.key("ssm.inner_size"), f"a multiple of the {heads} heads of ssm.time_step_rank")
    return {
        "layer_types": _kinds(read),
        "linear_num_key_heads": read.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": read.integer("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": read.integer("ssm.conv_kernel"),
    }


def _kinds(read: Reader) -> list[str]:
    """Kind of attention per layer, which a list says or a period implies. Raises ModelError unless tensors agree."""
    metadata, count, name = read.metadata, read.layers(), _FLAGS
    period, key = read.integer(_PERIOD, PERIOD), read.key(name)
    if metadata.array(key) is None:
        name, linear = _PERIOD, tuple(i for i in range(count) if (i + 1) % period)
    else:
        flags = metadata.flags(key) or ()
        if len(flags) < count:
            raise metadata.wrong(key, f"a list of {count} flags")
        linear = tuple(i for i, flag in enumerate(flags[:count]) if flag)
    if old := layers_with(_JOINED, iter(read.shapes)):
        raise ModelError(
            f"{metadata.origin} has the tensor blk.{old[0]}.{_JOINED}, as older files of gated delta nets; convert the "
            "model again"
        )
    read.check_layers("ssm_out.weight", linear, "a gated delta net", name)
    return [LINEAR if i in linear else FULL for i in range(count)]


def in_order_of_file(config: ModelConfig, architecture: Architecture) -> ModelConfig:
    """The configuration with the order of value heads that the file has."""
    net = config.delta_net
    if net is None or not architecture.tiled or net.value_heads == net.key_heads:
        return config
    return replace(config, delta_net=replace(net, tiled=True))


DELTA_NETS: Mapping[str, Callable[[Reader], dict[str, Any]]] = {
    "qwen3next": _mixture,
    "qwen35": _dense,
    "qwen35moe": _mixture,
}
