"""BERT, RoBERTa and XLM-RoBERTa: bidirectional, position table, norms on sums."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family, Vectors
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.pooled import Dense, Pooled
from llmc.models.rotary import NO_ROPE
from llmc.models.standard import read_activation, standard_config

_LAYOUT = Layout(
    embed="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    embed_norm="embeddings.LayerNorm",
    layer="encoder.layer.{}",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    post_attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    post_mlp_norm="output.LayerNorm",
    dense=("bert.pooler.dense", "classifier"),
    unused=("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"),
    other_modules=("cls.", "classifier."),
)
_ROBERTA_LAYOUT = replace(
    _LAYOUT,
    skipped_positions=2,
    dense=("classifier.dense", "classifier.out_proj"),
    other_modules=("lm_head.", "classifier."),
)
# Keys of Jina's own implementation.
_FLASH_LAYOUT = replace(
    _ROBERTA_LAYOUT,
    embed_norm="emb_ln",
    layer="encoder.layers.{}",
    qkv=("mixer.Wqkv",),
    out="mixer.out_proj",
    post_attention_norm="norm1",
    up="mlp.fc1",
    down="mlp.fc2",
    post_mlp_norm="norm2",
)
_PADDING = 1
"""RoBERTa's position table skips the rows up to and including this id."""


def _read(fields: Fields, generation: Fields, max_positions: int) -> ModelConfig:
    kind = fields.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ModelError(f"{fields.origin}: position_embedding_type {kind!r} is not supported; only absolute is")
    if fields.flag("is_decoder", False):
        raise ModelError(f"{fields.origin}: is_decoder is true, but llmc runs such models as encoders only")
    return standard_config(
        fields.with_values(max_position_embeddings=max_positions),
        generation,
        attention_bias=True,
        o_bias=True,
        mlp_bias=True,
        eps="layer_norm_eps",
        default_eps=1e-12,
        activation=read_activation(fields, default="gelu"),
        tie_word_embeddings=True,
        rope=NO_ROPE,
        learned_positions=max_positions,
        embedding_norm=True,
        norm="layer",
        norm_bias=True,
        gated=False,
        residual="sums",
        final_norm=False,
        bidirectional=True,
        token_types=fields.integer("type_vocab_size", 2),
    )


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    return _read(fields, generation, fields.integer("max_position_embeddings", 512))


def read_roberta_config(fields: Fields, generation: Fields) -> ModelConfig:
    """The position table begins after the padding row."""
    padding = fields.integer("pad_token_id", _PADDING, minimum=0)
    if padding != _PADDING:
        raise ModelError(
            f"{fields.origin}: pad_token_id is {padding}; llmc reads RoBERTa models only with pad_token_id 1"
        )
    rows = fields.integer("max_position_embeddings", 512, minimum=_PADDING + 2)
    return _read(fields, generation, rows - _PADDING - 1)


def _head(config: ModelConfig, fields: Fields, labels: int) -> Pooled:
    """BERT's pooler, or RoBERTa's classifier layer: both have the same structure."""
    return Pooled("first", (Dense(config.hidden_size, True, "tanh"), Dense(labels, True)))


# Left of the first BERT's config.
_OF_POOLERS = """
    directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    """
BERT = Family(
    "bert",
    read_config,
    _LAYOUT.weight_map,
    other_maps=(_LAYOUT.moved("", "bert.").weight_map,),
    harmless=frozenset(_OF_POOLERS.split()),
    generates=False,
    vectors=Vectors("first", "BertForSequenceClassification", _head),
)


def _roberta(model_type: str, classifier: str, *others: Layout) -> Family:
    """others: layouts of checkpoints whose authors publish their own code."""
    whole = (layout.moved("", "roberta.").weight_map for layout in (_ROBERTA_LAYOUT, *others))
    return Family(
        model_type,
        read_roberta_config,
        _ROBERTA_LAYOUT.weight_map,
        other_maps=(*whole, *(layout.weight_map for layout in others)),
        generates=False,
        # Its tokenizers assign no types, whatever config.json provides.
        vectors=Vectors("first", classifier, _head, typed_pairs=False),
    )


ROBERTA = _roberta("roberta", "RobertaForSequenceClassification")
XLM_ROBERTA = _roberta("xlm-roberta", "XLMRobertaForSequenceClassification", _FLASH_LAYOUT)
