"""Phi-3, 3.5 and 4: Llama with fused projections, a window on every layer, and longrope factors."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope
from llmc.models.standard import head_sizes, standard_config
from llmc.models.windows import everywhere, stated_window

_LAYOUT = Layout(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    windows = everywhere(fields, stated_window(fields))
    rope = read_rope(fields, fields.integer("max_position_embeddings"), head_sizes(fields)[2], partial=1.0)
    return standard_config(fields, generation, attention_bias=False, o_bias=False, layer_windows=windows, rope=rope)


# Options of Phi-4-mini's own code that are off.
_NEUTRAL = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}
PHI3 = Family("phi3", read_config, _LAYOUT.weight_map, neutral=_NEUTRAL)
