"""SmolLM3: Llama with some layers without positions."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.standard import layer_count, standard_config
from llmc.models.windows import by_layer, used_window


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """no_rope_layers is 1 for rotated layers."""
    count, bias = layer_count(fields), fields.flag("attention_bias", False)
    if fields.has("no_rope_layers"):
        rotated = fields.integers("no_rope_layers", count)
    else:
        period = fields.integer("no_rope_layer_interval", 4)
        rotated = tuple(int((i + 1) % period != 0) for i in range(count))
    unrotated = tuple(i for i, is_rotated in enumerate(rotated) if not is_rotated)
    window = used_window(fields, 0)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        layer_windows=by_layer(fields, window, lambda layer: bool(window) and layer in unrotated),
        tie_word_embeddings=True,
        unrotated_layers=unrotated,
    )


# Read unless something newer or a flag overrides them; the last is never read, as in transformers.
SMOLLM3 = Family(
    "smollm3",
    read_config,
    harmless=frozenset({"no_rope_layer_interval", "sliding_window", "max_window_layers"}),
)
