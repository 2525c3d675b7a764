"""MiniCPM3: latent attention, with MiniCPM's multipliers on embeddings, residuals and logits."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.latent import read_latent_config
from llmc.models.fields import Fields
from llmc.models.standard import layer_count


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """Values default to a width of hidden_size / num_attention_heads; rotation is half-split."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers = layer_count(fields)
    depth, base = fields.number("scale_depth", layers**0.5), fields.integer("dim_model_base", hidden)
    value_dim, tied = fields.integer("v_head_dim", max(1, hidden // heads)), fields.flag("tie_word_embeddings", True)
    return read_latent_config(
        fields.with_values(v_head_dim=value_dim, tie_word_embeddings=tied, rope_interleave=False),
        generation,
        embedding_multiplier=fields.number("scale_emb", 1.0),
        residual_multiplier=depth / layers**0.5,
        logit_multiplier=base / hidden,
    )


MINICPM3 = Family("minicpm3", read_config, harmless=frozenset({"qk_head_dim"}))
