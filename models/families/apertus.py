"""Apertus: a plain MLP whose activation has learned parameters, normed heads."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.standard import standard_config

_LAYOUT = Layout(
    attention_norm="attention_layernorm",
    mlp_norm="feedforward_layernorm",
    # Constants of the activation.
    unused=(*Layout().unused, "model.layers.{}.mlp.act_fn.beta", "model.layers.{}.mlp.act_fn.eps"),
)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    if (activation := fields.text("hidden_act", "xielu")) != "xielu":
        raise ModelError(f"{fields.origin}: an apertus model with hidden_act {activation} is not supported")
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        qk_norm="head",
        default_eps=1e-5,
        activation="xielu",
        gated=False,
    )


APERTUS = Family("apertus", read_config, _LAYOUT.weight_map, neutral={"post_norm": False, "qk_norm": True})
