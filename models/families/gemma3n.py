"""Gemma 3n, for text: several hidden vectors per token, per-layer inputs, keys and values shared by later layers.

model_type `gemma3n_text` is the decoder alone; `gemma3n` also reads images and audio.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from llmc.models.config import ModelConfig, Streams
from llmc.models.errors import ModelError
from llmc.models.families.family import Family
from llmc.models.families.with_images import harmless_with_images, neutral_with_images, text_fields, within
from llmc.models.fields import Fields
from llmc.models.layout import Layout
from llmc.models.rope_fields import rope_of, rope_table
from llmc.models.rotary import Rope
from llmc.models.standard import layer_count, read_activation, standard_config
from llmc.models.weight_map import Source, Target, WeightMap
from llmc.models.windows import all_but, kv_sources, stated_window

if TYPE_CHECKING:
    from llmc.models.blocks.decoder import Decoder

_LAYOUT = Layout(mlp_norm="pre_feedforward_layernorm")
_OTHERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
_WITHIN = within(_LAYOUT, *_OTHERS)
_PERIOD = 5  # of layers, the last of which has no window
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
_SIZES = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
"""Defaults of config.json: the values of the 4B model."""


def _cutoffs(fields: Fields) -> tuple[float | None, ...]:
    """Cut-offs in standard deviations, from the fraction of a normal distribution below them."""
    count = layer_count(fields)
    sparse = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
    parts = fields.raw("activation_sparsity_pattern", [_SPARSITY] * sparse + [0.0] * (count - sparse))
    parts = parts if isinstance(parts, list) else [parts] * count
    known = all(isinstance(part, (int, float)) and not isinstance(part, bool) and 0 <= part < 1 for part in parts)
    if len(parts) != count or not known:
        raise ModelError(
            f"{fields.origin}: activation_sparsity_pattern is not a list of {count} numbers from 0 to below 1; "
            "correct it"
        )
    return tuple(NormalDist().inv_cdf(part) if part else None for part in parts)


def _inner(fields: Fields) -> int:
    """The common size of all feed-forward blocks; the field lists it per layer."""
    if not isinstance(fields.raw("intermediate_size"), list):
        return fields.integer("intermediate_size")
    sizes = set(fields.integers("intermediate_size", layer_count(fields)))
    if len(sizes) > 1:
        raise ModelError(f"{fields.origin}: intermediate_size differs between layers, which is not supported")
    return sizes.pop()


def _ropes(fields: Fields) -> tuple[Rope, Rope]:
    """(of layers without a window, of layers with one)."""
    positions, head_dim = fields.integer("max_position_embeddings"), fields.integer("head_dim", 256)
    whole, local = (rope_table(fields).table(f"{kind}_attention") for kind in ("full", "sliding"))
    theta, local_theta = fields.number("rope_theta", 1e6), fields.number("rope_local_base_freq", 1e4)

    def one(table: Fields | None, base: float) -> Rope:
        return Rope(base, head_dim) if table is None else rope_of(fields, table, positions, head_dim, theta=base)

    return one(whole, theta), one(local, local_theta)


def read_config(fields: Fields, generation: Fields) -> ModelConfig:
    fields = fields.with_values(**{name: value for name, value in _SIZES.items() if not fields.mentions(name)})
    if active := fields.integer("altup_active_idx", 0, minimum=0):
        raise ModelError(f"{fields.origin}: altup_active_idx is {active}, where only 0 is supported")
    windows, (rope, local) = all_but(fields, stated_window(fields, 512), _PERIOD), _ropes(fields)
    bias = fields.flag("attention_bias", False)
    return standard_config(
        fields.with_values(intermediate_size=_inner(fields)),
        generation,
        attention_bias=bias,
        o_bias=bias,
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        tie_word_embeddings=True,
        head_dim=256,
        qk_norm="head",
        residual="sandwich",
        layer_windows=windows,
        rope=rope,
        local_rope=local,
        attention_scale=1.0,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        logit_cap=fields.number("final_logit_softcapping", 30.0),
        normed_values=True,
        kv_layers=kv_sources(fields, windows, 15),
        streams=Streams(
            count=fields.integer("altup_num_inputs", 4, minimum=2, maximum=64),
            rank=fields.integer("laurel_rank", 64),
            input_size=fields.integer("hidden_size_per_layer_input", 256),
            input_vocab=fields.integer("vocab_size_per_layer_input", 262144),
            cutoffs=_cutoffs(fields),
            scaled=fields.flag("altup_correct_scale", True),
        ),
    )


def _of_layer(config: ModelConfig, streams: Streams, name: str, prefix: str) -> Iterator[Target]:
    """A layer's tensors besides attention, feed-forward block and norms."""
    hidden, count, given = config.hidden_size, streams.count, streams.input_size

    def one(target: str, source: str, *shape: int, act: bool = False, precise: bool = False) -> Target:
        found = (Source(f"{prefix}.{source}", shape),)
        return Target(f"{name}.{target}", found, "act" if act else "f32", precise=precise)

    yield one("updates.norm.weight", "altup.router_norm.weight", hidden)
    yield one("updates.router.weight", "altup.modality_router.weight", count, hidden, act=True, precise=True)
    yield one("updates.predict", "altup.prediction_coefs.weight", count * count, count)
    yield one("updates.correct", "altup.correction_coefs.weight", count, count)
    yield one("low_rank.down.weight", "laurel.linear_left.weight", streams.rank, hidden, act=True)
    yield one("low_rank.up.weight", "laurel.linear_right.weight", hidden, streams.rank, act=True)
    yield one("low_rank.norm.weight", "laurel.post_laurel_norm.weight", hidden)
    if streams.scaled:
        yield one("input.scale", "altup.correct_output_scale", hidden)
    yield one("input.gate.weight", "per_layer_input_gate.weight", given, hidden, act=True)
    yield one("input.out.weight", "per_layer_projection.weight", hidden, given, act=True)
    yield one("input.norm.weight", "post_per_layer_input_norm.weight", hidden)


def stream_weights(layout: Layout, config: ModelConfig) -> WeightMap:
    """The map of `blocks.streams.StreamDecoder`."""
    assert config.streams is not None
    streams, hidden, found = config.streams, config.hidden_size, layout.weight_map(config)
    width, model = config.num_layers * streams.input_size, layout.norm.removesuffix("norm")
    matrix = (hidden, hidden)
    targets = [
        Target(
            "inputs.table.weight",
            (Source(f"{model}embed_tokens_per_layer.weight", (streams.input_vocab, width)),),
            "act",
            table=True,
        ),
        Target("inputs.project.weight", (Source(f"{model}per_layer_model_projection.weight", (width, hidden)),), "act"),
        Target("inputs.norm", (Source(f"{model}per_layer_projection_norm.weight", (streams.input_size,)),), "f32"),
    ]
    for i in range(streams.count - 1):
        for ours, theirs in (("spread", "altup_projections"), ("merge", "altup_unembed_projections")):
            targets.append(Target(f"{ours}.{i}.weight", (Source(f"{model}{theirs}.{i}.weight", matrix),), "act"))
    unused: set[str] = set()
    for i in range(config.num_layers):
        prefix = layout.layer.format(i)
        targets += _of_layer(config, streams, f"layers.{i}", prefix)
        if not streams.scaled:
            unused.add(f"{prefix}.altup.correct_output_scale")
        if not config.makes_kv(i):
            unused |= {f"{prefix}.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")}
    return replace(found, targets=(*found.targets, *targets), unused=found.unused | unused)


def build(config: ModelConfig, act_dtype: str, max_len: int) -> Decoder:
    # Imported here: reading configs and weights needs no torch.
    from llmc.models.blocks.streams import StreamDecoder

    assert config.streams is not None
    return StreamDecoder(config, config.streams, act_dtype, max_len)


def read_config_with_images(fields: Fields, generation: Fields) -> ModelConfig:
    return replace(read_config(text_fields(fields, _SIZES), generation), model_type=fields.text("model_type"))


# Scores are not scaled; the rest is of training.
_HARMLESS = frozenset({"altup_coef_clip", "altup_lr_multiplier", "laurel_lr_multiplier", "query_pre_attn_scalar"})
_OF_SOUNDS = frozenset({
    "audio_config", "audio_soft_tokens_per_image", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index",
    "vision_soft_tokens_per_image",
})  # fmt: skip
GEMMA3N_TEXT = Family(
    "gemma3n_text", read_config, lambda config: stream_weights(_LAYOUT, config), build, harmless=_HARMLESS
)
GEMMA3N = Family(
    "gemma3n",
    read_config_with_images,
    lambda config: stream_weights(_WITHIN, config),
    build,
    harmless=harmless_with_images(_HARMLESS) | _OF_SOUNDS,
    neutral=neutral_with_images({}),
)
