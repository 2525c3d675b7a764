"""GPT-NeoX and Pythia: layer norms, q, k and v interleaved by head, parallel blocks."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope
from llmc.models.row_orders import by_group
from llmc.models.standard import head_sizes, standard_config

_LAYOUT = Layout(
    embed="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}",
    qkv=("attention.query_key_value",),
    qkv_rows=by_group,
    out="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    unused=(
        "gpt_neox.layers.{}.attention.bias",
        "gpt_neox.layers.{}.attention.masked_bias",
        "gpt_neox.layers.{}.attention.rotary_emb.inv_freq",
    ),
)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """rotary_pct and rotary_emb_base are older names of two rotary fields."""
    fields = fields.renamed(partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base")
    bias = fields.flag("attention_bias", True)
    positions = fields.integer("max_position_embeddings")
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        eps="layer_norm_eps",
        rope=read_rope(fields, positions, head_sizes(fields)[2], partial=0.25),
        norm="layer",
        norm_bias=True,
        gated=False,
        residual="parallel" if fields.flag("use_parallel_residual", True) else "pre",
        parallel_norms=2,
    )


GPT_NEOX = Family("gpt_neox", read_config, _LAYOUT.weight_map)
