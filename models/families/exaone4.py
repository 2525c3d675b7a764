"""EXAONE 4: norms after blocks, normed heads, no positions in layers without a window."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.standard import standard_config
from llmc.models.windows import by_layer, stated_window


def read_windows(fields: Fields) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(window per layer, layers without positions). Without a size of windows, all are rotated."""
    window = stated_window(fields, 4096)
    period = fields.integer("sliding_window_pattern", 4) if window and not fields.has("layer_types") else 1
    windows = by_layer(fields, window, lambda layer: (layer + 1) % period != 0)
    return windows, tuple(i for i, own in enumerate(windows) if window and not own)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    windows, unrotated = read_windows(fields)
    return standard_config(
        fields,
        generation,
        attention_bias=False,
        o_bias=False,
        qk_norm="head",
        layer_windows=windows,
        residual="post",
        unrotated_layers=unrotated,
    )


# The pattern is read if there are windows but no layer types.
EXAONE4 = Family("exaone4", read_config, harmless=frozenset({"sliding_window_pattern"}))
