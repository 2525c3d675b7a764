"""ModernBERT: bidirectional with local layers and two rotary bases, gated, pre-norm."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family, Vectors
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.pooled import Dense, Pooled
from llmc.models.rope_fields import rope_of
from llmc.models.rotary import Rope
from llmc.models.standard import ACTIVATIONS, head_sizes, read_activation, standard_config
from llmc.models.windows import FULL, WINDOWED, by_layer

_LAYOUT = Layout(
    embed="embeddings.tok_embeddings",
    embed_norm="embeddings.norm",
    layer="layers.{}",
    attention_norm="attn_norm",
    qkv=("attn.Wqkv",),
    out="attn.Wo",
    mlp_norm="mlp_norm",
    gate_up=("mlp.Wi",),
    down="mlp.Wo",
    norm="final_norm",
    dense=("head.dense", "classifier"),
    dense_norm="head.norm",
    unused=(),
    other_modules=("head.", "decoder.", "classifier."),
)
_THETAS = {FULL: ("global_rope_theta", 160000.0), WINDOWED: ("local_rope_theta", 10000.0)}
_POOLINGS = {"cls": "first", "mean": "mean"}


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """local_attention counts tokens on both sides."""
    _, _, head_dim = head_sizes(fields)
    positions = fields.integer("max_position_embeddings", 8192)
    nested = fields.table("rope_parameters") or Fields({}, fields.origin)

    def rope(kind: str) -> Rope:
        name, theta = _THETAS[kind]
        table = nested.table(kind) or Fields({}, f"{fields.origin}: {kind}")
        return rope_of(fields, table, positions, head_dim, theta=fields.number(name, theta))

    window, every = fields.integer("local_attention", 128) // 2 + 1, fields.integer("global_attn_every_n_layers", 3)
    return standard_config(
        fields.with_values(max_position_embeddings=positions),
        generation,
        attention_bias=fields.flag("attention_bias", False),
        o_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        eps="norm_eps",
        default_eps=1e-5,
        activation=read_activation(fields, "hidden_activation", "gelu"),
        tie_word_embeddings=True,
        rope=rope(FULL),
        local_rope=rope(WINDOWED),
        layer_windows=by_layer(fields, window, lambda layer: layer % every != 0),
        embedding_norm=True,
        norm="layer",
        norm_bias=fields.flag("norm_bias", False),
        first_norm=False,
        bidirectional=True,
    )


def _head(config: ModelConfig, fields: Fields, labels: int) -> Pooled:
    pooling, activation = fields.text("classifier_pooling", "cls"), fields.text("classifier_activation", "gelu")
    if pooling not in _POOLINGS or ACTIVATIONS.get(activation) != "gelu":
        raise ModelError(
            f"{fields.origin}: classifier_pooling {pooling!r} with classifier_activation {activation!r} is not "
            "supported; cls or mean, with gelu, are"
        )
    bias = fields.flag("classifier_bias", False)
    first = Dense(config.hidden_size, bias, "gelu", norm=True)
    return Pooled("mean" if pooling == "mean" else "first", (first, Dense(labels, True)))


_OF_TRAINING = """
    mlp_dropout initializer_cutoff_factor deterministic_flash_attn sparse_prediction sparse_pred_ignore_index
    reference_compile repad_logits_with_grad decoder_bias classifier_bias classifier_activation classifier_pooling
    position_embedding_type layer_norm_eps
    """
MODERNBERT = Family(
    "modernbert",
    read_config,
    _LAYOUT.weight_map,
    harmless=frozenset(_OF_TRAINING.split()),
    other_maps=(_LAYOUT.moved("", "model.").weight_map,),
    generates=False,
    vectors=Vectors("mean", "ModernBertForSequenceClassification", _head),
)
