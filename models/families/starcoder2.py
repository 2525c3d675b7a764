"""StarCoder2: layer norms, biases, a plain MLP, a window on every layer."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.standard import read_activation, standard_config
from llmc.models.windows import everywhere, stated_window

_LAYOUT = Layout(up="mlp.c_fc", down="mlp.c_proj")


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    bias = fields.flag("use_bias", True)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        layer_windows=everywhere(fields, stated_window(fields)),
        eps="norm_epsilon",
        activation=read_activation(fields, default="gelu_pytorch_tanh"),
        tie_word_embeddings=True,
        norm="layer",
        norm_bias=True,
        gated=False,
    )


# Left of StarCoder's config.
_OF_STARCODER = """
    activation_function attention_softmax_in_fp32 layer_norm_epsilon scale_attention_softmax_in_fp32
    """
STARCODER2 = Family(
    "starcoder2",
    read_config,
    _LAYOUT.weight_map,
    harmless=frozenset(_OF_STARCODER.split()),
    neutral={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
)
