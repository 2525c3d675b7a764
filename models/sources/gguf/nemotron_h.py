"""Nemotron-H and Nemotron 3 as llama.cpp's files have them: names of their tensors, and what their metadata say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmc.models.errors import ModelError
from llmc.models.families.layer_kinds import FULL, LINEAR
from llmc.models.families.nemotron_h import EXPERTS, MLP
from llmc.models.layout import Layout
from llmc.models.sources.gguf import mamba
from llmc.models.sources.gguf.mixture_fields import expert_counts, only_sigmoid, weights_of_experts
from llmc.models.sources.gguf.part_names import layers_with
from llmc.models.sources.gguf.reader import Reader

LAYOUT = Layout(
    # A layer is one block, with one norm.
    mlp_norm=Layout().attention_norm,
    expert_gate_up=("mlp.experts.{}.up_proj.weight",),
    shared_gate_up=("up_proj",),
    expert_latent=("mlp.latent_in", "mlp.latent_out"),
    mamba=mamba.LAYOUT,
)
OF_LAYERS = {
    **mamba.OF_LAYERS,
    **{
        f"ffn_latent_{theirs}.weight": f"{ours}.weight"
        for theirs, ours in zip(("down", "up"), LAYOUT.expert_latent, strict=True)
    },
}
"""Tensors of a layer, theirs to those of a checkpoint."""
_HEADS, _INNER, _LATENT = "attention.head_count_kv", "feed_forward_length", "moe_latent_size"


def _read(read: Reader) -> dict[str, Any]:
    """Steps of mixers have no bounds in llama.cpp."""
    read.no_window()
    heads, sizes = read.of_layers(_HEADS), read.of_layers(_INNER)
    kinds = _kinds(read, heads, sizes)
    found: dict[str, Any] = {
        **read.eps(),
        # Without layers that have them, any number.
        "num_key_value_heads": max(heads) or 1,
        "intermediate_size": max(sizes) or 1,
        "layers_block_type": kinds,
        "mlp_bias": bool(layers_with("ffn_up.bias", iter(read.shapes))),
    }
    if LINEAR in kinds:
        net = mamba.read_sizes(read)
        found |= {
            "mamba_num_heads": net.heads,
            "mamba_head_dim": net.head_dim,
            "ssm_state_size": net.state_size,
            "n_groups": net.groups,
            "conv_kernel": net.taps,
            "use_conv_bias": net.conv_bias,
            "use_bias": net.bias,
            "time_step_min": 0.0,
        }
    return found | (_experts(read) if EXPERTS in kinds else {})


def _kinds(read: Reader, heads: list[int], sizes: list[int]) -> list[str]:
    """Layers with KV heads have attention, others with a size have a feed-forward block, and the rest have mixers.
    Raises ModelError unless tensors agree."""
    if both := [i for i, pair in enumerate(zip(heads, sizes, strict=True)) if all(pair)]:
        raise ModelError(
            f"{read.metadata.origin}: by metadata {read.key(_HEADS)} and {read.key(_INNER)}, layer {both[0]} has both "
            "attention and a feed-forward block; convert the model again"
        )
    mixers = [i for i, pair in enumerate(zip(heads, sizes, strict=True)) if not any(pair)]
    read.check_layers(mamba.OF_EACH, mixers, "a Mamba-2 mixer", f"{_HEADS} and {_INNER}")
    routed = layers_with("ffn_gate_inp.weight", iter(read.shapes))
    feed_forward = [EXPERTS if i in routed else MLP for i in range(len(heads))]
    return [LINEAR if i in mixers else FULL if number else feed_forward[i] for i, number in enumerate(heads)]


def _experts(read: Reader) -> dict[str, Any]:
    only_sigmoid(read)
    latent = read.rows("ffn_latent_down.weight")
    if read.metadata.integer(read.key(_LATENT), latent, minimum=0) != latent:
        raise read.metadata.wrong(read.key(_LATENT), f"{latent}, as the rows of ffn_latent_down.weight")
    return {
        **expert_counts(read),
        **weights_of_experts(read, normalised=True),
        "moe_shared_expert_intermediate_size": read.rows("ffn_up_shexp.weight"),
        "moe_latent_size": latent,
    }


NEMOTRONS: Mapping[str, Callable[[Reader], dict[str, Any]]] = dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _read)
