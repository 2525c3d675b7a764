"""Hunyuan: heads are normed after rotation. hunyuan_v1_moe: with experts, and one that all tokens share."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.mixtures import read_experts, stacked
from llmc.models.fields import Fields
from llmc.models.known_keys import nested
from llmc.models.layout import Layout
from llmc.models.rope_fields import read_rope, rope_of, rope_table
from llmc.models.rotary import Rope
from llmc.models.standard import head_sizes, standard_config

_LAYOUT = Layout(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def _rope(fields: Fields) -> Rope:
    """For type dynamic, alpha stretches the base, at every length."""
    table, positions = rope_table(fields), fields.integer("max_position_embeddings")
    dim = head_sizes(fields)[2]
    kind = table.text("rope_type" if table.has("rope_type") else "type", "default")
    if kind != "dynamic" or not table.has("alpha"):
        return read_rope(fields, positions, dim)
    plain = rope_of(fields, table.with_values(rope_type="default", type="default"), positions, dim)
    return replace(plain, theta=plain.theta * table.number("alpha") ** (dim / (dim - 2)))


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    if fields.has("attention_head_dim"):
        dim = fields.integer("attention_head_dim")
        if fields.integer("head_dim", dim) != dim:
            raise ModelError(f"{fields.origin}: head_dim is not attention_head_dim, which is {dim}; take out one")
        fields = fields.with_values(head_dim=dim)
    if (norm := fields.text("norm_type", "rms")) not in ("rms", "hf_rms"):
        raise ModelError(f"{fields.origin}: norm_type {brief(norm)} is not supported; rms and hf_rms are")
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        qk_norm="head",
        qk_norm_rotated=True,
        default_eps=1e-5,
        rope=_rope(fields),
    )


def _same_in_all(fields: Fields, name: str, usual: int) -> int:
    """An integer that a config may state for each layer."""
    found = fields.raw(name, usual)
    if isinstance(found, list) and found and all(one == found[0] for one in found):
        fields = fields.with_values(**{name: found[0]})
    elif isinstance(found, list):
        raise ModelError(f"{fields.origin}: {name} {brief(found)} differs between layers, which is not supported")
    return fields.integer(name, usual)


def read_mixture(fields: Fields, generation: Fields) -> ModelConfig:
    inner = fields.integer("intermediate_size")
    inner = _same_in_all(fields, "moe_intermediate_size", inner)
    values = {
        "num_experts": _same_in_all(fields, "num_experts", 1),
        "num_experts_per_tok": _same_in_all(fields, "moe_topk", 1),
        "intermediate_size": inner,
    }
    shared = _same_in_all(fields, "num_shared_expert", 1) * inner
    experts = read_experts(
        fields.with_values(**values),
        intermediate_size="intermediate_size",
        scores="softmax",
        normalised=True,
        shared_size=shared,
    )
    return replace(read_config(fields, generation), experts=experts)


# Beside the text model: classification, images and videos.
_OTHER_HEADS = """
    anyres_pooling_size anyres_vit_max_image_size anyres_vit_two_views class_num dense_list eod_token_id im_end_id
    im_newline_id im_start_id mask_init_id num_media_embeds org_vocab_size pad_id pool_type skip_cls_token text_end_id
    text_start_id video_end_id video_start_id vit_add_patchemb_bias vit_input_resolution vit_mapping_type vit_norm_type
    vit_patch vit_path vit_remove_prenorm vit_token vit_type vit_used_rms_norm
    """
# Layers share keys and values with use_cla alone; alpha is all that the rotation reads.
_HARMLESS = frozenset(_OTHER_HEADS.split()) | {"cla_share_factor"}
_HARMLESS |= nested("rope_scaling", ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "type"))
_NEUTRAL = {
    "add_classification_head": False,
    "position_embedding_xdrope": False,
    "use_cla": False,
    "use_mla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}
_MIXTURE = replace(_LAYOUT, router="mlp.gate.wg", shared="mlp.shared_mlp")
HUNYUAN_V1_MOE = Family(
    "hunyuan_v1_moe",
    read_mixture,
    _MIXTURE.weight_map,
    other_maps=(stacked(_MIXTURE).weight_map,),
    harmless=_HARMLESS | {"moe_drop_tokens", "moe_random_routing_dropped_token"},
    neutral={
        **_NEUTRAL,
        "group_limited_greedy": False,
        "moe_layer_num_skipped": 0,
        "norm_topk_prob": True,
        "routed_scaling_factor": False,
        "use_mixed_mlp_moe": True,
    },
)
HUNYUAN_V1_DENSE = Family(
    "hunyuan_v1_dense", read_config, _LAYOUT.weight_map, harmless=_HARMLESS, neutral={**_NEUTRAL, "num_experts": 1}
)
