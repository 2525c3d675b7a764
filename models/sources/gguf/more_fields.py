"""Metadata specific to one architecture, as fields of its family's config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmc.models.sources.gguf.architecture import Architecture
from llmc.models.sources.gguf.delta_net import DELTA_NETS
from llmc.models.sources.gguf.encoder_fields import ENCODERS
from llmc.models.sources.gguf.falcon_h1 import FALCONS
from llmc.models.sources.gguf.gemma4 import read_gemma4
from llmc.models.sources.gguf.granite import GRANITES
from llmc.models.sources.gguf.metadata import Metadata
from llmc.models.sources.gguf.mixture_fields import MIXTURES, mixtral, qwen3moe
from llmc.models.sources.gguf.nemotron_h import NEMOTRONS
from llmc.models.sources.gguf.reader import Reader, Shapes
from llmc.models.sources.gguf.short_conv import SHORT_CONVS
from llmc.models.sources.gguf.streams import read_streams

_LOCAL_THETA = 10000.0  # default for Gemma 3's windowed layers
# llama.cpp recognises models with another score scale by their number of layers, and likewise Baichuan with ALiBi.
_LARGEST_GEMMA_2, _LARGEST_GEMMA_3, _LARGEST_BAICHUAN = 46, 62, 40
_PERIOD = 4  # layers; the last of them has no window


def plain(read: Reader) -> dict[str, Any]:
    read.no_window()
    return read.eps()


def _llama(read: Reader) -> dict[str, Any]:
    """Windows on every layer make it a mistral, experts a mixtral."""
    if read.architecture.model_type == "mixtral":
        return mixtral(read)
    window = read.window()
    return read.eps() | ({"model_type": "mistral", "sliding_window": window} if window else {})


def _gemma2(read: Reader) -> dict[str, Any]:
    return {
        **read.eps(),
        "sliding_window": read.integer("attention.sliding_window"),
        "attn_logit_softcapping": read.cap("attn_logit_softcapping"),
        "final_logit_softcapping": read.cap("final_logit_softcapping"),
        "query_pre_attn_scalar": read.head_scalar(_LARGEST_GEMMA_2),
    }


def _gemma3(read: Reader) -> dict[str, Any]:
    """Every sixth layer has no window."""
    return {
        **read.eps(),
        "sliding_window": read.integer("attention.sliding_window"),
        "final_logit_softcapping": read.cap("final_logit_softcapping"),
        "query_pre_attn_scalar": read.head_scalar(_LARGEST_GEMMA_3),
        "rope_local_base_freq": read.number("rope.freq_base_swa", _LOCAL_THETA),
    }


def _starcoder2(read: Reader) -> dict[str, Any]:
    """Files do not state windows; llama.cpp uses none."""
    return {**plain(read), "use_bias": read.has("attn_q.bias"), "sliding_window": None}


def _baichuan(read: Reader) -> dict[str, Any]:
    """Large models use ALiBi; their code names the text length differently."""
    if read.integer("block_count") != _LARGEST_BAICHUAN:
        return plain(read)
    return {**plain(read), "max_position_embeddings": None, "model_max_length": read.integer("context_length")}


def _cohere(read: Reader) -> dict[str, Any]:
    return {**plain(read), "logit_scale": read.number("logit_scale"), "use_qk_norm": read.has("attn_q_norm.weight")}


def _cohere2(read: Reader) -> dict[str, Any]:
    window = read.integer("attention.sliding_window")
    kinds = {"sliding_window": window, "layer_types": read.kinds(_PERIOD)}
    return {**read.eps(), "logit_scale": read.number("logit_scale"), **kinds}


def _exaone4(read: Reader) -> dict[str, Any]:
    """Small models have no windows."""
    window = read.window()
    return read.eps() | {"sliding_window": window or None, **({"layer_types": read.kinds(_PERIOD)} if window else {})}


def _falcon(read: Reader) -> dict[str, Any]:
    """Models with several KV heads are the newer ones; among these, large ones have two norms."""
    heads = read.metadata.same_integer(read.key("attention.head_count_kv"), 1)
    norms = 2 if read.has("attn_norm_2.weight") else 1
    new = heads > 1 or norms > 1
    return {
        **plain(read),
        "new_decoder_architecture": new,
        "num_kv_heads": heads,
        "num_ln_in_parallel_attn": norms,
        "ffn_hidden_size": read.integer("feed_forward_length"),
    }


def _gpt2(read: Reader) -> dict[str, Any]:
    """n_head, multi_query: for StarCoder."""
    heads = read.metadata.same_integer(read.key("attention.head_count"))
    one = read.metadata.same_integer(read.key("attention.head_count_kv"), heads) == 1
    return {**plain(read), "n_head": heads, "multi_query": one}


def _gptneox(read: Reader) -> dict[str, Any]:
    parallel = read.flag("use_parallel_residual", True)
    return {**plain(read), "use_parallel_residual": parallel, "hidden_act": "gelu"}


def _minicpm(read: Reader) -> dict[str, Any]:
    """Defaults of older files are llama.cpp's."""
    hidden, layers = read.integer("embedding_length"), read.integer("block_count")
    return {
        **plain(read),
        "scale_emb": read.number("embedding_scale", 12.0),
        "scale_depth": read.number("residual_scale", 1.4 / layers**0.5) * layers**0.5,
        "dim_model_base": hidden / read.number("logit_scale", hidden / 256),
    }


def _mpt(read: Reader) -> dict[str, Any]:
    bias, clip = read.number("attention.max_alibi_bias", 0.0), read.cap("attention.clamp_kqv")
    ratio = read.integer("feed_forward_length") // read.integer("embedding_length")
    attention = {"alibi": bias > 0, "alibi_bias_max": bias, "clip_qkv": clip}
    return {**plain(read), "attn_config": attention, "expansion_ratio": ratio}


def _olmo(read: Reader) -> dict[str, Any]:
    return {**plain(read), "clip_qkv": read.cap("attention.clamp_kqv")}


def _phi2(read: Reader) -> dict[str, Any]:
    return {**plain(read), "hidden_act": "gelu_new"}


def _phi3(read: Reader) -> dict[str, Any]:
    return read.eps() | ({"sliding_window": window} if (window := read.window()) else {})


def _qwen(read: Reader) -> dict[str, Any]:
    """The length counts gate and up. llama.cpp neither stretches frequencies for long texts nor grows queries."""
    return {**plain(read), "use_dynamic_ntk": False, "use_logn_attn": False}


def _behind_images(read: Reader) -> dict[str, Any]:
    """How positions are shared between time, height and width, and layers that read images, matter to images alone."""
    for name in ("rope.dimension_sections", "n_deepstack_layers"):
        read.metadata.has(read.key(name))
    return qwen3moe(read) if read.architecture.model_type == "qwen3_moe" else plain(read)


def _stablelm(read: Reader) -> dict[str, Any]:
    """Both blocks read one norm if there is only one."""
    read.flag("use_parallel_residual", True)
    parallel, normed = not read.has("ffn_norm.weight"), read.has("attn_q_norm.weight")
    return {**plain(read), "use_parallel_residual": parallel, "qk_layernorm": normed}


_READERS: Mapping[str, Callable[[Reader], dict[str, Any]]] = {
    "llama": _llama,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3n": read_streams,
    "gemma4": read_gemma4,
    "starcoder2": _starcoder2,
    "baichuan": _baichuan,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "exaone4": _exaone4,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gptneox": _gptneox,
    "minicpm": _minicpm,
    "mpt": _mpt,
    "olmo": _olmo,
    "phi2": _phi2,
    "phi3": _phi3,
    "qwen": _qwen,
    **dict.fromkeys(("qwen2vl", "qwen3vl", "qwen3vlmoe"), _behind_images),
    "stablelm": _stablelm,
    "starcoder": _gpt2,
    **MIXTURES,
    **DELTA_NETS,
    **SHORT_CONVS,
    **FALCONS,
    **GRANITES,
    **NEMOTRONS,
    **ENCODERS,
}


def more_fields(metadata: Metadata, architecture: Architecture, shapes: Shapes) -> dict[str, Any]:
    """Additional config.json fields of the architecture. Raises ModelError."""
    read = _READERS.get(architecture.name, plain)
    return read(Reader(metadata, architecture, shapes))
