"""Models recovered from an ONNX graph; the configuration states every choice."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout

MODEL_TYPE = "onnx"
_LAYOUT = Layout(
    embed="embed",
    embed_norm="embed_norm",
    positions="positions",
    types="types",
    layer="layers.{}",
    attention_norm="attention_norm",
    post_attention_norm="attention_post_norm",
    qkv=("attention.q", "attention.k", "attention.v"),
    q_norm="attention.q_norm",
    k_norm="attention.k_norm",
    out="attention.out",
    mlp_norm="mlp_norm",
    post_mlp_norm="mlp_post_norm",
    gate_up=("mlp.gate", "mlp.up"),
    up="mlp.up",
    down="mlp.down",
    norm="norm",
    head="lm_head",
    dense=("dense.0", "dense.1"),
    dense_norm="dense.norm",
    unused=(),
)


def _read(fields: Fields, _: Fields) -> ModelConfig:
    raise ModelError(f"{fields.origin}: model_type {MODEL_TYPE} is that of .onnx files; give the file itself")


ONNX = Family(MODEL_TYPE, _read, _LAYOUT.weight_map)
"""Tensor names are llmc's own; `sources/onnx` maps them to initializers."""
