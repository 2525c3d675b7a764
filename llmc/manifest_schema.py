"""The schema of manifest.json and of the parts that bundles share with it: types, lengths and ranges of all fields.

It is strict: 1 is neither "1" nor true nor 1.0. A field may be missing, because each reader says which fields it needs.
A field that is present is checked. Unknown top-level fields, from a later llmc, are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmc.shown import shown

_SHOWN = 60

Text = Annotated[str, Field(max_length=4096)]
Long = Annotated[str, Field(max_length=1 << 20)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}\z")]
Symbol = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,254}\z")]
Count = Annotated[int, Field(ge=1, le=1 << 24)]
Bytes = Annotated[int, Field(ge=0, le=1 << 46)]
Error = Annotated[float, Field(ge=0)]
Crc = Annotated[int, Field(ge=0, le=0xFFFFFFFF)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Positive = Annotated[float, Field(gt=0, le=1e30)]
Factors = Annotated[list[Positive], Field(max_length=1 << 15)]
Shape = Annotated[list[Annotated[int, Field(ge=1, le=1 << 32)]], Field(max_length=4)]
Float = Literal["f32", "bf16", "f16"]
KvName = Literal["f32", "bf16", "f16", "int8", "fp8_e4m3", "fp8_e5m2"]
Components = Annotated[dict[Text, Long], Field(max_length=256)]


class Open(BaseModel):
    """Ignores unknown fields."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "xielu"]


class Closed(BaseModel):
    """Refuses unknown fields, which would otherwise be lost."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class RopeScaling(Closed):
    rope_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope", "factors", "ntk_steps", "proportional"]
    factor: Positive
    original_max_position_embeddings: Count
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: Factors | None = None
    long_factors: Factors | None = None
    head_dim: Count | None = None


class Rope(Closed):
    theta: Positive | None
    dim: Annotated[int, Field(ge=2, le=1 << 16)]
    scaling: RopeScaling | None
    axes: Annotated[str, Field(pattern=r"^[012]*$")] = ""


class ResidualFactors(Closed):
    attention_kept: Positive
    attention_added: Positive
    mlp_kept: Positive
    mlp_added: Positive


class Alibi(Closed):
    slopes: Annotated[list[Positive], Field(max_length=1 << 16)]
    rounded: bool


class QueryGrowth(Closed):
    every: Positive
    factor: Positive
    kind: Literal["steps", "log", "laps"] = "steps"


class Experts(Closed):
    layers: Annotated[list[Annotated[int, Field(ge=0, le=1 << 16)]], Field(max_length=1 << 16)]
    count: Annotated[int, Field(ge=1, le=1 << 16)]
    top_k: Annotated[int, Field(ge=1, le=1 << 16)]
    intermediate_size: Count
    scores: Literal["softmax", "sigmoid", "mixer"]
    normalised: bool
    least_sum: Annotated[float, Field(ge=0, le=1)]
    scale: Positive
    choice_bias: bool
    groups: Annotated[int, Field(ge=1, le=1 << 16)]
    top_groups: Annotated[int, Field(ge=1, le=1 << 16)]
    best_of_group: Annotated[int, Field(ge=1, le=2)]
    shared_size: Annotated[int, Field(ge=0, le=1 << 24)]
    shared_gate: bool
    router_bias: bool
    biases: bool
    gate_limit: Annotated[float, Field(ge=0, le=1e30)]
    gate_gain: Positive
    held: None = None
    activation: Activation = "silu"
    beside_plain: bool = False
    scaled: bool = False
    scaled_input: bool = False
    mixer_noise: Annotated[float, Field(ge=0, le=1e30)] = 0.0
    added_sum: Annotated[float, Field(ge=0, le=1)] = 0.0
    gated: bool = True
    latent_size: Annotated[int, Field(ge=0, le=1 << 24)] = 0


class Latent(Closed):
    query_rank: Count | None
    rank: Count
    plain_dim: Count
    rotated_dim: Count
    value_dim: Count
    norm_eps: Annotated[float, Field(ge=0, le=1)]
    interleaved: bool


class Heads(Closed):
    num_heads: Annotated[int, Field(ge=1, le=1 << 16)]
    num_kv_heads: Annotated[int, Field(ge=1, le=1 << 16)]
    head_dim: Annotated[int, Field(ge=1, le=1 << 16)]
    keys_are_values: bool


class DeltaNet(Closed):
    layers: Annotated[list[Annotated[int, Field(ge=0, le=1 << 16)]], Field(max_length=1 << 16)]
    key_heads: Annotated[int, Field(ge=1, le=1 << 16)]
    value_heads: Annotated[int, Field(ge=1, le=1 << 16)]
    key_dim: Annotated[int, Field(ge=1, le=1 << 16)]
    value_dim: Annotated[int, Field(ge=1, le=1 << 16)]
    taps: Annotated[int, Field(ge=2, le=64)]
    tiled: bool


class ShortConv(Closed):
    layers: Annotated[list[Annotated[int, Field(ge=0, le=1 << 16)]], Field(max_length=1 << 16)]
    channels: Count
    taps: Annotated[int, Field(ge=2, le=64)]
    bias: bool


class Mamba2(Closed):
    layers: Annotated[list[Annotated[int, Field(ge=0, le=1 << 16)]], Field(max_length=1 << 16)]
    heads: Annotated[int, Field(ge=1, le=1 << 16)]
    head_dim: Annotated[int, Field(ge=1, le=1 << 16)]
    state_size: Annotated[int, Field(ge=1, le=1 << 16)]
    groups: Annotated[int, Field(ge=1, le=1 << 16)]
    taps: Annotated[int, Field(ge=2, le=64)]
    conv_bias: bool
    bias: bool
    least_step: Annotated[float, Field(ge=0, le=1e30)]
    most_step: Positive | None
    out_bias: bool | None = None
    beside: bool = False
    norm: Literal["gated", "read", "none"] = "gated"
    norm_eps: Annotated[float, Field(ge=0, le=1)] | None = None
    gate_scale: Positive = 1.0
    step_scale: Positive = 1.0
    out_scale: Positive = 1.0


class Multipliers(Closed):
    attention_in: Positive
    attention_out: Positive
    keys: Positive
    mixer_in: Positive
    mixer_out: Positive
    mixer_parts: Annotated[list[Positive], Field(min_length=5, max_length=5)]
    gate: Positive
    down: Positive
    logits: Positive


class TokenInputs(Closed):
    size: Count
    vocab: Count


class Streams(Closed):
    count: Annotated[int, Field(ge=2, le=64)]
    rank: Count
    input_size: Count
    input_vocab: Count
    cutoffs: Annotated[list[Annotated[float, Field(ge=-1e3, le=1e3)] | None], Field(max_length=1 << 16)]
    scaled: bool


class Dense(Closed):
    size: Count
    bias: bool
    activation: Literal["tanh", "gelu", "relu"] | None
    norm: bool
    token_ids: Annotated[list[TokenId], Field(max_length=1024)]
    source: Text = ""


class Pooled(Closed):
    pooling: Literal["first", "mean", "last", "merged"]
    dense: Annotated[list[Dense], Field(max_length=16)]
    normalised: bool
    norm_eps: Annotated[float, Field(ge=0, le=1)] | None = None
    norm_merged: bool = False


class Tower(Closed):
    channels: Annotated[int, Field(ge=1, le=1 << 8)]
    patch_size: Annotated[int, Field(ge=1, le=1 << 14)]
    merged: Annotated[int, Field(ge=1, le=1 << 12)]
    frames: Annotated[int, Field(ge=1, le=1 << 8)]
    rotation: Annotated[int, Field(ge=0, le=1 << 16)]
    patch_bias: bool
    places: Annotated[int, Field(ge=0, le=1 << 24)]
    places_side: Annotated[int, Field(ge=0, le=1 << 12)]
    stacked: Annotated[list[Annotated[int, Field(ge=0, le=1 << 16)]], Field(max_length=1 << 8)]


class Task(Closed):
    name: Literal["embed", "rank", "classify"]
    activation: Literal["sigmoid", "softmax"] | None
    labels: Annotated[list[Text], Field(max_length=1 << 16)]
    template: Text | None
    longest_text: Count | None = None
    pad_token_id: TokenId | None = None


class Model(Closed):
    model_type: Text
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_layers: Annotated[int, Field(ge=1, le=1 << 16)]
    num_heads: Annotated[int, Field(ge=1, le=1 << 16)]
    num_kv_heads: Annotated[int, Field(ge=1, le=1 << 16)]
    head_dim: Annotated[int, Field(ge=1, le=1 << 16)]
    norm_eps: Annotated[float, Field(ge=0, le=1)]
    rope: Rope
    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 40)]
    tie_word_embeddings: bool
    attention_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: Literal["none", "head", "each_head", "whole", "unit"]
    attention_scale: Positive
    sliding_window: Annotated[int, Field(ge=1, le=1 << 31)] | None
    layer_windows: Annotated[list[Annotated[int, Field(ge=0, le=1 << 31)]], Field(max_length=1 << 16)]
    eos_token_ids: Annotated[list[TokenId], Field(max_length=1024)]
    bos_token_id: TokenId | None
    dtype: Float
    norm: Literal["rms", "layer"]
    norm_weight: bool
    norm_bias: bool
    residual: Literal["pre", "parallel", "sandwich", "post", "sums", "normed"]
    parallel_norms: Annotated[int, Field(ge=1, le=2)]
    activation: Activation
    gated: bool
    qk_norm_rotated: bool
    layer_chunks: Annotated[list[Annotated[int, Field(ge=0, le=1 << 31)]], Field(max_length=1 << 16)]
    sinks: bool
    query_growth: QueryGrowth | None
    local_rope: Rope | None
    unrotated_layers: Annotated[list[Annotated[int, Field(ge=0, le=1 << 16)]], Field(max_length=1 << 16)]
    learned_positions: Annotated[int, Field(ge=0, le=1 << 31)]
    alibi: Alibi | None
    head_bias: bool
    attention_cap: Positive | None
    clip_qkv: Positive | None
    embedding_norm: bool
    embedding_multiplier: Positive
    residual_multiplier: Positive
    logit_multiplier: Positive
    logit_cap: Positive | None
    experts: Experts | None = None
    down_bias: bool = False
    normed_head: bool = False
    latent: Latent | None = None
    normed_values: bool = False
    kv_layers: Annotated[list[Annotated[int, Field(ge=0, le=1 << 16)]], Field(max_length=1 << 16)] = []
    delta_net: DeltaNet | None = None
    short_conv: ShortConv | None = None
    mamba: Mamba2 | None = None
    mlp_only_layers: Annotated[list[Annotated[int, Field(ge=0, le=1 << 16)]], Field(max_length=1 << 16)] = []
    mixer_only_layers: Annotated[list[Annotated[int, Field(ge=0, le=1 << 16)]], Field(max_length=1 << 16)] = []
    full_heads: Heads | None = None
    layer_sizes: Annotated[list[Count], Field(max_length=1 << 16)] = []
    token_inputs: TokenInputs | None = None
    scaled_layers: bool = False
    streams: Streams | None = None
    first_norm: bool = True
    final_norm: bool = True
    bidirectional: bool = False
    token_types: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    typed_inputs: bool = False
    pooled: Pooled | None = None
    task: Task | None = None
    states: Literal["none", "left", "taken", "placed"] = "none"
    fc_bias: bool = False
    states_layers: Annotated[list[Annotated[int, Field(ge=0, le=1 << 16)]], Field(max_length=1 << 16)] = []
    states_size: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    draft_vocab_size: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    normed_states: bool = False
    stacked_rows: Annotated[int, Field(ge=0, le=1 << 8)] = 0
    residual_factors: ResidualFactors | None = None
    attention_gate: bool = False
    multipliers: Multipliers | None = None
    tower: Tower | None = None

    @model_validator(mode="after")
    def _one_window_a_layer(self) -> Model:
        if len(self.layer_windows) != self.num_layers:
            raise ValueError(f"{len(self.layer_windows)} layer_windows for {self.num_layers} layers")
        return self


class Target(BaseModel):
    """A target, whose kind reads the remaining fields. Only a few types are allowed, so that none is oversized.

    kind: None for the default kind, whose records name none.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    __pydantic_extra__: dict[str, Text | int | bool | Annotated[list[Text], Field(max_length=256)]]
    kind: Text | None = None
    name: Text


class Context(Open):
    model_len: Annotated[int, Field(ge=1, le=1 << 40)]
    cut_by: Literal["default", "buckets", "option"] | None


class WeightFormat(BaseModel):
    """Weight format whose remaining fields the compiler reads."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    __pydantic_extra__: dict[str, Text | int | bool]
    kind: Text


class Weight(Open):
    sources: Annotated[list[Text], Field(max_length=1 << 16)] = []
    shape: Shape | None = None
    scheme: Text | None = None
    format: WeightFormat | None = None
    method: Text | None = None
    act_order: bool | None = None
    rows_of: Text | None = None


class Conversion(Open):
    types: Text
    error: Error
    most: Error
    norm: Error
    overflows: Annotated[int, Field(ge=0, lt=1 << 62)] = 0


class Kernel(Open):
    symbol: Symbol
    key: Hash
    op: Text | None = None
    components: Components


class Sizes(Open):
    code: Bytes
    weights: Bytes
    arena: Bytes


class FileSum(Closed):
    bytes: Annotated[int, Field(ge=0, le=1 << 28)]
    sha256: Hash


class Source(Open):
    repo: Text
    revision: Text


class MergedLora(Closed):
    name: Text
    sha256: Hash


class LoraPart(Closed):
    module: Text
    rows: Count
    order: Annotated[int, Field(ge=0, le=1 << 16)] | None = None


class LoraHeads(Closed):
    count: Count
    rows: Count
    first: Annotated[int, Field(ge=0, lt=1 << 31)]
    own: Literal["a", "b"]


class LoraLinear(Closed):
    weight: Text
    columns: Count
    experts: Count | None = None
    table: bool = False
    heads: LoraHeads | None = None
    parts: Annotated[list[LoraPart], Field(min_length=1, max_length=8)]


class Lora(Closed):
    slots: Annotated[int, Field(ge=1, le=256)]
    rank: Annotated[int, Field(ge=1, le=512)]
    linears: Annotated[list[LoraLinear], Field(max_length=1 << 20)]
    left_out: Annotated[list[LoraLinear], Field(max_length=2)] = []
    unread: Annotated[list[Text], Field(max_length=64)] = []
    orders: Annotated[
        list[Annotated[list[Annotated[int, Field(ge=0, lt=1 << 24)]], Field(max_length=1 << 24)]],
        Field(max_length=1 << 16),
    ]


class Manifest(Open):
    format_version: Annotated[int, Field(ge=0, le=1 << 16)] | None = None
    llmc_version: Text | None = None
    fingerprint: Text | None = None
    model: Model | None = None
    target: Target | None = None
    act_dtype: Float | None = None
    kv_dtype: KvName | None = None
    kv_scales: Literal["checkpoint", "file"] | None = None
    max_model_len: Count | None = None
    max_num_seqs: Count | None = None
    speculate: Annotated[int, Field(ge=0, le=64)] | None = None
    tensor_parallel: Annotated[int, Field(ge=2, le=256)] | None = None
    pipeline_parallel: Annotated[list[Count], Field(min_length=2, max_length=256)] | None = None
    expert_parallel: bool | None = None
    block_size: Annotated[int, Field(ge=16, le=1 << 16, multiple_of=16)] | None = None
    max_num_batched_tokens: Annotated[int, Field(ge=0, le=1 << 40)] | None = None
    context: Context | None = None
    buckets: Annotated[list[Text], Field(max_length=4096)] | None = None
    tools: dict[Text, Text | None] | None = None
    weights: Annotated[dict[Text, Weight], Field(max_length=1 << 20)] | None = None
    weights_crc32: Annotated[dict[Text, Crc], Field(max_length=1 << 20)] | None = None
    weight_parts: Annotated[dict[Text, Count], Field(max_length=1 << 20)] | None = None
    weights_converted: Annotated[dict[Text, Conversion], Field(max_length=1 << 20)] | None = None
    graph_components: Components | None = None
    tuned: bool | None = None
    files: (
        Annotated[dict[FileName, FileSum], Field(max_length=64)]
        | Annotated[list[FileName], Field(max_length=64)]
        | None
    ) = None
    bytes: Sizes | None = None
    kernels: Annotated[list[Kernel], Field(max_length=1 << 16)] | None = None
    source: Source | None = None
    merged_lora: Annotated[list[MergedLora], Field(max_length=256)] | None = None
    lora: Lora | None = None
    images: Annotated[dict[Text, Any], Field(max_length=64)] | None = None


def complaint(schema: type[BaseModel], content: Mapping[str, Any]) -> str | None:
    """What is wrong in `content`, as in "block_size is 0: Input should be …"; None if it is valid."""
    try:
        schema.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        # In a union, the parts that only name its members carry no information.
        place = ".".join(str(part)[:_SHOWN] for part in first["loc"] if "[" not in str(part)) or "it"
        if first["type"] == "missing":
            return f"{place} is missing"
        if first["type"] == "value_error":
            return f"{place} has {first['msg'].removeprefix('Value error, ')}"
        return f"{place} is {shown(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1 : _SHOWN * 3]}"
    return None
