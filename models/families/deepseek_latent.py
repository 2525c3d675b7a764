"""DeepSeek-V2, V2-Lite, V3 and R1, Kimi K2 and GLM-4.7-Flash (V3s of other sizes): latent attention, mixtures of
experts. Youtu-LLM has no experts."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.brief import brief
from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.latent import read_latent_config
from llmc.models.families.mixtures import read_experts, read_sigmoid_experts, stacked
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.mtp_layout import DEEPSEEK_MTP
from llmc.models.standard import layer_count

# The layer behind the last one guesses the token after the next.
LATENT_LAYOUT = Layout(shared="mlp.shared_experts", other_modules=("model.layers.{}.",))
_HARMLESS = frozenset({"ep_size", "num_mtp_layers", "num_nextn_predict_layers", "qk_head_dim"})


def _check(fields: Fields, name: str, known: tuple[str, ...]) -> str:
    """A config word that must be one of `known`; the first is the default."""
    found = fields.text(name, known[0])
    if found not in known:
        raise ModelError(f"{fields.origin}: {name} {brief(found)} is not supported; one of {', '.join(known)}")
    return found


def _sparse_layers(fields: Fields) -> tuple[int, ...]:
    """Layers from first_k_dense_replace on whose number moe_layer_freq divides."""
    first, step = fields.integer("first_k_dense_replace", 0, minimum=0), fields.integer("moe_layer_freq", 1)
    return tuple(i for i in range(first, layer_count(fields)) if i % step == 0)


def read_v2(fields: Fields, generation: Fields) -> ModelConfig:
    """Scores are a softmax over all experts. As in DeepSeek's own code, weights are normalised or scaled, never
    both."""
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
    return read_latent_config(fields, generation, experts=experts if layers else None)


def read_v3(fields: Fields, generation: Fields) -> ModelConfig:
    """Each expert has its own sigmoid score, and a bias that affects only the choice."""
    _check(fields, "scoring_func", ("sigmoid",))
    _check(fields, "topk_method", ("noaux_tc",))
    experts, layers = read_sigmoid_experts(fields), _sparse_layers(fields)
    return read_latent_config(fields, generation, experts=replace(experts, layers=layers) if layers else None)


def read_glm4_lite(fields: Fields, generation: Fields) -> ModelConfig:
    """mlp_layer_types says which layers have experts: all but the first, if it is missing."""
    experts, count = read_sigmoid_experts(fields), layer_count(fields)
    if fields.has("mlp_layer_types"):
        layers = tuple(i for i, kind in enumerate(fields.texts("mlp_layer_types", count)) if kind == "sparse")
    else:
        layers = tuple(range(fields.integer("first_k_dense_replace", 1, minimum=0), count))
    return read_latent_config(fields, generation, experts=replace(experts, layers=layers) if layers else None)


def read_youtu(fields: Fields, generation: Fields) -> ModelConfig:
    return read_latent_config(
        fields.with_values(tie_word_embeddings=fields.flag("tie_word_embeddings", True)), generation
    )


_STACKED = (stacked(LATENT_LAYOUT).weight_map,)
DEEPSEEK_V2 = Family("deepseek_v2", read_v2, LATENT_LAYOUT.weight_map, other_maps=_STACKED, harmless=_HARMLESS)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    read_v3,
    LATENT_LAYOUT.weight_map,
    other_maps=_STACKED,
    harmless=_HARMLESS,
    mtp=DEEPSEEK_MTP,
)
GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    read_glm4_lite,
    LATENT_LAYOUT.weight_map,
    other_maps=_STACKED,
    harmless=_HARMLESS,
    mtp=DEEPSEEK_MTP,
)
YOUTU = Family("youtu", read_youtu, harmless=_HARMLESS | {"embedding_initializer_range"})
KIMI_K2 = Family("kimi_k2", read_v3, LATENT_LAYOUT.weight_map, other_maps=_STACKED, harmless=_HARMLESS)
