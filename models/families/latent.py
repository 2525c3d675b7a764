"""Reading of config fields common to latent-attention families, by DeepSeek's names."""

from __future__ import annotations

import math
from typing import Unpack

from llmc.models.config import Latent, ModelConfig
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.rope_fields import read_rope
from llmc.models.rotary import Rope
from llmc.models.standard import Choices, standard_config

_NORM_EPS = 1e-6  # for norms of latent vectors, independent of rms_norm_eps


def _read_latent(fields: Fields) -> Latent:
    latent = Latent(
        query_rank=fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None,
        rank=fields.integer("kv_lora_rank"),
        plain_dim=fields.integer("qk_nope_head_dim"),
        rotated_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        norm_eps=_NORM_EPS,
        interleaved=fields.flag("rope_interleave", True),
    )
    sizes = {
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rotated_dim,
        "v_head_dim": latent.value_dim,
    }
    for name, size in sizes.items():
        if size % 2:
            raise ModelError(f"{fields.origin}: {name} is {size}, an even number is needed")
    return latent


def _score_scale(latent: Latent, rope: Rope) -> float:
    """1 / √query size. Yarn's mscale_all_dim multiplies scores; cosines keep the ratio of mscale to it."""
    scaling, scale = rope.scaling, 1.0 / math.sqrt(latent.query_dim)
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return scale
    return scale * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2


def read_latent_config(fields: Fields, generation: Fields, **choices: Unpack[Choices]) -> ModelConfig:
    """The configuration of a latent-attention model. choices: as for `standard_config`."""
    latent, heads, bias = (
        _read_latent(fields),
        fields.integer("num_attention_heads"),
        fields.flag("attention_bias", False),
    )
    for name, wanted in (("num_key_value_heads", heads), ("head_dim", latent.rotated_dim)):
        if fields.integer(name, wanted) != wanted:
            raise ModelError(
                f"{fields.origin}: {name} is {fields.integer(name)} where latent attention has {wanted}; take it out"
            )
    rope = read_rope(fields, fields.integer("max_position_embeddings"), latent.rotated_dim)
    choices["latent"] = latent
    return standard_config(
        fields.with_values(num_key_value_heads=1, head_dim=latent.key_dim),
        generation,
        attention_bias=bias,
        o_bias=bias,
        rope=rope,
        attention_scale=_score_scale(latent, rope),
        **choices,
    )
