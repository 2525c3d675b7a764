"""The blocks that a layer has."""

from __future__ import annotations

from llmc.models.blocks.attention import Attention
from llmc.models.blocks.beside_mamba import AttentionBesideMamba
from llmc.models.blocks.beside_plain import MlpBesideExperts
from llmc.models.blocks.delta_net import GatedDeltaNet
from llmc.models.blocks.experts import ExpertMlp
from llmc.models.blocks.latent import LatentAttention
from llmc.models.blocks.layers import Block
from llmc.models.blocks.mamba import Mamba2Mixer
from llmc.models.blocks.mlp import Mlp
from llmc.models.blocks.short_conv import GatedShortConv
from llmc.models.config import ModelConfig
from llmc.models.delta_net import DeltaNet
from llmc.models.mamba import Mamba2
from llmc.models.short_conv import ShortConv


def attention_of(
    config: ModelConfig, layer: int, act_dtype: str
) -> Attention | LatentAttention | GatedDeltaNet | GatedShortConv | Mamba2Mixer:
    """Attention of a layer, or what is in its place; also what is beside it."""
    match config.recurrent(layer):
        case DeltaNet() as net:
            return GatedDeltaNet(config, net, layer, act_dtype)
        case ShortConv() as conv:
            return GatedShortConv(config, conv, layer, act_dtype)
        case Mamba2() as mixer:
            return Mamba2Mixer(config, mixer, layer, act_dtype)
    if (beside := config.mixer_beside(layer)) is not None:
        return AttentionBesideMamba(config, beside, layer, act_dtype)
    if config.latent is not None:
        return LatentAttention(config, config.latent, layer, act_dtype)
    return Attention(config, layer, act_dtype)


def has_experts(config: ModelConfig, layer: int) -> bool:
    return config.experts is not None and layer in config.experts.layers


def feed_forward_of(config: ModelConfig, layer: int, act_dtype: str) -> Block:
    """The feed-forward block of a layer."""
    if config.experts is None or not has_experts(config, layer):
        return Mlp(config, layer, act_dtype)
    return MlpBesideExperts(config, layer, act_dtype) if config.experts.beside_plain else ExpertMlp(config, act_dtype)
