"""A decoder's configuration, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from llmc.models.delta_net import DeltaNet
from llmc.models.mamba import Mamba2
from llmc.models.multipliers import Multipliers
from llmc.models.pooled import Pooled, Task
from llmc.models.rotary import NO_ROPE, Rope
from llmc.models.short_conv import ShortConv
from llmc.models.tower import Tower

Norm = Literal["rms", "layer"]
QkNorm = Literal["none", "head", "each_head", "whole", "unit"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "xielu"]
Residual = Literal["pre", "parallel", "sandwich", "post", "sums", "normed"]
States = Literal["none", "left", "taken", "placed"]
Scores = Literal["softmax", "sigmoid", "mixer"]


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts block of some layers. Sizes in elements.

    layers: layers with experts; others have a plain block. count, top_k: experts per layer and per token.
    intermediate_size: of one expert. scores: function from router logits to weights. "mixer" scores the two best, each
    by a softmax over nearby logits (mixer_noise, see `blocks.experts`). choice_bias: a bias added to scores for the
    choice only. groups: number of equal groups; only the top_groups best are eligible. A group's score is the sum of
    its best_of_group best experts. normalised: a token's weights are divided by their sum (at least least_sum) plus
    added_sum. scale: factor of all weights. shared_size: of an expert that every token uses; 0 for none. shared_gate:
    its output is gated. scaled_input: a token's single expert reads its input times the sigmoid of the expert's logit.
    router_bias, biases: whether router and experts' matrices have biases. gate_limit, gate_gain: see
    `expert_ops.experts`. activation: of an expert's gate, or of its first layer if experts are not gated, the shared
    one included. beside_plain: experts run beside a plain block (blocks/beside_plain.py). scaled: each expert's weight
    has a learned factor. held: how many experts a rank holds; None for all. See `expert_ops.held_experts`. latent_size:
    of vectors that experts read and write in place of a token's, by two linear layers; 0 for none.
    """

    layers: tuple[int, ...]
    count: int
    top_k: int
    intermediate_size: int
    scores: Scores
    normalised: bool
    least_sum: float = 0.0
    scale: float = 1.0
    choice_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    shared_size: int = 0
    shared_gate: bool = False
    scaled_input: bool = False
    mixer_noise: float = 0.0
    router_bias: bool = False
    biases: bool = False
    gate_limit: float = 0.0
    gate_gain: float = 1.0
    activation: Activation = "silu"
    beside_plain: bool = False
    scaled: bool = False
    held: int | None = None
    added_sum: float = 0.0
    gated: bool = True
    latent_size: int = 0


@dataclass(frozen=True)
class ResidualFactors:
    """Factors in the two sums of a layer: of what attention and the feed-forward block are added to (`kept`), and of
    their results (`added`)."""

    attention_kept: float
    attention_added: float
    mlp_kept: float
    mlp_added: float


@dataclass(frozen=True)
class Alibi:
    """Positions as a score bias: a head's slope times the distance from query back to key. slopes: per query head.
    rounded: the bias is rounded and scaled as in Falcon; see `ops.paged_attention`."""

    slopes: tuple[float, ...]
    rounded: bool = False


@dataclass(frozen=True)
class QueryGrowth:
    """Queries scaled by position.

    "steps": in unrotated layers, by 1 + factor · ln(1 + ⌊(position + 1) / every⌋).
    "log": in all layers, by ln(position + 1) / ln(every), but at least 1.
    "laps": in all layers, by 1 + factor · ln(1 + ⌊position / every⌋).
    """

    every: float
    factor: float
    kind: Literal["steps", "log", "laps"] = "steps"


@dataclass(frozen=True)
class Latent:
    """Latent attention: all heads share one latent vector per token (blocks/latent.py). Sizes in elements.

    query_rank: size of the queries' latent vector; None if queries come from the token itself. rank: size of the keys'
    latent vector. plain_dim: a query's part without positions. rotated_dim: its part with positions, and the rotated
    key. value_dim: a head's result. norm_eps: for the norms of both vectors. interleaved: whether checkpoints store
    rotated elements in neighbouring pairs.
    """

    query_rank: int | None
    rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int
    norm_eps: float
    interleaved: bool = True

    @property
    def key_dim(self) -> int:
        """Elements cached per token: the latent vector, then the rotated key."""
        return self.rank + self.rotated_dim

    @property
    def query_dim(self) -> int:
        """Elements of one query."""
        return self.plain_dim + self.rotated_dim


@dataclass(frozen=True)
class Heads:
    """Sizes of a layer's attention.

    keys_are_values: a value is its key before norm and rotation, so there is no matrix of values.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    keys_are_values: bool = False

    @property
    def q_size(self) -> int:
        """Elements of a token's queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of a token's keys."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class TokenInputs:
    """A vector for each token and layer, from a table, that a layer mixes into its result (blocks/token_inputs.py).

    size: elements of one. vocab: tokens that have one; others use that of token 0.
    """

    size: int
    vocab: int


@dataclass(frozen=True)
class Streams:
    """Gemma 3n's layers (blocks/streams.py): a token has several hidden vectors; a layer reads the first.

    count: hidden vectors per token. rank: of a linear path beside attention. input_size, input_vocab: see
    `TokenInputs`. cutoffs: per layer, the cut-off of the feed-forward gate in standard deviations above its mean; None
    for no cut-off. scaled: whether the first vector is multiplied by a learned one before it meets the layer's token
    input.
    """

    count: int
    rank: int
    input_size: int
    input_vocab: int
    cutoffs: tuple[float | None, ...]
    scaled: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, or an encoder. Sizes in elements; max_position_embeddings in tokens.

    norm, norm_eps, norm_weight, norm_bias: of all norms over the hidden size. embedding_norm: whether the embedding is
    normed too.
    qk_norm: norm of q and k before rotation: each head with one shared weight, each head with its own, or all heads as
    one vector. "unit": each head without weights, after rotation, in rotated layers. qk_norm_rotated: "head" norms
    apply after rotation.
    residual: placement of norms: before both blocks; before both, which run in parallel (with parallel_norms norms);
    before and after each block; after each block; on each sum of a block and its input; or "normed", before both
    blocks, which are added to their normed inputs. residual_factors: of "normed" sums, else None.
    first_norm: whether a norm precedes the first attention. final_norm: whether one follows the last layer.
    activation, gated: of the feed-forward block.
    rope, local_rope: of layers without and with a window; local_rope is None if they are equal. unrotated_layers:
    layers without rotation.
    learned_positions: rows of a position table added to the embedding; 0 for none. alibi: None for no such bias.
    sliding_window: tokens that a query of a windowed layer sees, itself included; None if no layer has a window.
    layer_windows: the same per layer; 0 for full attention.
    layer_chunks: per layer, a token sees no key before the last multiple of this; 0 or empty for no limit.
    sinks: whether each head has a learned score without a value. query_growth: None for none.
    attention_bias: of q, k and v. o_bias: of the output projection. attention_gate: whether each element of a head's
    result is multiplied by the sigmoid of a projection of the token.
    attention_scale: of scores. attention_cap: scores are bounded to it by tanh; None for no bound. clip_qkv: bound of
    q, k and v; None for none.
    down_bias: of the feed-forward block's last matrix, if it differs from mlp_bias. logit_cap: bounds logits as
    attention_cap does scores. normed_head: rows of the output projection have length 1.
    latent: None if keys and values are cached separately. With it there is one KV head of latent.key_dim elements,
    whose first latent.rank are the value. normed_values: each head of v is normed, without weights.
    kv_layers: per layer, the layer whose keys and values it reads. The first layers make their own, the last ones make
    none. Empty if all make their own.
    delta_net, short_conv, mamba: of the layers that have one in place of attention; None if no layer has. A KV block of
    such a layer has the state behind the last token that was computed in the block. A layer with mixers beside
    attention has two layers of the KV cache: keys and values, then states.
    multipliers: of Falcon-H1; None if its weights have none.
    tower: of a model that makes rows of images, which reads patches in place of tokens; None for any other.
    mlp_only_layers: layers with a feed-forward block alone. mixer_only_layers: layers without one.
    full_heads: of layers without a window, if those of windowed layers differ; num_heads, num_kv_heads and head_dim are
    then of windowed layers. layer_sizes: intermediate_size per layer, if layers differ; else empty.
    token_inputs: None if layers read nothing of a token but its hidden vector. scaled_layers: a layer's result is
    multiplied by a learned number.
    streams: None if a token has one hidden vector. experts: None if no layer has any.
    bidirectional: a token also sees later ones; with a window, those less than that far away.
    token_types: number of token kinds, each with a vector added to the embedding; 0 for none. typed_inputs: an input id
    is token + kind × vocab_size; otherwise all tokens are of the first kind.
    pooled, task: None for a model that returns logits.
    states: "left" if a hidden state of each row is exported: the one after the last norm. "taken" if another model's
    states are read as well, or a tower's patches. "placed" if rows can take the place of tokens, behind the embedding.
    fc_bias: of the linear that reads states. stacked_rows: of a placed row, parts behind the first one, each of which
    is added to its token behind one of the first layers.
    states_layers: layers whose inputs are exported instead, num_layers for the last one's output. Side by side they go
    through a linear to states_size numbers; 0 for hidden_size.
    draft_vocab_size: rows of the output projection, each of a token of the vocabulary; 0 for all tokens in order.
    normed_states: states that are read join the residual normed.
    bos_token_id: None if the model has none.
    dtype: of the checkpoint: "f32", "f16" or "bf16" ("f32" if config.json does not say).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: QkNorm
    attention_scale: float
    sliding_window: int | None
    layer_windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    norm: Norm = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    residual: Residual = "pre"
    parallel_norms: int = 1
    activation: Activation = "silu"
    gated: bool = True
    down_bias: bool = False
    qk_norm_rotated: bool = False
    layer_chunks: tuple[int, ...] = ()
    sinks: bool = False
    query_growth: QueryGrowth | None = None
    local_rope: Rope | None = None
    unrotated_layers: tuple[int, ...] = ()
    learned_positions: int = 0
    alibi: Alibi | None = None
    head_bias: bool = False
    normed_head: bool = False
    attention_cap: float | None = None
    clip_qkv: float | None = None
    embedding_norm: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_cap: float | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    normed_values: bool = False
    kv_layers: tuple[int, ...] = ()
    delta_net: DeltaNet | None = None
    short_conv: ShortConv | None = None
    mamba: Mamba2 | None = None
    mlp_only_layers: tuple[int, ...] = ()
    mixer_only_layers: tuple[int, ...] = ()
    full_heads: Heads | None = None
    layer_sizes: tuple[int, ...] = ()
    token_inputs: TokenInputs | None = None
    scaled_layers: bool = False
    streams: Streams | None = None
    first_norm: bool = True
    final_norm: bool = True
    bidirectional: bool = False
    token_types: int = 0
    typed_inputs: bool = False
    pooled: Pooled | None = None
    task: Task | None = None
    states: States = "none"
    fc_bias: bool = False
    states_layers: tuple[int, ...] = ()
    states_size: int = 0
    draft_vocab_size: int = 0
    stacked_rows: int = 0
    normed_states: bool = False
    residual_factors: ResidualFactors | None = None
    attention_gate: bool = False
    multipliers: Multipliers | None = None
    tower: Tower | None = None

    @property
    def num_inputs(self) -> int:
        """The number of distinct input ids."""
        return self.vocab_size * (self.token_types if self.typed_inputs else 1)

    @property
    def states_width(self) -> int:
        """Numbers in a hidden state that is exported or read, or in a row that a tower reads; 0 without states."""
        if self.tower is not None:
            return self.tower.states_width
        if self.states == "placed":
            return (1 + self.stacked_rows) * self.hidden_size
        return 0 if self.states == "none" else self.states_size or self.hidden_size

    @property
    def output_width(self) -> int:
        """Numbers in a row of a graph's output."""
        if self.pooled is None:
            return self.vocab_size
        width = self.pooled.dense[-1].size if self.pooled.dense else self.hidden_size
        return width if self.tower is None else (1 + len(self.tower.stacked)) * width

    @property
    def whole_prompts(self) -> bool:
        """Whether a step must hold a whole text: tokens depend on later ones, or all are pooled."""
        return self.bidirectional or (self.pooled is not None and self.pooled.pooling != "last")

    @cached_property
    def cached_layers(self) -> tuple[int, ...]:
        """For each layer of the KV cache, the first layer of the model that reads it, which may have two. If no later
        step reads the cache, all layers share one."""
        if self.kv_layers:
            return tuple(range(1 + max(self.kv_layers)))
        without = set(self.mlp_only_layers)
        if self.bidirectional:
            return (0,)
        layers = (i for i in range(self.num_layers) if i not in without)
        return tuple(i for layer in layers for i in (layer,) * (1 if self.mixer_beside(layer) is None else 2))

    @property
    def num_kv_layers(self) -> int:
        """Layers of the KV cache."""
        return len(self.cached_layers)

    def is_cached(self, layer: int) -> bool:
        """Whether a layer of the model has one of the KV cache."""
        return layer not in self.mlp_only_layers

    def kv_layer(self, layer: int) -> int:
        """The layer of the KV cache that a model layer reads, which `is_cached`; the first of two."""
        if self.kv_layers or self.bidirectional:
            return self.kv_layers[layer] if self.kv_layers else 0
        beside = self.mamba.layers if self.mamba is not None and self.mamba.beside else ()
        return layer - sum(other < layer for other in self.mlp_only_layers) + sum(other < layer for other in beside)

    def state_layer(self, layer: int) -> int:
        """The layer of the KV cache that has the state of a model layer, which `has_state`."""
        return self.kv_layer(layer) + (0 if self.mixer_beside(layer) is None else 1)

    def recurrent(self, layer: int) -> DeltaNet | ShortConv | Mamba2 | None:
        """What a layer has in place of attention, with a state in place of keys and values; None for attention."""
        in_place = None if self.mamba is not None and self.mamba.beside else self.mamba
        nets = (self.delta_net, self.short_conv, in_place)
        return next((net for net in nets if net and layer in net.layers), None)

    def mixer_beside(self, layer: int) -> Mamba2 | None:
        """What a layer has beside attention, with a state beside keys and values; None for nothing."""
        net = self.mamba
        return net if net is not None and net.beside and layer in net.layers else None

    def has_state(self, layer: int) -> bool:
        """Whether a layer has a state, in place of keys and values or beside them."""
        return self.recurrent(layer) is not None or self.mixer_beside(layer) is not None

    @property
    def on_axes(self) -> bool:
        """Whether rotary positions of tokens have axes: where rows of images can take their place."""
        return self.states == "placed" and bool(self.rope.axes)

    @property
    def has_states(self) -> bool:
        """Whether any layer has a state."""
        return any(map(self.has_state, range(self.num_layers)))

    def cached_state(self, kv_layer: int) -> DeltaNet | ShortConv | Mamba2 | None:
        """What has its states in a layer of the KV cache; None for keys and values."""
        layer = self.cached_layers[kv_layer]
        if (beside := self.mixer_beside(layer)) is None:
            return self.recurrent(layer)
        return beside if kv_layer == self.state_layer(layer) else None

    def makes_kv(self, layer: int) -> bool:
        """Whether a layer writes keys and values."""
        if self.recurrent(layer) is not None or not self.is_cached(layer):
            return False
        return not self.kv_layers or self.kv_layers[layer] == layer

    def heads(self, layer: int) -> Heads:
        """Sizes of a layer's attention."""
        if self.full_heads is not None and not self.layer_windows[layer]:
            return self.full_heads
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    def kv_heads(self, kv_layer: int) -> tuple[int, int]:
        """(heads, elements of each) of a layer of the KV cache."""
        heads = self.heads(self.cached_layers[kv_layer])
        return heads.num_kv_heads, heads.head_dim

    @property
    def kv_head_counts(self) -> dict[int, int]:
        """KV heads by layer, of layers that make keys and values."""
        layers = filter(self.makes_kv, range(self.num_layers))
        return {layer: self.heads(layer).num_kv_heads for layer in layers}

    def qkv_parts(self, layer: int) -> tuple[int, ...]:
        """Rows of the parts of the fused projection: the gate if there is one, then q, then k and v if the layer makes
        them."""
        heads = self.heads(layer)
        gate = (heads.q_size,) if self.attention_gate else ()
        made = (heads.kv_size,) * (1 if heads.keys_are_values else 2) if self.makes_kv(layer) else ()
        return *gate, heads.q_size, *made

    def inner_size(self, layer: int) -> int:
        """Elements inside a layer's feed-forward block."""
        return self.layer_sizes[layer] if self.layer_sizes else self.intermediate_size

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct rotary tables that layers read."""
        return tuple(dict.fromkeys(self.layer_rope(layer) for layer in range(self.num_layers)))

    def layer_rope(self, layer: int) -> Rope:
        if layer in self.unrotated_layers:
            return NO_ROPE
        return self.local_rope if self.local_rope is not None and self.layer_windows[layer] else self.rope

    @property
    def rope_tables(self) -> dict[str, Rope]:
        """Buffer names of the rotary tables."""
        return {f"ropes.{i}.cos_sin": rope for i, rope in enumerate(self.ropes)}
