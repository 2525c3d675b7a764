"""MiniMax-Text-01, if every layer has softmax attention: blocks are added to their normed inputs; experts.

model_type `minimax_text_01` is the authors' own; `minimax` is that of transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.models.config import ModelConfig, ResidualFactors
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.layer_kinds import FULL, LINEAR, check_layer_types, check_layers
from llmc.models.families.minimax_m2 import read_rotation
from llmc.models.families.mixtral import LAYOUT
from llmc.models.families.mixtures import read_experts, stacked
from llmc.models.fields import Fields
from llmc.models.rope_fields import read_rope
from llmc.models.rotary import Rope
from llmc.models.standard import head_sizes, layer_count, standard_config
from llmc.models.windows import everywhere, stated_window

if TYPE_CHECKING:
    from llmc.models.blocks.normed import NormedDecoder

_LIGHTNING = "lightning attention"
_THETA = 1e6
_FACTORS = {
    "full_attn_alpha_factor": "layernorm_full_attention_alpha",
    "full_attn_beta_factor": "layernorm_full_attention_beta",
    "mlp_alpha_factor": "layernorm_mlp_alpha",
    "mlp_beta_factor": "layernorm_mlp_beta",
}
"""Names of transformers, and of published configs, in the order of `ResidualFactors`."""


def _read(fields: Fields, generation: Fields, rope: Rope) -> ModelConfig:
    return standard_config(
        fields,
        generation,
        attention_bias=False,
        o_bias=False,
        layer_windows=everywhere(fields, stated_window(fields)),
        default_eps=1e-5,
        rope=rope,
        residual="normed",
        residual_factors=ResidualFactors(*(fields.number(name, 1.0) for name in _FACTORS)),
        experts=read_experts(fields, intermediate_size="intermediate_size", scores="softmax", normalised=True),
    )


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    """Without layer_types, every other layer has linear attention.

    transformers rotates whole heads, whatever rotary_dim says; another one is a key that llmc does not know.
    """
    kinds = [LINEAR if i % 2 else FULL for i in range(layer_count(fields))]
    check_layer_types(fields, kinds, _LIGHTNING)
    head_dim = head_sizes(fields)[2]
    if fields.values.get("rotary_dim") == head_dim:
        fields.integer("rotary_dim")
    rope = read_rope(fields, fields.integer("max_position_embeddings"), head_dim, theta=_THETA)
    return _read(fields, generation, rope)


def read_published(fields: Fields, generation: Fields) -> ModelConfig:
    kinds = fields.integers("attn_type_list", layer_count(fields))
    check_layers(fields, [kind != 1 for kind in kinds], _LIGHTNING)
    if not fields.flag("postnorm", False):
        raise ModelError(f"{fields.origin}: a minimax_text_01 model whose postnorm is not true is not supported")
    return _read(fields.renamed(**_FACTORS), generation, read_rotation(fields, head_sizes(fields)[2], _THETA))


def build(config: ModelConfig, act_dtype: str, max_len: int) -> NormedDecoder:
    """`Family.build`."""
    # Imported here: reading configs and weights needs no torch.
    from llmc.models.blocks.normed import NormedDecoder

    return NormedDecoder(config, act_dtype, max_len)


MINIMAX = Family(
    "minimax",
    read_config,
    LAYOUT.weight_map,
    build,
    other_maps=(stacked().weight_map,),
    harmless=frozenset({"block_size", "linear_attn_alpha_factor", "linear_attn_beta_factor"}),
)
MINIMAX_TEXT_01 = Family(
    "minimax_text_01",
    read_published,
    LAYOUT.weight_map,
    build,
    other_maps=(stacked().weight_map,),
    harmless=frozenset({"layernorm_linear_attention_alpha", "layernorm_linear_attention_beta", "shared_moe_mode"}),
    neutral={"shared_intermediate_size": 0},
)
