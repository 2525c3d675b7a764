"""Mistral: Llama without biases, with a sliding window on every layer. Ministral: on some layers. Ministral 3: queries
grow with position."""

from __future__ import annotations

from llmc.models.config import ModelConfig, QueryGrowth
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.text_vectors import text_vectors
from llmc.models.fields import Fields
from llmc.models.rope_fields import rope_table
from llmc.models.standard import layer_count, standard_config, windows_by_type


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """sliding_window null means full attention; missing means the family's default of 4096."""
    num_layers = layer_count(fields)
    if fields.has("layer_types") and len(set(fields.texts("layer_types", num_layers))) > 1:
        raise ModelError(f"{fields.origin}: a mistral model whose layer_types differ is not supported")
    windows = (_window(fields, 4096),) * num_layers
    return standard_config(fields, generation, attention_bias=False, o_bias=False, layer_windows=windows)


def _window(fields: Fields, usual: int) -> int:
    """0 for none. usual: if the field is missing."""
    if not fields.has("sliding_window"):
        return 0 if fields.mentions("sliding_window") else usual
    return fields.integer("sliding_window")


def read_ministral(fields: Fields, generation: Fields) -> ModelConfig:
    window = _window(fields, 4096)
    windows = windows_by_type(fields, window) if fields.has("layer_types") else (window,) * layer_count(fields)
    return standard_config(fields, generation, attention_bias=False, o_bias=False, layer_windows=windows)


def read_ministral_3(fields: Fields, generation: Fields) -> ModelConfig:
    """The rotary table says how queries grow."""
    windows, table, growth = (_window(fields, 0),) * layer_count(fields), rope_table(fields), None
    if factor := table.number("llama_4_scaling_beta", 0.0, positive=False):
        growth = QueryGrowth(table.integer("original_max_position_embeddings"), factor, "laps")
    return standard_config(
        fields, generation, attention_bias=False, o_bias=False, head_dim=128, layer_windows=windows, query_growth=growth
    )


MISTRAL = Family("mistral", read_config, **text_vectors("MistralForSequenceClassification"))
MINISTRAL = Family("ministral", read_ministral)
# The stretched length, once more.
_STRETCHED = frozenset(f"{table}.max_position_embeddings" for table in ("rope_parameters", "rope_scaling"))
MINISTRAL3 = Family("ministral3", read_ministral_3, harmless=_STRETCHED)
