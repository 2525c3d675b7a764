"""Architectures of llama.cpp that llmc has, by exact name, and what their tensors are called here and there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from llmc.models.brief import brief
from llmc.models.errors import ModelError

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PLAIN = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_OF_MIXTRAL = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)", re.ASCII)
_OUR_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", re.ASCII)
_NUMBER = re.compile(r"\.(\d+)\.", re.ASCII)
_PAIRED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)", re.ASCII)
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: no weight, a part of the configuration."""
_ONE_ROW = "ffn_gate_inp_shexp"
"""A matrix of one row, which files have as a vector."""


@dataclass(frozen=True)
class Place:
    """A tensor of a file, or a matrix of it. expert: of a tensor of all experts, None: all of it. one_row: it is a
    matrix of one row, whatever its shape."""

    name: str
    expert: int | None = None
    one_row: bool = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Of the matrix, where the file's tensor has that shape."""
        if self.expert is not None:
            return stored[1:]
        return (1, *stored) if self.one_row and len(stored) == 1 else stored


@dataclass(frozen=True)
class Architecture:
    """model_type: of the family. paired: rows of q and k are in the order of `HeadRows`. layer: what parts of a layer
    are called, theirs and ours. experts: the same of tensors of all experts, ours with {} for the expert's number.
    norm_plus: what the file's norm weights have been added to those of the family's checkpoints. mixture: what it is
    where there are experts."""

    name: str
    model_type: str
    paired: bool = False
    layer: Mapping[str, str] = field(default_factory=lambda: _PLAIN)
    experts: Mapping[str, str] = field(default_factory=dict)
    norm_plus: float = 0.0
    mixture: Architecture | None = None

    def has_paired_rows(self, name: str) -> bool:
        """Whether the file's tensor `name` has."""
        return self.paired and _PAIRED.fullmatch(name) is not None

    def places(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Place]]:
        """What transformers calls the file's tensor, or the matrices in it; its own name where it has none there."""
        whole, _, kind = name.rpartition(".")
        found = _LAYER.fullmatch(name)
        if found is not None and found[2] in self.experts and len(shape) == 3:
            ours = f"model.layers.{found[1]}.{self.experts[found[2]]}.{found[3]}"
            for expert in range(shape[0]):
                yield ours.format(expert), Place(name, expert)
        elif found is not None and found[2] in self.layer:
            yield (
                f"model.layers.{found[1]}.{self.layer[found[2]]}.{found[3]}",
                Place(name, one_row=found[2] == _ONE_ROW),
            )
        elif whole in _WHOLE and kind in ("weight", "bias"):
            yield f"{_WHOLE[whole]}.{kind}", Place(name)
        else:
            yield name, Place(name)

    def their_name(self, name: str) -> str:
        """What the file calls the tensor that transformers calls so."""
        whole, _, kind = name.rpartition(".")
        for theirs, ours in _WHOLE.items():
            if whole == ours:
                return f"{theirs}.{kind}"
        found = _OUR_LAYER.fullmatch(name)
        if found is None:
            return name
        part = _NUMBER.sub(".{}.", found[2])
        for theirs, ours in (*self.layer.items(), *self.experts.items()):
            if ours == part:
                return f"blk.{found[1]}.{theirs}.{found[3]}"
        return name


_MIXTRAL = Architecture(
    "llama", "mixtral", paired=True, layer={**_PLAIN, "ffn_gate_inp": "block_sparse_moe.gate"}, experts=_OF_MIXTRAL
)
_ROUTED = {**_PLAIN, "ffn_gate_inp": "mlp.gate"}
_AROUND = {**_PLAIN, **_NORMS_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        # Mistral's models as well, which are converted to it.
        Architecture("llama", "llama", paired=True, mixture=_MIXTRAL),
        Architecture("qwen2", "qwen2"),
        Architecture("qwen3", "qwen3"),
        Architecture("gemma", "gemma", norm_plus=1.0),
        Architecture("gemma2", "gemma2", layer=_AROUND, norm_plus=1.0),
        Architecture("gemma3", "gemma3_text", layer=_AROUND, norm_plus=1.0),
        Architecture("granite", "granite", paired=True),
        Architecture("olmo2", "olmo2", layer={**_PLAIN, **_NORMS_AFTER}),
        Architecture("qwen2moe", "qwen2_moe", layer={**_ROUTED, **_SHARED}, experts=_EXPERTS),
        Architecture("qwen3moe", "qwen3_moe", layer=_ROUTED, experts=_EXPERTS),
        Architecture("starcoder2", "starcoder2", layer={**_PLAIN, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    )
}


def get_architecture(name: str, origin: str, num_experts: int = 0) -> Architecture:
    """Raises ModelError naming those that are known."""
    found = ARCHITECTURES.get(name)
    if found is None:
        raise ModelError(
            f"{origin}: architecture {brief(name)} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return found.mixture if found.mixture is not None and num_experts else found
