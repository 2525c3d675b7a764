"""What a checkpoint's configuration says of a decoder, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Norm = Literal["rms", "layer"]
QkNorm = Literal["none", "head", "each_head", "whole", "unit"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "xielu"]
Residual = Literal["pre", "parallel", "sandwich", "post", "sums"]
States = Literal["none", "left", "taken"]
Scores = Literal["softmax", "sigmoid", "mixer"]
Pooling = Literal["first", "mean", "last"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched. A field that the type does not use is None (truncate: True).

    rope_type: "linear", "dynamic", "llama3", "yarn", "longrope", "ntk_steps", or "factors" of a GGUF file, which divide
    the frequencies one by one. original_max_position_embeddings: tokens of the pretraining context. attention_factor,
    mscale, mscale_all_dim: the scale of cos and sin, resolved in `rope.py`. frequency_factors: divisors of the
    frequencies; of longrope for texts up to the original context, long_factors for longer ones.
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
    long_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Rope:
    """Rotary positions. theta: base of the frequencies; None: nothing is rotated. dim: leading elements of a head that
    are, even."""

    theta: float | None
    dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class Experts:
    """The feed-forward block of some layers, a mixture of experts. Sizes in elements.

    layers: those that have it, the others have a plain one. count, top_k: experts, and how many a token takes;
    intermediate_size: of one. scores: from logits of the router to weights, over all experts; "mixer": of the two best,
    each by the softmax over what is near it (mixer_noise, see `blocks.experts`). choice_bias: a bias that is added to
    scores for the choice alone. groups: equal ones, of which the top_groups best are chosen from; a group is as good as
    its best_of_group best experts in sum. normalised: the weights of a token are divided by their sum, least_sum at
    least; scale: of all weights. shared_size: of an expert that every token takes, 0 for none; shared_gate: it is taken
    as far as a gate of its own says. scaled_input: the one expert of a token reads its input times the sigmoid of the
    expert's logit. router_bias, biases: of the router, and of the experts' matrices. gate_limit, gate_gain: see
    `expert_ops.experts`. held: how many of them are here, which `expert_ops.held_experts` names; None: all.
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
    held: int | None = None


NO_ROPE = Rope(None, 2)
"""Of layers and models without rotary positions."""


@dataclass(frozen=True)
class Alibi:
    """Positions by a bias of scores: a head's slope times how far the key lies behind the query. slopes: by query head.
    rounded: the bias is rounded and scaled as in Falcon, see `ops.paged_attention`."""

    slopes: tuple[float, ...]
    rounded: bool = False


@dataclass(frozen=True)
class QueryGrowth:
    """Queries grow with their position. "steps": those of unrotated layers, times
    1 + factor · ln(1 + ⌊(position + 1) / every⌋). "log": those of all layers, times ln(position + 1) / ln(every) where
    that is more than 1."""

    every: float
    factor: float
    kind: Literal["steps", "log"] = "steps"


@dataclass(frozen=True)
class Latent:
    """Attention to a latent vector that all heads share (blocks/latent.py). Sizes in elements.

    query_rank: of what queries are made from, None: of the token itself. rank: of the latent vector. plain_dim: of a
    query's part without positions; rotated_dim: of its part with them, and of the key beside the latent vector;
    value_dim: of a head's result. norm_eps: of the norms of both vectors. interleaved: checkpoints have rotated
    elements in neighbouring pairs.
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
        """Elements that the cache keeps of a token: the latent vector, then the rotated key."""
        return self.rank + self.rotated_dim

    @property
    def query_dim(self) -> int:
        """Elements of one query."""
        return self.plain_dim + self.rotated_dim


@dataclass(frozen=True)
class Streams:
    """Gemma 3n's layers (blocks/streams.py): a token has several hidden vectors, of which a layer reads the first.

    count: hidden vectors. rank: of a linear path beside attention. input_size: elements of what a layer reads of the
    token besides; input_vocab: tokens that have such, others read that of token 0. cutoffs: per layer, from how many
    standard deviations above its mean on a gate of the feed-forward block counts, None for all of it. scaled: the first
    vector is multiplied by a learned one before it meets what the layer reads of the token.
    """

    count: int
    rank: int
    input_size: int
    input_vocab: int
    cutoffs: tuple[float | None, ...]
    scaled: bool = True


@dataclass(frozen=True)
class Dense:
    """A linear layer over a pooled row. size: rows of its matrix. activation: of its result, None for none. norm: a
    norm behind that. token_ids: its matrix is those rows of the output projection, empty: one of its own. source: what
    the checkpoint calls it, "" for what the family's layout says."""

    size: int
    bias: bool = False
    activation: Literal["tanh", "gelu"] | None = None
    norm: bool = False
    token_ids: tuple[int, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Pooled:
    """A model that gives a vector for each text, in place of logits. It is one row of the last layer, its first or
    last, or the mean of all, through the layers of `dense`. normalised: to length 1."""

    pooling: Pooling
    dense: tuple[Dense, ...] = ()
    normalised: bool = False


@dataclass(frozen=True)
class Task:
    """What the rows of a pooled model are for. activation: what makes scores of a row's numbers, None: they are scores
    as they are. labels: of the numbers, of "classify". template: the text of a query and a document of "rank", with
    {instruction}, {query} and {document} in it; None: the tokenizer's own pair."""

    name: Literal["embed", "rank", "classify"]
    activation: Literal["sigmoid", "softmax"] | None = None
    labels: tuple[str, ...] = ()
    template: str | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, or an encoder. Sizes in elements; max_position_embeddings in tokens.

    norm, norm_eps, norm_weight, norm_bias: of all norms over the hidden size. embedding_norm: one more on the
    embedding.
    qk_norm: what is normed of q and k before they are rotated: each head by one weight, each head by its own, or all
    heads as one vector. "unit": each head without weights, after they are rotated, in layers that do. qk_norm_rotated:
    after that, of "head".
    residual: where norms stand. Before both blocks; before both, which run side by side (with parallel_norms norms);
    before and after each block; after each block; or of each sum of a block and what it read.
    first_norm: there is one before the first attention. final_norm: behind the last layer.
    activation, gated: of the feed-forward block.
    rope, local_rope: of layers without and with a window, local_rope None where they are the same. unrotated_layers:
    without either.
    learned_positions: tokens of a table that is added to the embedding, 0 for none. alibi: None for no such bias.
    sliding_window: tokens a query of a windowed layer sees, itself included, None where no layer has one.
    layer_windows: the same per layer, 0 for full attention.
    layer_chunks: per layer, a token sees none before the last multiple of it, 0 or empty for no limit.
    sinks: each head has a learned score without a value. query_growth: None for none.
    attention_bias: of q, k and v. o_bias: of the output projection.
    attention_scale: of scores. attention_cap: tanh bounds them to it, None for not. clip_qkv: bound of q, k and v, None
    for none.
    down_bias: of the feed-forward block's last matrix, where mlp_bias is not. logit_cap: as attention_cap, of logits.
    normed_head: rows of the output projection are of length 1.
    latent: None where keys and values are kept by themselves. With it there is one KV head, of latent.key_dim elements,
    of which the first latent.rank are the value. normed_values:
    each head of v is normed, without weights.
    kv_layers: per layer, the one whose keys and values it reads; those of the first layers are their own, the last ones
    make none. Empty: all make their own. streams: None where a token has one hidden vector.
    experts: None where no layer has any.
    bidirectional: a token sees those behind it, too; with a window those less than so far away.
    token_types: kinds of tokens, each with a vector that is added to the embedding, 0 for none. typed_inputs: an input
    id is token + kind × vocab_size, else all are of the first kind.
    pooled, task: None for a model that gives logits.
    states: "left" where each row's hidden state behind the last norm is left for others. "taken" where those of another
    model are read, too. fc_bias: of the linear that reads them.
    bos_token_id: None where the model has none.
    dtype: of the checkpoint, "f32", "f16" or "bf16" ("f32" where config.json does not say).
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

    @property
    def num_inputs(self) -> int:
        """Input ids that there are."""
        return self.vocab_size * (self.token_types if self.typed_inputs else 1)

    @property
    def output_width(self) -> int:
        """Numbers of a row that a graph gives."""
        if self.pooled is None:
            return self.vocab_size
        return self.pooled.dense[-1].size if self.pooled.dense else self.hidden_size

    @property
    def whole_prompts(self) -> bool:
        """A step must hold all tokens of a text: they depend on those behind them, or all are pooled."""
        return self.bidirectional or (self.pooled is not None and self.pooled.pooling != "last")

    @property
    def num_kv_layers(self) -> int:
        """Layers of the KV cache. Where nobody reads it in a later step, all layers take turns with one."""
        if self.kv_layers:
            return 1 + max(self.kv_layers)
        return 1 if self.bidirectional else self.num_layers

    def kv_layer(self, layer: int) -> int:
        """The layer of the KV cache that a layer reads."""
        return self.kv_layers[layer] if self.kv_layers else min(layer, self.num_kv_layers - 1)

    def makes_kv(self, layer: int) -> bool:
        """Whether a layer writes keys and values."""
        return not self.kv_layers or self.kv_layers[layer] == layer

    @property
    def qkv_size(self) -> int:
        """Rows of the fused projection: q, then k, then v."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary tables that the layers read."""
        return tuple(dict.fromkeys(self.layer_rope(layer) for layer in range(self.num_layers)))

    def layer_rope(self, layer: int) -> Rope:
        if layer in self.unrotated_layers:
            return NO_ROPE
        return self.local_rope if self.local_rope is not None and self.layer_windows[layer] else self.rope

    @property
    def rope_tables(self) -> dict[str, Rope]:
        """What the buffers of the tables are called."""
        return {f"ropes.{i}.cos_sin": rope for i, rope in enumerate(self.ropes)}
