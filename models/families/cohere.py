"""Command R (cohere) and Command R7B and A (cohere2): both blocks read one layer norm without bias; scaled logits."""

from __future__ import annotations

from llmc.models.config import ModelConfig, QkNorm
from llmc.models.families.family import Family
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.standard import layer_count, standard_config
from llmc.models.windows import all_but, stated_window

_LAYOUT = Layout(interleaved=True)
_PERIOD = 4  # layers; the last of them has no window


def _read(
    fields: Fields, generation: Fields, windows: tuple[int, ...], unrotated: tuple[int, ...], qk_norm: QkNorm
) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        qk_norm=qk_norm,
        layer_windows=windows,
        eps="layer_norm_eps",
        default_eps=1e-5,
        tie_word_embeddings=True,
        norm="layer",
        residual="parallel",
        logit_multiplier=fields.number("logit_scale", 0.0625),
        unrotated_layers=unrotated,
    )


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """use_qk_norm: each head of q and k has its own norm."""
    qk_norm: QkNorm = "each_head" if fields.flag("use_qk_norm", False) else "none"
    return _read(fields, generation, (0,) * layer_count(fields), (), qk_norm)


def read_config_2(fields: Fields, generation: Fields) -> ModelConfig:
    """Layers without a window have no positions."""
    windows = all_but(fields, stated_window(fields, 4096), fields.integer("sliding_window_pattern", _PERIOD))
    unrotated = tuple(i for i, own in enumerate(windows) if not own)
    return _read(fields, generation, windows, unrotated, "none")


COHERE = Family("cohere", read_config, _LAYOUT.weight_map)
# Constants in the authors' own checkpoints. The pattern is read if there are no layer types.
_SAME_IN_ALL = {
    "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0, "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
}  # fmt: skip
COHERE2 = Family(
    "cohere2",
    read_config_2,
    _LAYOUT.weight_map,
    harmless=frozenset({"sliding_window_pattern", "_sliding_window_pattern", "use_parallel_embedding"}),
    neutral=_SAME_IN_ALL,
)
