"""EXAONE 4: norms after blocks, normed heads, no positions in layers without a window."""

from __future__ import annotations

from llmc.models.config import ModelConfig
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.standard import layer_count, standard_config, windows_by_type


def read_windows(fields: Fields) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(window per layer, layers without positions). If no layer has a window, all are rotated."""
    count = layer_count(fields)
    window = fields.integer("sliding_window", 4096) if fields.has("sliding_window") else 0
    if not window:
        windows = (0,) * count
    elif fields.has("layer_types"):
        windows = windows_by_type(fields, window)
    else:
        period = fields.integer("sliding_window_pattern", 4)
        windows = tuple(window if (i + 1) % period else 0 for i in range(count))
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
