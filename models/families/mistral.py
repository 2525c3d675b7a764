"""Mistral: Llama without biases, with a sliding window on every layer. Ministral: on some layers. Ministral 3: queries
grow with position."""

from __future__ import annotations

from llmc.models.config import ModelConfig, QueryGrowth
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.text_vectors import text_vectors
from llmc.models.fields import Fields
from llmc.models.rope_fields import rope_table
from llmc.models.standard import layer_count, standard_config
from llmc.models.windows import by_layer, everywhere, stated_window

_WINDOW = 4096  # where a config does not say


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """sliding_window null means full attention; missing means the family's default of 4096."""
    if fields.has("layer_types") and len(set(fields.texts("layer_types", layer_count(fields)))) > 1:
        raise ModelError(f"{fields.origin}: a mistral model whose layer_types differ is not supported")
    windows = everywhere(fields, stated_window(fields, _WINDOW))
    return standard_config(fields, generation, attention_bias=False, o_bias=False, layer_windows=windows)


def read_ministral(fields: Fields, generation: Fields) -> ModelConfig:
    window = stated_window(fields, _WINDOW)
    windows = by_layer(fields, window, lambda _: bool(window))
    return standard_config(fields, generation, attention_bias=False, o_bias=False, layer_windows=windows)


def read_ministral_3(fields: Fields, generation: Fields) -> ModelConfig:
    """The rotary table says how queries grow."""
    windows, table, growth = everywhere(fields, stated_window(fields)), rope_table(fields), None
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
