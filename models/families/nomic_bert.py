"""Nomic BERT (nomic-embed-text): BERT with rotary positions and gated blocks, mostly without biases."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family, Vectors
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope
from llmc.models.rotary import Rope, RopeScaling
from llmc.models.standard import head_sizes, standard_config

_LAYOUT = Layout(
    embed="embeddings.word_embeddings",
    types="embeddings.token_type_embeddings",
    embed_norm="embeddings.LayerNorm",
    layer="layers.{}",
    post_attention_norm="post_attention_layernorm",
    post_mlp_norm="post_mlp_layernorm",
    unused=("pooler.dense.weight", "pooler.dense.bias"),
    other_modules=("cls.",),
)
_AUTHORS_LAYOUT = Layout(
    embed="embeddings.word_embeddings",
    types="embeddings.token_type_embeddings",
    embed_norm="emb_ln",
    layer="encoder.layers.{}",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    post_attention_norm="norm1",
    gate_up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    post_mlp_norm="norm2",
    unused=(),
)
_THETA = 1000.0
# Names in the authors' own code, which most checkpoints come with.
_THEIRS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
    "hidden_act": "activation_function",
}


def _read_rope(fields: Fields, positions: int, head_dim: int) -> Rope:
    """The authors' code has its own factor, by which the rotary base grows beyond the training length."""
    rope = read_rope(fields, positions, head_dim, theta=_THETA)
    if not fields.has("rotary_scaling_factor"):
        return rope
    if rope.scaling is not None:
        raise ModelError(f"{fields.origin}: rotary_scaling_factor and a rope scaling are two; take one of them out")
    trained = fields.integer("max_trained_positions", 2048)
    return Rope(rope.theta, rope.dim, RopeScaling("dynamic", fields.number("rotary_scaling_factor"), trained))


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    fields = fields.renamed(**_THEIRS)
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swiglu"):
        raise ModelError(f"{fields.origin}: the activation {activation!r} is not supported; silu is")
    positions = fields.integer("max_position_embeddings", 2048)
    _, _, head_dim = head_sizes(fields)
    return standard_config(
        fields.with_values(max_position_embeddings=positions),
        generation,
        attention_bias=False,
        o_bias=False,
        eps="layer_norm_eps",
        default_eps=1e-12,
        activation="silu",
        tie_word_embeddings=True,
        rope=_read_rope(fields, positions, head_dim),
        embedding_norm=True,
        norm="layer",
        norm_bias=True,
        residual="sums",
        final_norm=False,
        bidirectional=True,
        token_types=fields.integer("type_vocab_size", 2),
    )


_OF_AUTHORS = """
    fused_bias_fc fused_dropout_add_ln use_flash_attn use_rms_norm use_xentropy pad_vocab_size_multiple
    max_trained_positions dense_seq_output last_layer_subset
    reorder_and_upcast_attn scale_attn_by_inverse_layer_idx scale_attn_weights mlp_fc1_bias mlp_fc2_bias qkv_proj_bias
    """
NOMIC_BERT = Family(
    "nomic_bert",
    read_config,
    _LAYOUT.weight_map,
    harmless=frozenset(_OF_AUTHORS.split()),
    neutral={
        "causal": False, "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    },
    other_maps=(_LAYOUT.moved("", "nomic_bert.").weight_map, _AUTHORS_LAYOUT.weight_map),
    generates=False,
    vectors=Vectors("mean"),
)  # fmt: skip
