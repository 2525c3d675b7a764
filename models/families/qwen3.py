"""Qwen3: a norm on each head of q and k, and an independent head_dim."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.families.text_vectors import text_vectors
from llmc.models.fields import Fields
from llmc.models.rank_prompts import QWEN3_RERANKER
from llmc.models.standard import standard_config
from llmc.models.windows import from_layer, used_window


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """attention_bias applies to all four attention projections; head_dim defaults to 128."""
    bias = fields.flag("attention_bias", False)
    windows = from_layer(fields, used_window(fields), 28)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=128,
        layer_windows=windows,
        bidirectional=not fields.flag("is_causal", True),
    )


# Read if use_sliding_window is true; the second only without layer types.
QWEN3 = Family(
    "qwen3",
    read_config,
    harmless=frozenset({"sliding_window", "max_window_layers"}),
    **text_vectors("Qwen3ForSequenceClassification", rank_tokens=("no", "yes"), rank_prompt=QWEN3_RERANKER),
)
