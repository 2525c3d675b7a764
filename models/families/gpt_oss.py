"""GPT-OSS: experts with biases and a clamped gate, sinks, windows in every other layer.

Published checkpoints store experts in MXFP4; float checkpoints store them [experts, columns, rows]. In other formats,
an expert has linear layers of its own.
"""

from __future__ import annotations

from dataclasses import replace

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.mixtures import apart, read_experts
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.standard import standard_config
from llmc.models.windows import by_layer, stated_window

_EXPERTS = "mlp.experts"
_FLOATS = Layout(
    router="mlp.router",
    expert_gate_up=(f"{_EXPERTS}.gate_up_proj",),
    expert_gate_up_bias=(f"{_EXPERTS}.gate_up_proj_bias",),
    expert_down=f"{_EXPERTS}.down_proj",
    expert_down_bias=f"{_EXPERTS}.down_proj_bias",
    experts_in_pairs=True,
    experts_turned=True,
)
_MXFP4 = replace(
    _FLOATS,
    expert_gate_up=(f"{_EXPERTS}.gate_up_proj_blocks",),
    expert_down=f"{_EXPERTS}.down_proj_blocks",
    experts_turned=False,
    experts_joined=True,
)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """A softmax over the chosen logits equals the normalised softmax over all."""
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise ModelError(f"{fields.origin}: a gpt_oss model with hidden_act {activation} is not supported")
    bias = fields.flag("attention_bias", True)
    windows = by_layer(fields, stated_window(fields, 128), lambda layer: layer % 2 == 0)
    experts = read_experts(
        fields,
        intermediate_size="intermediate_size",
        scores="softmax",
        normalised=True,
        router_bias=True,
        biases=True,
        gate_limit=fields.number("swiglu_limit", 7.0),
        gate_gain=fields.number("swiglu_alpha", 1.702),
    )
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        default_eps=1e-5,
        layer_windows=windows,
        sinks=True,
        experts=experts,
    )


# Older names of num_experts_per_tok, and of what the rope scaling states.
GPT_OSS = Family(
    "gpt_oss",
    read_config,
    _MXFP4.weight_map,
    other_maps=(_FLOATS.weight_map, apart(_FLOATS).weight_map),
    harmless=frozenset({"experts_per_token", "initial_context_length"}),
)
