"""From GGUF metadata to a model's configuration, through the family that reads config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llmc.models.config import Experts, ModelConfig
from llmc.models.errors import ModelError
from llmc.models.fields import Fields
from llmc.models.known_keys import check_known
from llmc.models.registry import get_family
from llmc.models.rope_fields import read_rope
from llmc.models.sources.gguf.architecture import ROPE_FACTORS, Architecture
from llmc.models.sources.gguf.delta_net import in_order_of_file
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.sources.gguf.more_fields import more_fields
from llmc.models.sources.gguf.part_names import layers_with
from llmc.models.sources.gguf.reader import Reader
from llmc.models.sources.gguf.rope_metadata import Factors, latent_yarn, rope_scaling, with_factors
from llmc.models.sources.gguf.task import with_task_of_file
from llmc.models.tasks import with_rank_prompt

# Scales unused by these architectures, with the values at which they have no effect.
_WITHOUT_EFFECT = {
    "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0,
    "attention.scale": 0.0, "logit_scale": 0.0, "residual_scale": 0.0, "embedding_scale": 0.0,
    "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0, "expert_count": 0, "expert_group_scale": 0.0, "router_logit_softcapping": 0.0,
}  # fmt: skip
# Other metadata without effect on logits: tensors give the vocabulary size, and a factor or type gives the scaling.
_HARMLESS = (
    "vocab_size", "tensor_data_layout", "pooling_type", "expert_used_count", "rope.scaling.finetuned",
    "classifier.output_labels", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.attn_factor",
)  # fmt: skip


def read_config(
    metadata: Metadata,
    architecture: Architecture,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    eos: tuple[int, ...],
    bos: int | None,
    factors: Factors,
    *,
    allow_unknown: bool = False,
    task: str = "auto",
    pooling: str = "auto",
    rank_prompt: str = "auto",
) -> tuple[ModelConfig, tuple[str, ...]]:
    """(configuration, sentences on ignored metadata).

    shapes: tensor shapes by the file's names, which show ties and biases. dtype: of the matrices, as in ModelConfig.
    factors: divisors of rotary frequencies. allow_unknown: accept unread metadata of the architecture. task, pooling:
    as in `ModelSource`. Raises ModelError."""
    origin = metadata.origin
    key = f"{architecture.name}.{{}}".format
    more = more_fields(metadata, architecture, shapes)

    def of_layers(ours: str, theirs: str, default: int | None = None) -> int:
        """An integer of all layers, unless the architecture's own fields have it."""
        if ours in more and metadata.was_read(key(theirs)):
            return int(more[ours])
        return metadata.same_integer(key(theirs), default)

    heads = metadata.same_integer(key("attention.head_count"))
    hidden = metadata.integer(key("embedding_length"))
    head_dim = metadata.integer(key("attention.key_length"), max(1, hidden // heads))
    latent = "kv_lora_rank" in more
    if metadata.integer(key("attention.value_length"), head_dim) != head_dim and not latent:
        raise metadata.wrong(key("attention.value_length"), f"{head_dim} as the length of a key")
    rotated = metadata.integer(key("rope.dimension_count"), head_dim, maximum=head_dim)
    context = metadata.integer(key("context_length"))
    scaling = rope_scaling(metadata, key("rope.scaling"), context, factors)
    if scaling is not None and not architecture.truncated:
        scaling["truncate"] = False
    fields: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": _vocabulary(shapes, origin),
        "hidden_size": hidden,
        "intermediate_size": of_layers("intermediate_size", "feed_forward_length"),
        "num_hidden_layers": Reader(metadata, architecture, shapes).layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": of_layers("num_key_value_heads", "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "partial_rotary_factor": _share(rotated, head_dim),
        "rope_theta": metadata.number(key("rope.freq_base"), 10000.0),
        "max_position_embeddings": context,
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype],
        "eos_token_id": list(eos),
        "bos_token_id": bos,
        "rope_scaling": latent_yarn(metadata, key("rope.scaling"), scaling) if latent else scaling,
        **more,
    }
    _check_without_effect(metadata, key, origin)
    family = get_family(fields["model_type"])
    told = Fields(fields, f"{origin} (metadata)")
    config = family.read_config(told, Fields({}, origin))
    if config.rope.theta is not None and rotated < config.rope.dim == head_dim and told.has("partial_rotary_factor"):
        # llama.cpp rotates so many elements in every family.
        config = replace(config, rope=read_rope(told, context, head_dim, partial=1.0))
    if metadata.flag(key("attention.causal"), not config.bidirectional) == config.bidirectional:
        raise metadata.wrong(key("attention.causal"), str(not config.bidirectional).lower())
    unread = ((name, value) for name, value in metadata.unread(key("")) if name not in map(key, _HARMLESS))
    ignored = check_known(origin, unread, family, allow_unknown=allow_unknown)
    if ROPE_FACTORS in factors:
        config = replace(config, rope=with_factors(config, factors[ROPE_FACTORS], origin))
    config = in_order_of_file(_as_tensors_say(config, shapes), architecture)
    config = with_task_of_file(config, metadata, key("pooling_type"), family, shapes, task, pooling)
    return with_rank_prompt(config, origin, rank_prompt), ignored


def _check_without_effect(metadata: Metadata, key: Callable[[str], str], origin: str) -> None:
    """Checks the metadata that nobody read."""
    for name, neutral in _WITHOUT_EFFECT.items():
        if not metadata.was_read(key(name)) and metadata.number(key(name), neutral) != neutral:
            raise ModelError(f"{origin}: metadata {key(name)} is {metadata.number(key(name))}, which is not supported")


def _as_tensors_say(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The configuration with the biases and expert layers that the tensors show. Not every layer has every part."""

    def has(*parts: str) -> bool:
        found = (layers_with(f"{part}.bias", iter(shapes)) for part in parts)
        return any(layers and layers[0] < config.num_layers for layers in found)

    norms = ("output_norm.bias", "token_embd_norm.bias")
    return replace(
        config,
        attention_bias=has("attn_q", "attn_qkv", "attn_q_a", "attn_kv_a_mqa"),
        o_bias=has("attn_output"),
        mlp_bias=has("ffn_up"),
        head_bias="output.bias" in shapes,
        norm_bias=config.norm_bias and (has("attn_norm", "attn_output_norm") or any(name in shapes for name in norms)),
        experts=None if config.experts is None else _experts_of(config.experts, config.num_layers, shapes),
        token_types=config.token_types if "token_types.weight" in shapes else 0,
    )


def _experts_of(experts: Experts, num_layers: int, shapes: Mapping[str, tuple[int, ...]]) -> Experts | None:
    layers = tuple(i for i in layers_with("ffn_gate_inp.weight", iter(shapes)) if i < num_layers)
    return replace(experts, layers=layers) if layers else None


def _vocabulary(shapes: Mapping[str, tuple[int, ...]], origin: str) -> int:
    shape = shapes.get("token_embd.weight")
    if shape is None:
        raise ModelError(f"{origin} lacks the tensor token_embd.weight; download the file again")
    return shape[0]


def _share(part: int, whole: int) -> float:
    """The least number whose product with `whole`, truncated, is `part`."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 2.0)
