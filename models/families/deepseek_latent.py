"""DeepSeek-V2, V2-Lite, V3 and R1, and Kimi K2, which is a V3 of other sizes: latent attention, mixtures of experts."""

from __future__ import annotations

import math
from dataclasses import replace

from llmc.models.brief import brief
from llmc.models.config import Experts, Latent, ModelConfig, Rope
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.mixtures import read_experts, read_sigmoid_experts, stacked
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope
from llmc.models.standard import layer_count, standard_config

# The layer behind the last one guesses the token after the next.
_LAYOUT = Layout(shared="mlp.shared_experts", other_modules=("model.layers.{}.",))
_NORM_EPS = 1e-6  # of the norms of latent vectors, whatever rms_norm_eps is
_HARMLESS = frozenset({"ep_size", "num_mtp_layers", "num_nextn_predict_layers", "qk_head_dim"})


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
    """1 / √size of a query. Yarn's mscale_all_dim multiplies scores; cosines are left what mscale is beyond it."""
    scaling, scale = rope.scaling, 1.0 / math.sqrt(latent.query_dim)
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return scale
    return scale * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2


def _read(fields: Fields, generation: Fields, experts: Experts | None) -> ModelConfig:
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
    return standard_config(
        fields.with_values(num_key_value_heads=1, head_dim=latent.key_dim),
        generation,
        attention_bias=bias,
        o_bias=bias,
        rope=rope,
        attention_scale=_score_scale(latent, rope),
        experts=experts,
        latent=latent,
    )


def _check(fields: Fields, name: str, known: tuple[str, ...]) -> str:
    """A word of the configuration, of which llmc knows these; the first one where it is not there."""
    found = fields.text(name, known[0])
    if found not in known:
        raise ModelError(f"{fields.origin}: {name} {brief(found)} is not supported; one of {', '.join(known)}")
    return found


def _sparse_layers(fields: Fields) -> tuple[int, ...]:
    """Those from first_k_dense_replace on that moe_layer_freq divides."""
    first, step = fields.integer("first_k_dense_replace", 0, minimum=0), fields.integer("moe_layer_freq", 1)
    return tuple(i for i in range(first, layer_count(fields)) if i % step == 0)


def read_v2(fields: Fields, generation: Fields) -> ModelConfig:
    """Scores are a softmax over all experts. As in DeepSeek's own code, weights are either normalised or scaled."""
    _check(fields, "scoring_func", ("softmax",))
    limited = _check(fields, "topk_method", ("greedy", "group_limited_greedy")) == "group_limited_greedy"
    groups, top_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    normalised, scale = fields.flag("norm_topk_prob", False), fields.number("routed_scaling_factor", 1.0)
    layers, experts = _sparse_layers(fields), None
    if fields.has("n_routed_experts"):
        experts = read_experts(
            fields,
            intermediate_size="moe_intermediate_size",
            layers=layers,
            scores="softmax",
            groups=groups if limited else 1,
            top_groups=top_groups if limited else 1,
            normalised=normalised,
            least_sum=1e-20,
            scale=1.0 if normalised else scale,
            shared_size=fields.integer("n_shared_experts", 0, minimum=0) * fields.integer("moe_intermediate_size"),
        )
    return _read(fields, generation, experts if layers else None)


def read_v3(fields: Fields, generation: Fields) -> ModelConfig:
    """Each expert has a score of its own, and a bias that counts for the choice alone."""
    _check(fields, "scoring_func", ("sigmoid",))
    _check(fields, "topk_method", ("noaux_tc",))
    experts, layers = read_sigmoid_experts(fields), _sparse_layers(fields)
    return _read(fields, generation, replace(experts, layers=layers) if layers else None)


_STACKED = (stacked(_LAYOUT).weight_map,)
DEEPSEEK_V2 = Family("deepseek_v2", read_v2, _LAYOUT.weight_map, other_maps=_STACKED, harmless=_HARMLESS)
DEEPSEEK_V3 = Family("deepseek_v3", read_v3, _LAYOUT.weight_map, other_maps=_STACKED, harmless=_HARMLESS)
KIMI_K2 = Family("kimi_k2", read_v3, _LAYOUT.weight_map, other_maps=_STACKED, harmless=_HARMLESS)
