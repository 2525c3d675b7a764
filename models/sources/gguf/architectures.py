"""Architectures of llama.cpp that llmc has, by exact name, and what their tensors are called here and there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmc.models.brief import brief
from llmc.models.errors import ModelError

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
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
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)", re.ASCII)
_PAIRED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)", re.ASCII)
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: no weight, a part of the configuration."""


@dataclass(frozen=True)
class Architecture:
    """model_type: of the family. paired: rows of q and k are in the order of `HeadRows`."""

    name: str
    model_type: str
    paired: bool

    def has_paired_rows(self, name: str) -> bool:
        """Whether the file's tensor `name` has."""
        return self.paired and _PAIRED.fullmatch(name) is not None


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        # Mistral's models as well, which are converted to it.
        Architecture("llama", "llama", paired=True),
        Architecture("qwen2", "qwen2", paired=False),
        Architecture("qwen3", "qwen3", paired=False),
    )
}


def get_architecture(name: str, origin: str) -> Architecture:
    """Raises ModelError naming those that are known."""
    found = ARCHITECTURES.get(name)
    if found is None:
        raise ModelError(
            f"{origin}: architecture {brief(name)} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return found


def our_name(name: str) -> str:
    """What transformers calls the tensor; its own name where it has none there."""
    if name in _WHOLE:
        return _WHOLE[name]
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _OF_LAYER:
        return name
    return f"model.layers.{found[1]}.{_OF_LAYER[found[2]]}.{found[3]}"


_THEIRS = {ours: theirs for theirs, ours in _OF_LAYER.items()}
_OUR_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", re.ASCII)


def their_name(name: str) -> str:
    """The inverse of `our_name`."""
    for theirs, ours in _WHOLE.items():
        if name == ours:
            return theirs
    found = _OUR_LAYER.fullmatch(name)
    if found is None or found[2] not in _THEIRS:
        return name
    return f"blk.{found[1]}.{_THEIRS[found[2]]}.{found[3]}"
