"""Gemma: norm weights stored minus 1, scaled embedding, GELU. Gemma 2: norms before and after both blocks, windows,
capped scores; VaultGemma has those before them only. Gemma 3: normed heads instead of caps, two rotary bases. Of the
model with images (gemma3), llmc has the text decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmc.models.config import ModelConfig, Residual
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.with_images import harmless_with_images, neutral_with_images, text_fields, within
from llmc.models.fields import Fields
from llmc.models.layout import Layout, behind
from llmc.models.rope_fields import read_rope, rope_of, rope_table
from llmc.models.rotary import Rope
from llmc.models.standard import read_activation, standard_config
from llmc.models.windows import all_but, stated_window

_LAYOUT = Layout(norm_plus=1.0)
_SANDWICH = Layout(norm_plus=1.0, mlp_norm="pre_feedforward_layernorm")
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.")
_WITH_IMAGES = replace(behind(_SANDWICH, "language_model."), other_modules=_OF_IMAGES)
# As newer versions of transformers call them.
_WITHIN = within(_SANDWICH, *_OF_IMAGES)
_PERIOD_2, _PERIOD = 2, 6  # of layers, the last of which has no window
_LOCAL_THETA = 10000.0


def _read(fields: Fields, generation: Fields, **more: Any) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    if fields.flag("use_bidirectional_attention", False):
        raise ModelError(f"{fields.origin}: use_bidirectional_attention is not supported")
    # The first checkpoints say gelu in hidden_act but mean gelu_pytorch_tanh; hidden_activation was added to state it.
    name = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    activation = read_activation(fields, name, "gelu_pytorch_tanh")
    activation = "gelu_tanh" if activation == "gelu" else activation
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        activation=activation,
        tie_word_embeddings=True,
        head_dim=256,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        **more,
    )


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    return _read(fields, generation)


def _windows(fields: Fields, period: int) -> tuple[int, ...]:
    """Window per layer. period: without layer_types, every period-th layer has none."""
    return all_but(fields, stated_window(fields, 4096), period)


def _cap(fields: Fields, name: str, default: float | None) -> float | None:
    """A bound; null means none."""
    if fields.mentions(name):
        default = None
    return fields.number(name) if fields.has(name) else default


def _read_2(fields: Fields, generation: Fields, residual: Residual) -> ModelConfig:
    return _read(
        fields,
        generation,
        layer_windows=_windows(fields, _PERIOD_2),
        residual=residual,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_cap=_cap(fields, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(fields, "final_logit_softcapping", 30.0),
    )


def read_config_2(fields: Fields, generation: Fields) -> ModelConfig:
    return _read_2(fields, generation, "sandwich")


def read_vault(fields: Fields, generation: Fields) -> ModelConfig:
    return _read_2(fields, generation, "pre")


def _ropes(fields: Fields) -> tuple[Rope, Rope]:
    """(of layers without a window, of layers with one)."""
    positions, head_dim = fields.integer("max_position_embeddings"), fields.integer("head_dim", 256)
    table = rope_table(fields)
    whole, local = table.table("full_attention"), table.table("sliding_attention")
    if whole is not None and local is not None:
        return rope_of(fields, whole, positions, head_dim), rope_of(fields, local, positions, head_dim)
    theta = fields.number("rope_local_base_freq", _LOCAL_THETA)
    return read_rope(fields, positions, head_dim, theta=1e6), Rope(theta, head_dim)


def read_config_3(fields: Fields, generation: Fields) -> ModelConfig:
    if fields.has("attn_logit_softcapping"):
        # transformers reads the field but ignores it.
        raise ModelError(f"{fields.origin}: attn_logit_softcapping is not supported")
    rope, local = _ropes(fields)
    if rope.scaling is not None and rope.scaling.rope_type == "linear":
        # max_position_embeddings is the stretched length.
        original = int(fields.integer("max_position_embeddings") / rope.scaling.factor)
        rope = replace(rope, scaling=replace(rope.scaling, original_max_position_embeddings=original))
    return _read(
        fields,
        generation,
        qk_norm="head",
        layer_windows=_windows(fields, fields.integer("sliding_window_pattern", _PERIOD)),
        residual="sandwich",
        rope=rope,
        local_rope=local,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_cap=_cap(fields, "final_logit_softcapping", None),
    )


_OF_MOST = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


def read_config_with_images(fields: Fields, generation: Fields) -> ModelConfig:
    """Published files only state values in the text table that differ from the usual."""
    return replace(read_config_3(text_fields(fields, _OF_MOST), generation), model_type=fields.text("model_type"))


# hidden_act is read without hidden_activation, the pattern without layer types.
GEMMA = Family("gemma", read_config, _LAYOUT.weight_map, harmless=frozenset({"hidden_act"}))
_HARMLESS_2 = frozenset({"hidden_act", "sliding_window_size"})
GEMMA2 = Family("gemma2", read_config_2, _SANDWICH.weight_map, harmless=_HARMLESS_2)
VAULTGEMMA = Family("vaultgemma", read_vault, _SANDWICH.weight_map, harmless=_HARMLESS_2)
_HARMLESS_3 = frozenset({"hidden_act", "sliding_window_pattern", "_sliding_window_pattern"})
GEMMA3_TEXT = Family("gemma3_text", read_config_3, _SANDWICH.weight_map, harmless=_HARMLESS_3)
GEMMA3 = Family(
    "gemma3",
    read_config_with_images,
    _WITH_IMAGES.weight_map,
    other_maps=(_WITHIN.weight_map,),
    harmless=harmless_with_images(_HARMLESS_3),
    neutral=neutral_with_images({}),
)
