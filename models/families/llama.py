"""Llama 2 and 3, and the many models with their layout."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.text_vectors import text_vectors
from llmc.models.fields import Fields
from llmc.models.standard import standard_config


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """attention_bias applies to all four attention projections."""
    bias = fields.flag("attention_bias", False)
    mlp_bias = fields.flag("mlp_bias", False)
    return standard_config(fields, generation, attention_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


LLAMA = Family("llama", read_config, **text_vectors("LlamaForSequenceClassification"))
