"""From a GGUF file's metadata to the configuration of a model, through the family that reads config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from llmc.models.brief import brief
from llmc.models.config import ModelConfig, RopeScaling
from llmc.models.convert import Array
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.known_keys import check_known
from llmc.models.registry import get_family
from llmc.models.sources.gguf.architectures import Architecture
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.sources.gguf.more_fields import READ_BY, more_fields

# Scales that no model of the architectures has, and what they are where they change nothing.
_WITHOUT_EFFECT = {
    "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0,
    "attention.scale": 0.0, "logit_scale": 0.0, "residual_scale": 0.0, "embedding_scale": 0.0,
    "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0, "expert_count": 0,
}  # fmt: skip
# Of what else has a part in no logit: the tensors say the vocabulary, a factor or a type how frequencies are scaled.
_HARMLESS = (
    "vocab_size", "tensor_data_layout", "pooling_type", "expert_used_count", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.attn_factor",
)  # fmt: skip


def read_config(
    metadata: Metadata,
    architecture: Architecture,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    eos: tuple[int, ...],
    bos: int | None,
    factors: Array | None,
    *,
    allow_unknown: bool = False,
) -> tuple[ModelConfig, tuple[str, ...]]:
    """(the configuration, sentences about the metadata that are ignored).

    shapes: of tensors by the file's names, which say what is tied and what has a bias. dtype: of the matrices, as
    ModelConfig has it. factors: of the rotary frequencies, see `ROPE_FACTORS`. allow_unknown: metadata of the
    architecture that nobody reads are no error. Raises ModelError."""
    origin = metadata.origin
    key = f"{architecture.name}.{{}}".format
    more = more_fields(metadata, architecture, shapes)
    for name, neutral in _WITHOUT_EFFECT.items():
        if name not in READ_BY.get(architecture.name, ()) and metadata.number(key(name), neutral) != neutral:
            raise ModelError(f"{origin}: metadata {key(name)} is {metadata.number(key(name))}, which is not supported")
    heads = metadata.same_integer(key("attention.head_count"))
    hidden = metadata.integer(key("embedding_length"))
    head_dim = metadata.integer(key("attention.key_length"), max(1, hidden // heads))
    if metadata.integer(key("attention.value_length"), head_dim) != head_dim:
        raise metadata.wrong(key("attention.value_length"), f"{head_dim} as the length of a key")
    rotated = metadata.integer(key("rope.dimension_count"), head_dim, maximum=head_dim)
    context = metadata.integer(key("context_length"))
    fields: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": _vocabulary(shapes, origin),
        "hidden_size": hidden,
        "intermediate_size": metadata.same_integer(key("feed_forward_length")),
        "num_hidden_layers": metadata.integer(key("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.same_integer(key("attention.head_count_kv"), heads),
        "head_dim": head_dim,
        "partial_rotary_factor": _share(rotated, head_dim),
        "rope_theta": metadata.number(key("rope.freq_base"), 10000.0),
        "max_position_embeddings": context,
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype],
        "eos_token_id": list(eos),
        "bos_token_id": bos,
        "rope_scaling": _scaling(metadata, key("rope.scaling"), context),
        **more,
    }
    family = get_family(fields["model_type"])
    config = family.read_config(Fields(fields, f"{origin} (metadata)"), Fields({}, origin))
    unread = ((name, value) for name, value in metadata.unread(key("")) if name not in map(key, _HARMLESS))
    ignored = check_known(origin, unread, family, allow_unknown=allow_unknown)
    if factors is not None:
        config = replace(config, rope=replace(config.rope, scaling=_of_factors(config, factors, origin)))
    config = replace(
        config,
        attention_bias=config.attention_bias or "blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
    )
    return config, ignored


def _vocabulary(shapes: Mapping[str, tuple[int, ...]], origin: str) -> int:
    shape = shapes.get("token_embd.weight")
    if shape is None:
        raise ModelError(f"{origin} lacks the tensor token_embd.weight; download the file again")
    return shape[0]


def _share(part: int, whole: int) -> float:
    """The least number that makes `part` of `whole` when the product is cut to an integer."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 2.0)


def _scaling(metadata: Metadata, key: str, context: int) -> dict[str, Any] | None:
    """`rope_scaling` as config.json has it."""
    kind = metadata.text(f"{key}.type", "none")
    factor = metadata.number(f"{key}.factor", 0.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ModelError(
            f"{metadata.origin}: metadata {key}.type is {brief(kind)}, which is not one of none, linear, yarn"
        )
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.integer(f"{key}.original_context_length", context),
    }
    for name in ("beta_fast", "beta_slow"):
        if metadata.has(f"{key}.yarn_{name}"):
            scaling[name] = metadata.number(f"{key}.yarn_{name}")
    attention = metadata.number(f"{key}.attn_factor", 1.0)
    if attention != 1.0:
        scaling["attention_factor"] = attention * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    return scaling


def _of_factors(config: ModelConfig, factors: Array, origin: str) -> RopeScaling | None:
    """Divisors of the frequencies, which other scaling there is none beside."""
    if factors.shape != (config.rope.dim // 2,):
        raise ModelError(
            f"{origin}: tensor rope_freqs.weight has shape {list(factors.shape)} where the metadata imply "
            f"[{config.rope.dim // 2}]; download the file again"
        )
    if not bool((np.isfinite(factors) & (factors > 0)).all()):
        bad = float(factors[~(np.isfinite(factors) & (factors > 0))][0])
        raise ModelError(f"{origin}: tensor rope_freqs.weight has the factor {bad}; download the file again")
    if bool((factors == 1).all()):
        return config.rope.scaling
    if config.rope.scaling is not None:
        raise ModelError(
            f"{origin} has both rope_freqs.weight and rope scaling {config.rope.scaling.rope_type}, of which llmc "
            "knows no order; convert the model again"
        )
    length = config.max_position_embeddings
    return RopeScaling("factors", 1.0, length, frequency_factors=tuple(float(f) for f in factors))
