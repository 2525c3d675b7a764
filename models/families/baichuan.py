"""Baichuan and Baichuan 2: q, k and v in one matrix. 7B uses rotary positions, 13B ALiBi."""

from __future__ import annotations

from llmc.models.alibi import paper_slopes
from llmc.models.config import Alibi, ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rotary import NO_ROPE
from llmc.models.standard import standard_config

_LAYOUT = Layout(qkv=("self_attn.W_pack",))
_VOCABULARY_2 = 125696  # only Baichuan 2 has this size


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """The code of 13B has no max_position_embeddings. Only Baichuan 2, which norms rows of the output projection, has
    z_loss_weight."""
    alibi = not fields.has("max_position_embeddings")
    if alibi:
        fields = fields.renamed(max_position_embeddings="model_max_length")
    second = fields.has("z_loss_weight") or fields.integer("vocab_size") == _VOCABULARY_2
    return standard_config(
        fields,
        generation,
        attention_bias=False,
        o_bias=False,
        default_eps=1e-6,
        rope=NO_ROPE if alibi else None,
        alibi=Alibi(paper_slopes(fields.integer("num_attention_heads"))) if alibi else None,
        normed_head=second,
    )


BAICHUAN = Family("baichuan", read_config, _LAYOUT.weight_map)
