"""What the metadata of one architecture say that others' do not, as its family's config.json has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmc.models.sources.gguf.architectures import Architecture
from llmc.models.sources.gguf.metadata import Metadata

Shapes = Mapping[str, tuple[int, ...]]
_LOCAL_THETA = 10000.0  # of Gemma 3's layers with windows, where a file does not say
# llama.cpp knows those whose scores have another scale by the number of their layers.
_LARGEST_GEMMA_2, _LARGEST_GEMMA_3 = 46, 62

READ_BY: Mapping[str, frozenset[str]] = {
    "llama": frozenset({"expert_count"}),
    "gemma2": frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
    "gemma3": frozenset({"final_logit_softcapping"}),
    "granite": frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
    "qwen2moe": frozenset({"expert_count"}),
    "qwen3moe": frozenset({"expert_count"}),
}
"""Keys, without the architecture's name, that count here and must have no effect elsewhere."""


class _Reader:
    """Metadata of an architecture by their short names."""

    def __init__(self, metadata: Metadata, architecture: Architecture, shapes: Shapes) -> None:
        self.metadata, self.architecture, self.shapes = metadata, architecture, shapes

    def key(self, name: str) -> str:
        return f"{self.architecture.name}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        return self.metadata.integer(self.key(name), default)

    def number(self, name: str, default: float | None = None) -> float:
        return self.metadata.number(self.key(name), default)

    def cap(self, name: str) -> float | None:
        """A bound; None without one."""
        return self.number(name, 0.0) or None

    def window(self) -> int:
        """Of tokens, 0 for none."""
        return self.metadata.integer(self.key("attention.sliding_window"), 0, minimum=0)

    def rms_eps(self) -> dict[str, Any]:
        return {"rms_norm_eps": self.number("attention.layer_norm_rms_epsilon")}

    def no_window(self) -> None:
        if self.window():
            raise self.metadata.wrong(self.key("attention.sliding_window"), "0")

    def head_scalar(self, layers: int) -> float:
        """What scores are divided by the root of: a head's elements, or of a model of so many layers its share of the
        hidden size."""
        heads = self.metadata.same_integer(self.key("attention.head_count"))
        share = self.integer("embedding_length") // heads
        return float(share if self.integer("block_count") == layers else self.integer("attention.key_length", share))


def _llama(read: _Reader) -> dict[str, Any]:
    """With a window on every layer it is a mistral, with experts a mixtral."""
    found = read.rms_eps()
    window = read.window()
    if read.architecture.model_type == "mixtral":
        found |= {"num_local_experts": read.integer("expert_count")}
        found |= {"num_experts_per_tok": read.integer("expert_used_count")}
        return found | ({"sliding_window": window} if window else {})
    return found | ({"model_type": "mistral", "sliding_window": window} if window else {})


def _plain(read: _Reader) -> dict[str, Any]:
    read.no_window()
    return read.rms_eps()


def _gemma2(read: _Reader) -> dict[str, Any]:
    return {
        **read.rms_eps(),
        "sliding_window": read.integer("attention.sliding_window"),
        "attn_logit_softcapping": read.cap("attn_logit_softcapping"),
        "final_logit_softcapping": read.cap("final_logit_softcapping"),
        "query_pre_attn_scalar": read.head_scalar(_LARGEST_GEMMA_2),
    }


def _gemma3(read: _Reader) -> dict[str, Any]:
    """Every sixth layer has no window."""
    return {
        **read.rms_eps(),
        "sliding_window": read.integer("attention.sliding_window"),
        "final_logit_softcapping": read.cap("final_logit_softcapping"),
        "query_pre_attn_scalar": read.head_scalar(_LARGEST_GEMMA_3),
        "rope_local_base_freq": read.number("rope.freq_base_swa", _LOCAL_THETA),
    }


def _granite(read: _Reader) -> dict[str, Any]:
    read.no_window()
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {**read.rms_eps(), **{ours: read.number(theirs) for ours, theirs in names.items()}}


def _experts(read: _Reader) -> dict[str, Any]:
    return {
        **_plain(read),
        "num_experts": read.integer("expert_count"),
        "num_experts_per_tok": read.integer("expert_used_count"),
        "moe_intermediate_size": read.integer("expert_feed_forward_length"),
    }


def _qwen2moe(read: _Reader) -> dict[str, Any]:
    """Weights of the chosen experts stay as they are."""
    shared = read.integer("expert_shared_feed_forward_length")
    return {**_experts(read), "shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def _qwen3moe(read: _Reader) -> dict[str, Any]:
    """Weights of the chosen experts are normalised."""
    return {**_experts(read), "norm_topk_prob": True}


def _starcoder2(read: _Reader) -> dict[str, Any]:
    """No file says of windows; llama.cpp has none."""
    read.no_window()
    return {
        "norm_epsilon": read.number("attention.layer_norm_epsilon"),
        "use_bias": "blk.0.attn_q.bias" in read.shapes,
        "sliding_window": None,
    }


_READERS: Mapping[str, Callable[[_Reader], dict[str, Any]]] = {
    "llama": _llama,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "granite": _granite,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "starcoder2": _starcoder2,
}


def more_fields(metadata: Metadata, architecture: Architecture, shapes: Shapes) -> dict[str, Any]:
    """Fields of config.json beside those that all architectures have. Raises ModelError."""
    read = _READERS.get(architecture.name, _plain)
    return read(_Reader(metadata, architecture, shapes))
