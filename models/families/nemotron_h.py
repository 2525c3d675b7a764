"""Nemotron-H and Nemotron 3: a layer is one block, a Mamba-2 mixer, attention without positions, or a feed-forward
block without a gate, plain or of experts."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.brief import brief
from llmc.models.config import Experts, ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.layer_kinds import FULL, LINEAR, OLD_NAMES
from llmc.models.families.mamba import checked
from llmc.models.families.mixtures import sigmoid_experts
from llmc.models.fields import Fields
from llmc.models.layout import Layout, behind
from llmc.models.mamba import Mamba2
from llmc.models.mamba_layout import MambaLayout
from llmc.models.rotary import NO_ROPE
from llmc.models.standard import MAX_LAYERS, read_activation, standard_config

MLP, EXPERTS = "mlp", "moe"
"""Kinds of layers beside those of `layer_kinds`."""
_BY_LETTER = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
_USUAL = (LINEAR, EXPERTS, FULL, MLP)

_LAYOUT = Layout(
    embed="embeddings",
    layer="layers.{}",
    attention_norm="norm",
    mlp_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    up="mixer.up_proj",
    down="mixer.down_proj",
    router="mixer.gate",
    choice_bias="mixer.gate.e_score_correction_bias",
    expert_gate_up=("mixer.experts.{}.up_proj.weight",),
    expert_down="mixer.experts.{}.down_proj.weight",
    shared="mixer.shared_experts",
    shared_gate_up=("up_proj",),
    expert_latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
    norm="norm_f",
    head="",
    mamba=MambaLayout("mixer"),
    unused=(),
)


def _within(prefix: str, *, stacked: bool = False) -> Layout:
    """stacked: one tensor has a matrix of all experts."""
    layout = replace(behind(_LAYOUT, prefix), head="lm_head", other_modules=("mtp.",))
    if not stacked:
        return layout
    return replace(layout, expert_gate_up=("mixer.experts.up_proj",), expert_down="mixer.experts.down_proj")


def _kinds(fields: Fields) -> tuple[str, ...]:
    """What each layer is. Their number is that of the pattern, whatever num_hidden_layers says."""
    fields.has("num_hidden_layers")
    name = "layers_block_type" if fields.has("layers_block_type") else "layer_types"
    if fields.has(name):
        listed = fields.raw(name)
        if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_LAYERS:
            raise ModelError(f"{fields.origin}: {name} is not a list of 1 to {MAX_LAYERS} kinds of layers")
        found = [OLD_NAMES.get(kind, kind) for kind in fields.texts(name, len(listed))]
        if fields.has("hybrid_override_pattern") and found != _of_pattern(fields):
            raise ModelError(f"{fields.origin}: {name} and hybrid_override_pattern state different layers")
    else:
        found = _of_pattern(fields) if fields.has("hybrid_override_pattern") else list(_USUAL)
    for kind in found:
        if kind not in _BY_LETTER.values():
            known = ", ".join(_BY_LETTER.values())
            raise ModelError(f"{fields.origin}: the kind of layer {brief(kind)} is not one of {known}")
    if not {LINEAR, FULL} & set(found):
        raise ModelError(f"{fields.origin}: no layer has a mixer or attention, so tokens would not see each other")
    return tuple(found)


def _of_pattern(fields: Fields) -> list[str]:
    pattern = fields.text("hybrid_override_pattern")
    if not 1 <= len(pattern) <= MAX_LAYERS:
        raise ModelError(f"{fields.origin}: hybrid_override_pattern has not 1 to {MAX_LAYERS} letters")
    return [_BY_LETTER.get(letter, letter) for letter in pattern]


def _experts(fields: Fields, layers: tuple[int, ...]) -> Experts:
    if fields.flag("mlp_bias", False):
        raise ModelError(f"{fields.origin}: experts beside which mlp_bias gives others biases are not supported")
    return sigmoid_experts(
        fields,
        layers=layers,
        shared_size=fields.integer("moe_shared_expert_intermediate_size", 7688),
        activation=read_activation(fields, "mlp_hidden_act", "relu2"),
        gated=False,
        latent_size=fields.integer("moe_latent_size", 0, minimum=0),
    )


def _mixers(fields: Fields, layers: tuple[int, ...]) -> Mamba2:
    """Steps have a lower bound, as in transformers; its upper bound is infinity."""
    net = Mamba2(
        layers,
        heads=fields.integer("mamba_num_heads", 128),
        head_dim=fields.integer("mamba_head_dim", 64),
        state_size=fields.integer("ssm_state_size", 128),
        groups=fields.integer("n_groups", 8),
        taps=fields.integer("conv_kernel", 4),
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False),
        least_step=max(0.0, fields.number("time_step_min", 0.001, positive=False)),
    )
    return checked(fields, net, "n_groups", "conv_kernel", "mamba_hidden_act")


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    fields = fields.renamed(head_dim="attention_head_dim")
    kinds = _kinds(fields)
    if not fields.mentions("num_key_value_heads"):
        fields = fields.with_values(num_key_value_heads=8)

    def layers(*of: str) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(kinds) if kind in of)

    return standard_config(
        fields.with_values(num_hidden_layers=len(kinds)),
        generation,
        attention_bias=False,
        o_bias=False,
        mlp_bias=fields.flag("mlp_bias", False),
        head_dim=128,
        eps="layer_norm_epsilon",
        default_eps=1e-5,
        activation=read_activation(fields, "mlp_hidden_act", "relu2"),
        intermediate_size=21504,
        rope=NO_ROPE,
        gated=False,
        experts=_experts(fields, layers(EXPERTS)) if EXPERTS in kinds else None,
        mamba=_mixers(fields, layers(LINEAR)) if LINEAR in kinds else None,
        mlp_only_layers=layers(MLP, EXPERTS),
        mixer_only_layers=layers(LINEAR, FULL),
    )


_PUBLISHED, _RENAMED = _within("backbone."), _within("model.")
_OTHERS = (_within("backbone.", stacked=True), _RENAMED, _within("model.", stacked=True))
# Of training, of kernels, of multi-token prediction, and of positions that attention has not. A linear layer's bias has
# another key, and so have the norms' eps and the number of shared experts, which is 1.
_HARMLESS = """
    chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype moe_shared_expert_overlap mtp_hybrid_override_pattern
    mtp_layers_block_type n_shared_experts norm_eps num_logits_to_keep num_nextn_predict_layers partial_rotary_factor
    rescale_prenorm_residual residual_in_fp32 rms_norm_eps rope_theta time_step_floor time_step_limit time_step_max
    time_step_rank use_mamba_kernels
    """
OF_KINDS = frozenset({
    "conv_kernel", "mamba_head_dim", "mamba_hidden_act", "mamba_num_heads", "moe_intermediate_size", "moe_latent_size",
    "moe_shared_expert_intermediate_size", "n_group", "n_groups", "n_routed_experts", "norm_topk_prob",
    "num_experts_per_tok", "routed_scaling_factor", "ssm_state_size", "time_step_min", "topk_group", "use_bias",
    "use_conv_bias",
})  # fmt: skip
"""Fields that are read where there are layers of a kind."""
NEMOTRON_H = Family(
    "nemotron_h",
    read_config,
    _PUBLISHED.weight_map,
    other_maps=tuple(layout.weight_map for layout in _OTHERS),
    harmless=OF_KINDS | frozenset(_HARMLESS.split()),
)
