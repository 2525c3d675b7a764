"""Mamba-2 mixers as llama.cpp's converter writes them, and what it says of the layers of such models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.models import ModelConfig
from llmc.models.mamba import Mamba2

Array = NDArray[Any]


def architecture_of_granite(config: ModelConfig) -> str:
    """Without mixers, Granite 4 is a Granite like others."""
    if config.mamba is not None:
        return "granitehybrid"
    return "granite" if config.experts is None else "granitemoe"


def of_mixer(name: str, tensor: Array, net: Mamba2) -> dict[str, Array]:
    """What becomes of a tensor of a mixer."""
    if name.endswith(".conv1d.weight"):
        return {name: tensor.squeeze(1)}
    if name.endswith(".A_log"):
        # Where places are counted, as float64, a vector is not used.
        return {name: (-np.exp(tensor) if tensor.dtype == np.float32 else tensor)[:, None]}
    if name.endswith(".D"):
        return {name: tensor[:, None]}
    if name.endswith(".norm.weight"):
        return {name: tensor.reshape(net.groups, -1)}
    return {name.replace(".dt_bias", ".dt_proj.bias"): tensor}


def with_multipliers(tensors: Mapping[str, Array], fields: Mapping[str, Any], net: Mamba2) -> dict[str, Array]:
    """The tensors of Falcon-H1 times its multipliers, as the file has them. Those of what layers read are in biases,
    too, and a tied head has the embedding's."""
    gate, down = fields["mlp_multipliers"]
    read, of_group = fields["attention_in_multiplier"], net.groups * net.state_size
    parts = np.repeat(fields["ssm_multipliers"], (net.size, net.size, of_group, of_group, net.heads))
    times: dict[str, Any] = {
        "embed_tokens": fields["embedding_multiplier"],
        "lm_head": fields["lm_head_multiplier"],
        "q_proj": read,
        "k_proj": read * fields["key_multiplier"],
        "v_proj": read,
        "o_proj": fields["attention_out_multiplier"],
        "in_proj": fields["ssm_in_multiplier"] * parts[:, None],
        "out_proj": fields["ssm_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
    }
    found = dict(tensors)
    for name, tensor in tensors.items():
        if (factor := times.get(name.split(".")[-2])) is not None:
            found[name] = (tensor * factor).astype(np.float32)
    return found


def of_shared(name: str, tensor: Array, config: ModelConfig) -> dict[str, Array]:
    """What becomes of a tensor of Granite's block for all tokens: without experts, it is a layer's plain one."""
    block = "mlp" if config.experts is None else "mlp.shared_expert"
    if "output_linear" in name:
        return {name.replace("shared_mlp.output_linear", f"{block}.down_proj"): tensor}
    parts = zip(("gate_proj", "up_proj"), np.split(tensor, 2), strict=True)
    return {name.replace("shared_mlp.input_linear", f"{block}.{part}"): rows for part, rows in parts}


def of_hybrid(config: ModelConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of models whose layers differ."""
    net, experts, kind = config.mamba, config.experts, fields["model_type"]
    found: dict[str, Any] = {}
    if net is not None:
        found |= {
            "ssm.conv_kernel": net.taps,
            "ssm.state_size": net.state_size,
            "ssm.group_count": net.groups,
            "ssm.inner_size": net.size,
            "ssm.time_step_rank": net.heads,
        }
    if net is not None and not net.beside:
        without = (*net.layers, *config.mlp_only_layers)
        heads = [0 if layer in without else config.num_kv_heads for layer in range(config.num_layers)]
        found["attention.head_count_kv"] = heads
    if kind == "falcon_h1":
        # llmc's own has a multiplier.
        eps = {"attention.layer_norm_rms_epsilon": fields["rms_norm_eps"]}
        found |= {**eps, "rope.dimension_count": None, "vocab_size": config.vocab_size}
    if kind in ("granitemoehybrid", "bamba"):
        found |= {
            "attention.key_length": None,
            "attention.value_length": None,
            "rope.scaling.finetuned": kind == "bamba" or net is None,
            "rope.freq_base": config.rope.theta or 10000.0,
            "rope.dimension_count": config.rope.dim,
            "expert_count": experts.count if experts else 0,
            "expert_shared_feed_forward_length": fields.get("shared_intermediate_size"),
        }
    if kind == "nemotron_h":
        width = config.intermediate_size if experts is None else experts.intermediate_size
        found |= {
            "feed_forward_length": [width if i in config.mlp_only_layers else 0 for i in range(config.num_layers)],
            "rope.scaling.finetuned": False,
        }
    if kind == "nemotron_h" and experts is not None:
        found |= {
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": experts.shared_size,
            "expert_group_count": experts.groups,
            "moe_latent_size": experts.latent_size or None,
        }
    return found
