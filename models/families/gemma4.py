"""Gemma 4, for text: heads of layers without a window are of another size and number, and their keys may be values.

Small models have token inputs, and later layers share keys and values; large ones may have experts beside each plain
block. model_type `gemma4_text` is the decoder alone; `gemma4` also reads images, and may read sound. The 12B model,
`gemma4_unified` and `gemma4_unified_text`, has neither token inputs nor experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.models.brief import brief
from llmc.models.config import Experts, Heads, ModelConfig, TokenInputs
from llmc.models.errors import ModelError
from llmc.models.families.family import Family, build_decoder
from llmc.models.families.with_images import harmless_with_images, neutral_with_images, text_fields, within
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import rope_of, rope_table
from llmc.models.rotary import Rope
from llmc.models.standard import head_sizes, layer_count, read_activation, standard_config
from llmc.models.weight_map import Source, Target, WeightMap
from llmc.models.windows import all_but, kv_sources, stated_window

if TYPE_CHECKING:
    from llmc.models.blocks.decoder import Decoder

_LAYOUT = Layout(
    mlp_norm="pre_feedforward_layernorm",
    router="router.proj",
    expert_gate_up=("experts.gate_up_proj",),
    expert_down="experts.down_proj",
)
_WITHIN = within(_LAYOUT, "vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
_WITHIN_UNIFIED = within(_LAYOUT, "vision_embedder.", "embed_vision.", "embed_audio.")
# Files of other programs have a tensor for each matrix of an expert.
_EXPERTS_APART = tuple(
    (tuple(f"{place}.{{}}.{part}_proj.weight" for part in ("gate", "up")), f"{place}.{{}}.down_proj.weight")
    for place in ("experts", "moe.experts")
)
_PERIOD = 6  # of layers, the last of which has no window
_HEAD_DIM, _FULL_HEAD_DIM = 256, 512
_SIZES = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
"""Defaults of config.json."""
_SIZES_UNIFIED = {
    **_SIZES, "sliding_window": 1024, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0,
}  # fmt: skip
_THETA, _PARTIAL, _LOCAL_THETA = 1e6, 0.25, 1e4


def _full_heads(fields: Fields, windows: tuple[int, ...]) -> Heads:
    """Of layers without a window: as published files say it, or as newer versions of transformers do, layer by
    layer."""
    heads, kv_heads, head_dim = head_sizes(fields, _HEAD_DIM)
    shared = fields.flag("attention_k_eq_v", False)
    stated = fields.integer("num_global_key_value_heads", kv_heads), fields.integer("global_head_dim", _FULL_HEAD_DIM)
    by_layer = fields.table("per_layer_config")
    if by_layer is not None:
        kv_heads, head_dim = _of_layers(by_layer, windows, kv_heads, head_dim)
    else:
        kv_heads, head_dim = stated[0] if shared else kv_heads, stated[1]
    if heads % kv_heads:
        raise ModelError(
            f"{fields.origin}: num_attention_heads {heads} is not a multiple of the {kv_heads} KV heads of layers "
            "without a window; correct it"
        )
    return Heads(heads, kv_heads, head_dim, keys_are_values=shared)


def _of_layers(table: Fields, windows: tuple[int, ...], kv_heads: int, head_dim: int) -> tuple[int, int]:
    """(KV heads, head_dim) of all layers without a window; no layer with one is in the table."""
    # Newer versions of transformers pad the numbers with zeros.
    names = {int(name): name for name in table.nested_names() if name.isdecimal()}
    found = set()
    for layer, window in enumerate(windows):
        own = (table.table(names[layer]) if layer in names else None) or Fields({}, table.origin)
        if unknown := own.values.keys() - {"num_key_value_heads", "head_dim"}:
            raise ModelError(f"{own.origin}: {brief(min(unknown))} of a layer is not supported")
        sizes = own.integer("num_key_value_heads", kv_heads), own.integer("head_dim", head_dim)
        if not window:
            found.add(sizes)
        elif sizes != (kv_heads, head_dim):
            raise ModelError(f"{own.origin}: a layer with a window has heads of its own, which is not supported")
    if len(found) > 1:
        raise ModelError(f"{table.origin}: layers without a window differ in their heads, which is not supported")
    return found.pop()


def _ropes(fields: Fields, full_dim: int) -> tuple[Rope, Rope]:
    """(of layers without a window, of layers with one)."""
    positions, head_dim = fields.integer("max_position_embeddings"), fields.integer("head_dim", _HEAD_DIM)
    stated = rope_table(fields)
    full, local = stated.table("full_attention"), stated.table("sliding_attention")
    if full is None and local is None:
        # transformers then takes the usual values; files of ExecuTorch state them outside of a table.
        full = Fields({"rope_type": "proportional"}, fields.origin)
        rope = rope_of(fields, full, positions, full_dim, theta=_THETA, partial=_PARTIAL)
        return rope, Rope(fields.number("rope_local_base_freq", _LOCAL_THETA), head_dim)
    if full is None or local is None:
        raise ModelError(f"{stated.origin} lacks full_attention or sliding_attention; correct it")
    return _rope(full, positions, full_dim), _rope(local, positions, head_dim)


def _rope(table: Fields, positions: int, head_dim: int) -> Rope:
    """Of one kind of layer. Its table says all: what is beside it is of none."""
    found = rope_of(Fields({}, table.origin), table, positions, head_dim, partial=1.0)
    if found.scaling is None and found.dim != head_dim:
        raise ModelError(
            f"{table.origin}: partial_rotary_factor {table.raw('partial_rotary_factor')} does nothing with rope_type "
            "default; take it out, or correct rope_type"
        )
    return found


def _experts(fields: Fields) -> Experts:
    """Of every layer, beside its plain block."""
    count, top_k = fields.integer("num_experts"), fields.integer("top_k_experts")
    if top_k > count:
        raise ModelError(f"{fields.origin}: top_k_experts {top_k} is more than num_experts {count}")
    return Experts(
        layers=tuple(range(layer_count(fields))),
        count=count,
        top_k=top_k,
        intermediate_size=fields.integer("moe_intermediate_size"),
        scores="softmax",
        normalised=True,
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        beside_plain=True,
        scaled=True,
    )


def _last_full(windows: tuple[int, ...]) -> tuple[int, ...]:
    """The last layer has no window, whatever layer_types says, as in transformers."""
    return (*windows[:-1], 0)


def read_config(fields: Fields, generation: Fields, sizes: Mapping[str, Any] = _SIZES) -> ModelConfig:
    """sizes: values of fields that are missing."""
    fields = fields.with_values(**{name: value for name, value in sizes.items() if not fields.mentions(name)})
    # "vision": tokens of images see later ones of theirs; a text has none.
    if (reads := fields.raw("use_bidirectional_attention", "vision")) not in ("vision", False):
        raise ModelError(f"{fields.origin}: use_bidirectional_attention {brief(reads)} is not supported")
    windows = _last_full(all_but(fields, stated_window(fields, 512), _PERIOD))
    full, bias = _full_heads(fields, windows), fields.flag("attention_bias", False)
    rope, local = _ropes(fields, full.head_dim)
    kv_layers = kv_sources(fields, windows, 0)
    inner = fields.integer("intermediate_size")
    wide = fields.flag("use_double_wide_mlp", False) and kv_layers
    size = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    vocab = fields.integer("vocab_size_per_layer_input", 262144)
    return standard_config(
        fields,
        generation,
        attention_bias=bias,
        o_bias=bias,
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        tie_word_embeddings=True,
        head_dim=_HEAD_DIM,
        qk_norm="head",
        residual="sandwich",
        layer_windows=windows,
        rope=rope,
        local_rope=local,
        attention_scale=1.0,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        logit_cap=fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else None,
        normed_values=True,
        full_heads=full,
        kv_layers=kv_layers,
        layer_sizes=tuple(inner * (1 if at == i else 2) for i, at in enumerate(kv_layers)) if wide else (),
        token_inputs=TokenInputs(size, vocab) if size else None,
        scaled_layers=True,
        experts=_experts(fields) if fields.flag("enable_moe_block", False) else None,
    )


def _of_layer(config: ModelConfig, name: str, prefix: str) -> Iterator[Target]:
    """A layer's tensors besides attention, feed-forward block and their norms."""
    yield Target(f"{name}.scale", (Source(f"{prefix}.layer_scalar", (1,)),), "f32")
    if config.experts is not None:
        yield from _of_mixture(config, config.experts, f"{name}.mlp", prefix)
    if config.token_inputs is None:
        return
    given, hidden = config.token_inputs.size, config.hidden_size
    for ours, theirs, rows, columns in (
        ("gate", "per_layer_input_gate", given, hidden),
        ("out", "per_layer_projection", hidden, given),
    ):
        yield Target(f"{name}.input.{ours}.weight", (Source(f"{prefix}.{theirs}.weight", (rows, columns)),), "act")
    norm = Source(f"{prefix}.post_per_layer_input_norm.weight", (hidden,))
    yield Target(f"{name}.input.norm.weight", (norm,), "f32")


def _of_mixture(config: ModelConfig, experts: Experts, name: str, prefix: str) -> Iterator[Target]:
    """The norms of a plain block and of the experts beside it, and the factors of the experts."""
    hidden = config.hidden_size
    for ours, theirs in (
        ("post_norm", "post_feedforward_layernorm_1"),
        ("experts_norm", "pre_feedforward_layernorm_2"),
        ("experts_post_norm", "post_feedforward_layernorm_2"),
    ):
        yield Target(f"{name}.{ours}.weight", (Source(f"{prefix}.{theirs}.weight", (hidden,)),), "f32")
    scale = Source(f"{prefix}.router.scale", (hidden,))
    yield Target(f"{name}.router_norm.weight", (scale,), "f32", of_rows=_times(hidden**-0.5))
    yield Target(f"{name}.expert_scales", (Source(f"{prefix}.router.per_expert_scale", (experts.count,)),), "f32")


def _times(factor: float) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    return lambda values: values * np.float32(factor)


def _token_inputs(layout: Layout, config: ModelConfig, inputs: TokenInputs) -> Iterator[Target]:
    """The tensors that make all layers' token inputs."""
    width, model = config.num_layers * inputs.size, layout.norm.removesuffix("norm")
    for ours, theirs, shape in (
        ("table", "embed_tokens_per_layer", (inputs.vocab, width)),
        ("project", "per_layer_model_projection", (width, config.hidden_size)),
    ):
        source = Source(f"{model}{theirs}.weight", shape)
        yield Target(f"inputs.{ours}.weight", (source,), "act", table=ours == "table")
    norm = Source(f"{model}per_layer_projection_norm.weight", (inputs.size,))
    yield Target("inputs.norm", (norm,), "f32")


def full_weights(layout: Layout, config: ModelConfig) -> WeightMap:
    """The weight map with norms and factors of layers and experts, and token inputs."""
    found = layout.weight_map(config)
    targets, unused = list(found.targets), set(found.unused)
    if config.token_inputs is not None:
        targets += _token_inputs(layout, config, config.token_inputs)
    for i in range(config.num_layers):
        prefix = layout.layer.format(i)
        targets += _of_layer(config, f"layers.{i}", prefix)
        # As in transformers; some files have them.
        ignored = () if config.makes_kv(i) else ("k_proj", "v_proj", "k_norm", "v_norm")
        if config.heads(i).keys_are_values:
            ignored = (*ignored, "v_proj")
        unused |= {f"{prefix}.self_attn.{name}.{kind}" for name in ignored for kind in ("weight", "bias")}
    return replace(found, targets=tuple(targets), unused=frozenset(unused))


def build(config: ModelConfig, act_dtype: str, max_len: int) -> Decoder:
    # Imported here: reading configs and weights needs no torch.
    from llmc.models.blocks.token_inputs import TokenInputDecoder

    if config.token_inputs is None:
        return build_decoder(config, act_dtype, max_len)
    return TokenInputDecoder(config, config.token_inputs, act_dtype, max_len)


def _apart(layout: Layout) -> tuple[Callable[[ModelConfig], WeightMap], ...]:
    """Maps of files with a tensor for each matrix of an expert."""
    layouts = [replace(layout, expert_gate_up=first, expert_down=down) for first, down in _EXPERTS_APART]
    return tuple(partial(full_weights, found) for found in layouts)


def read_unified(fields: Fields, generation: Fields) -> ModelConfig:
    return read_config(fields, generation, _SIZES_UNIFIED)


def read_config_with_images(fields: Fields, generation: Fields) -> ModelConfig:
    kind = fields.text("model_type")
    sizes = _SIZES_UNIFIED if kind == "gemma4_unified" else _SIZES
    text = text_fields(fields, {**sizes, "model_type": f"{kind}_text"})
    return replace(read_config(text, generation, sizes), model_type=kind)


_OF_MEDIA = frozenset({
    "audio_config", "audio_ms_per_token", "audio_sample_rate", "audio_seq_length", "audio_token_id", "boa_token_id",
    "eoa_token_id", "eoa_token_index", "max_audio_length_sec", "special_tokens", "vision_soft_tokens_per_image",
})  # fmt: skip
GEMMA4_TEXT = Family("gemma4_text", read_config, partial(full_weights, _LAYOUT), build, other_maps=_apart(_LAYOUT))
GEMMA4 = Family(
    "gemma4",
    read_config_with_images,
    partial(full_weights, _WITHIN),
    build,
    other_maps=_apart(_WITHIN),
    harmless=harmless_with_images(frozenset()) | _OF_MEDIA,
    neutral=neutral_with_images({}),
)
GEMMA4_UNIFIED_TEXT = Family("gemma4_unified_text", read_unified, partial(full_weights, _LAYOUT), build)
GEMMA4_UNIFIED = Family(
    "gemma4_unified",
    read_config_with_images,
    partial(full_weights, _WITHIN_UNIFIED),
    build,
    harmless=harmless_with_images(frozenset()) | _OF_MEDIA,
    neutral=neutral_with_images({}),
)
