"""GPT-Neo: GPT-2 with scores that are not scaled, and a window in some layers."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rotary import NO_ROPE
from llmc.models.standard import layer_count, read_activation, standard_config

_ATTENTION = "attn.attention"
_LAYOUT = Layout(
    embed="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{}",
    attention_norm="ln_1",
    qkv=(f"{_ATTENTION}.q_proj", f"{_ATTENTION}.k_proj", f"{_ATTENTION}.v_proj"),
    out=f"{_ATTENTION}.out_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
    norm="transformer.ln_f",
    unused=(f"transformer.h.{{}}.{_ATTENTION}.bias", f"transformer.h.{{}}.{_ATTENTION}.masked_bias"),
)


def _windows(fields: Fields) -> tuple[int, ...]:
    """Window per layer. attention_types: pairs of kinds, and of how often they repeat."""
    count, window = layer_count(fields), fields.integer("window_size", 256)
    found = fields.raw("attention_types", [[["global", "local"], 12]])
    kinds: list[object] = []
    for pair in found if isinstance(found, list) else ():
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list) and isinstance(pair[1], int):
            kinds += pair[0] * min(pair[1], count)
    if len(kinds) != count or not all(kind in ("global", "local") for kind in kinds):
        raise ModelError(
            f"{fields.origin}: attention_types does not say global or local of each of {count} layers; correct it"
        )
    return tuple(window if kind == "local" else 0 for kind in kinds)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    fields = fields.renamed(num_hidden_layers="num_layers", num_attention_heads="num_heads")
    return standard_config(
        fields,
        generation,
        attention_bias=False,
        o_bias=True,
        mlp_bias=True,
        layer_windows=_windows(fields),
        eps="layer_norm_epsilon",
        default_eps=1e-5,
        intermediate_size=4 * fields.integer("hidden_size"),
        activation=read_activation(fields, "activation_function", "gelu_new"),
        tie_word_embeddings=True,
        rope=NO_ROPE,
        attention_scale=1.0,
        learned_positions=fields.integer("max_position_embeddings"),
        norm="layer",
        norm_bias=True,
        gated=False,
    )


# The kinds, once more.
GPT_NEO = Family(
    "gpt_neo",
    read_config,
    _LAYOUT.weight_map,
    harmless=frozenset({"attention_layers", "embed_dropout", "resid_dropout"}),
)
