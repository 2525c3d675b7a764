"""Qwen2 and Qwen2.5: biases on q, k and v, none on the output projection."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.text_vectors import text_vectors
from llmc.models.fields import Fields
from llmc.models.standard import standard_config
from llmc.models.windows import from_layer, used_window


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """The sliding window applies only with use_sliding_window, from layer max_window_layers on or by layer_types."""
    windows = from_layer(fields, used_window(fields), 28)
    return standard_config(
        fields,
        generation,
        attention_bias=True,
        o_bias=False,
        layer_windows=windows,
        bidirectional=not fields.flag("is_causal", True),
    )


# Read if use_sliding_window is true; the second only without layer types.
QWEN2 = Family(
    "qwen2",
    read_config,
    harmless=frozenset({"sliding_window", "max_window_layers"}),
    **text_vectors("Qwen2ForSequenceClassification"),
)
