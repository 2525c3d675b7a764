"""Falcon-H1: attention and a Mamba-2 mixer side by side in each layer, and multipliers nearly everywhere."""

from __future__ import annotations

from dataclasses import replace

from llmc.models.config import ModelConfig
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.mamba import null_is_false, read_mixers
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.mamba import Mamba2, MixerNorm
from llmc.models.multipliers import Multipliers
from llmc.models.standard import head_sizes, layer_count, standard_config
from llmc.models.weight_map import WeightMap

_LAYOUT = Layout(
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    norm="model.final_layernorm",
)


def _multipliers(fields: Fields) -> Multipliers:
    def of(name: str) -> float:
        return fields.number(f"{name}_multiplier", 1.0)

    gate, down = fields.numbers("mlp_multipliers", 2) if fields.has("mlp_multipliers") else (1.0, 1.0)
    found = Multipliers(
        attention_in=of("attention_in"),
        attention_out=of("attention_out"),
        keys=of("key"),
        mixer_in=of("ssm_in"),
        mixer_out=of("ssm_out"),
        mixer_parts=fields.numbers("ssm_multipliers", 5) if fields.has("ssm_multipliers") else (1.0,) * 5,
        gate=gate,
        down=down,
        logits=of("lm_head"),
    )
    if not found.are_moderate:
        raise ModelError(
            f"{fields.origin}: multipliers whose products and quotients are not from 0.001 to 1000 are not supported"
        )
    return found


def _mixers(fields: Fields, multipliers: Multipliers) -> Mamba2:
    """Without a norm, results are gated alone."""
    fields = fields if fields.mentions("mamba_d_ssm") else fields.with_values(mamba_d_ssm=1024)
    net = read_mixers(fields, tuple(range(layer_count(fields))), size_field="mamba_d_ssm")
    norm: MixerNorm = "read" if null_is_false(fields, "mamba_norm_before_gate", True) else "gated"
    return replace(
        net,
        out_bias=fields.flag("projectors_bias", False),
        beside=True,
        norm=norm if fields.flag("mamba_rms_norm", False) else "none",
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        gate_scale=multipliers.parts[0],
        step_scale=multipliers.parts[-1],
        out_scale=multipliers.mixed,
    )


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    if not fields.mentions("num_key_value_heads"):
        fields = fields.with_values(num_key_value_heads=8)
    bias, multipliers = fields.flag("attention_bias", False), _multipliers(fields)
    config = standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        default_eps=1e-5,
        attention_scale=head_sizes(fields)[2] ** -0.5 * multipliers.scores,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0) / multipliers.residual,
        mamba=_mixers(fields, multipliers),
        multipliers=multipliers,
    )
    return replace(config, norm_eps=config.norm_eps / multipliers.residual**2)


def weight_map(config: ModelConfig) -> WeightMap:
    found = _LAYOUT.weight_map(config)
    assert config.multipliers is not None
    assert config.mamba is not None
    return replace(found, targets=tuple(config.multipliers.in_weights(found.targets, config.mamba)))


# Of training, of generation, of kernels, and what transformers has whatever they say.
_HARMLESS = """
    attn_layer_indices mamba_chunk_size mamba_use_mlp mlp_expansion_factor num_logits_to_keep time_step_floor
    time_step_max time_step_min time_step_rank
    """
FALCON_H1 = Family("falcon_h1", read_config, weight_map, harmless=frozenset(_HARMLESS.split()))
