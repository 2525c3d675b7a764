"""Mistral: Llama without biases, with a sliding window on every layer."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.text_vectors import text_vectors
from llmc.models.fields import Fields
from llmc.models.standard import layer_count, standard_config


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """sliding_window null means full attention; missing means the family's default of 4096."""
    num_layers = layer_count(fields)
    if fields.has("layer_types") and len(set(fields.texts("layer_types", num_layers))) > 1:
        raise ModelError(f"{fields.origin}: a mistral model whose layer_types differ is not supported")
    window = 0
    if fields.has("sliding_window") or not fields.mentions("sliding_window"):
        window = fields.integer("sliding_window", 4096)
    return standard_config(fields, generation, attention_bias=False, o_bias=False, layer_windows=(window,) * num_layers)


MISTRAL = Family("mistral", read_config, **text_vectors("MistralForSequenceClassification"))
