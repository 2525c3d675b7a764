"""What a checkpoint's config.json and generation_config.json say, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.models.brief import brief
from llmc.models.errors import ModelError
from llmc.models.fields import Fields

__all__ = ["ModelConfig", "ModelError", "RopeScaling", "standard_config"]

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
MAX_LAYERS = 4096
"""Lists of layers are made before the checkpoint says how many there are."""
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched. A field that the type does not use is None (truncate: True).

    rope_type: "linear", "dynamic", "llama3", "yarn", or "factors" of a GGUF file, which divide the frequencies one by
    one. original_max_position_embeddings: tokens of the pretraining
    context. attention_factor, mscale, mscale_all_dim: yarn's scale of cos and sin, resolved in `rope.py`.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape. Sizes in elements; max_position_embeddings in tokens.

    rope_scaling: None for plain rotary embeddings. partial_rotary_factor: share of head_dim that is rotated.
    sliding_window: tokens a query of a windowed layer sees, itself included, None where no layer has one;
    layer_windows: the same per layer, 0 for full attention. attention_bias: of q, k and v; o_bias: of the output
    projection. bos_token_id: None where the model has none. dtype: of the checkpoint, "f32", "f16" or "bf16" ("f32"
    where config.json does not say).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    partial_rotary_factor: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    layer_windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str

    @property
    def qkv_size(self) -> int:
        """Rows of the fused projection: q, then k, then v."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a head that are rotated; even."""
        return int(self.head_dim * self.partial_rotary_factor)


def _read_rope(fields: Fields, max_positions: int) -> tuple[float, float, RopeScaling | None]:
    """(theta, partial rotary factor, scaling) from `rope_parameters` or from the older rope_theta and rope_scaling."""
    table = fields.table("rope_parameters") or fields.table("rope_scaling") or Fields({}, fields.origin)
    if nested := table.nested_names():
        raise ModelError(
            f"{table.origin} differs by layer type ({', '.join(map(brief, nested[:4]))}), which is not supported"
        )
    theta = (table if table.has("rope_theta") else fields).number("rope_theta", 10000.0)
    partial = (table if table.has("partial_rotary_factor") else fields).number("partial_rotary_factor", 1.0)
    rope_type = table.text("rope_type" if table.has("rope_type") else "type", "default")
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"{table.origin}: rope type {brief(rope_type)} is not supported; one of {', '.join(ROPE_TYPES)}"
        )
    if rope_type == "default":
        return theta, partial, None
    original = max_positions
    if rope_type in ("llama3", "yarn"):
        # A value beside the table wins over one inside it, as in transformers.
        name = "original_max_position_embeddings"
        original = (fields if fields.has(name) else table).integer(name, max_positions)
    if rope_type == "yarn" and not table.has("factor"):
        factor = max_positions / original
    else:
        factor = table.number("factor")
    if rope_type == "llama3":
        low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
        if low >= high:
            raise ModelError(f"{table.origin}: low_freq_factor {low} must be below high_freq_factor {high}")
        return theta, partial, RopeScaling("llama3", factor, original, low, high)
    if rope_type != "yarn":
        return theta, partial, RopeScaling(rope_type, factor, original)
    scaling = RopeScaling(
        "yarn",
        factor,
        original,
        attention_factor=table.optional_number("attention_factor"),
        beta_fast=table.optional_number("beta_fast"),
        beta_slow=table.optional_number("beta_slow"),
        mscale=table.optional_number("mscale"),
        mscale_all_dim=table.optional_number("mscale_all_dim"),
        truncate=table.flag("truncate", True),
    )
    return theta, partial, scaling


def layer_count(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", maximum=MAX_LAYERS)


def windows_by_layer(fields: Fields) -> tuple[int, ...]:
    """Per-layer windows of a family with use_sliding_window, max_window_layers and layer_types; 0 for none."""
    num_layers = layer_count(fields)
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else 0
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if i >= first else 0 for i in range(num_layers))
    kinds = fields.texts("layer_types", num_layers)
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"{fields.origin}: layer type {brief(kind)} is not one of full_attention, sliding_attention"
            )
    if "sliding_attention" in kinds and not window:
        raise ModelError(f"{fields.origin}: layer_types has sliding_attention, but use_sliding_window is not true")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def standard_config(
    fields: Fields,
    generation: Fields,
    *,
    attention_bias: bool,
    o_bias: bool,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    layer_windows: tuple[int, ...] | None = None,
) -> ModelConfig:
    """The fields that all families share; the keywords are what a family decides.

    head_dim: the family's default, None for hidden_size / num_heads. layer_windows: None for full attention.
    """
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{fields.origin}: hidden_act {brief(activation)} is not supported; only silu is")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"{fields.origin}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if not fields.has("head_dim") and head_dim is None and hidden % heads:
        raise ModelError(f"{fields.origin}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = fields.integer("head_dim", head_dim or hidden // heads)
    num_layers = layer_count(fields)
    max_positions = fields.integer("max_position_embeddings")
    theta, partial, scaling = _read_rope(fields, max_positions)
    rotary_dim = int(head_dim * partial)
    if partial > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"{fields.origin}: head_dim {head_dim} with partial_rotary_factor {partial} rotates {rotary_dim} elements, "
            f"which is not an even number from 2 to head_dim"
        )
    dtype = fields.text("dtype" if fields.has("dtype") else "torch_dtype", "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ModelError(f"{fields.origin}: dtype {brief(dtype)} is not one of {', '.join(_DTYPES)}")
    windows = layer_windows or (0,) * num_layers
    # generation_config.json is what the model's authors generate with, so its token ids win.
    eos = (generation if generation.has("eos_token_id") else fields).token_ids("eos_token_id")
    bos = (generation if generation.has("bos_token_id") else fields).token_ids("bos_token_id")
    vocab = fields.integer("vocab_size")
    for token in (*eos, *bos[:1]):
        if token >= vocab:
            raise ModelError(f"{fields.origin}: token id {token} is outside the vocabulary of {vocab} tokens")
    return ModelConfig(
        model_type=fields.text("model_type"),
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        partial_rotary_factor=partial,
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_window=max(windows) or None,
        layer_windows=windows,
        eos_token_ids=eos,
        bos_token_id=bos[0] if bos else None,
        dtype=_DTYPES[dtype],
    )
