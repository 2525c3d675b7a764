"""Checkpoint layouts: names of a decoder's parts by family, orders of rows, and the resulting weight map."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmc.models.config import Experts, ModelConfig
from llmc.models.delta_layout import DELTA_LAYOUT, DeltaLayout, delta_targets
from llmc.models.delta_net import DeltaNet
from llmc.models.latent_layout import latent_targets
from llmc.models.mamba import Mamba2
from llmc.models.mamba_layout import MAMBA_LAYOUT, MambaLayout, mamba_targets
from llmc.models.pooled import Pooled
from llmc.models.row_orders import halved, rotated_first
from llmc.models.short_conv import ShortConv
from llmc.models.short_conv_layout import SHORT_CONV_LAYOUT, ShortConvLayout, short_conv_targets
from llmc.models.tower import Tower
from llmc.models.weight_map import Rows, Source, Target, WeightMap

RowOrder = Callable[[ModelConfig], Rows]
STATES_FC = "of_head.fc.weight"
"""The matrix of a drafting head that joins the rows of several layers, among the tensors of its model."""


@dataclass(frozen=True)
class Layout:
    """Names in a checkpoint, without `.weight` and `.bias`; {} is the layer number.

    The defaults are those of Llama and most others. Several names mean stacked tensors. Names in a layer follow `layer`
    and a dot.

    qkv_rows: row i of our q, k and v is row qkv_rows[i] of the checkpoint's; None for identity.
    interleaved: rotation pairs are neighbours in a head; ours are half a head apart.
    transposed: layers' matrices are stored [columns, rows]. norm_plus: constant to add to stored norm weights.
    skipped_positions: rows of the position table before position 0.
    expert_gate_up, expert_down: full names. With {} there is a tensor per expert; without it, one tensor [experts,
    rows, columns].
    experts_in_pairs: rows of gate and up alternate. experts_turned: the tensor is [experts, columns, rows].
    down_turned: only expert_down's tensor is. experts_joined: the first two axes are merged.
    expert_gate_up_bias, expert_down_bias: full names. With {} there is one per expert; without it, one tensor [experts,
    rows].
    choice_bias: full name; a one-row matrix if choice_bias_row. shared: the block of the shared expert; shared_gate_up,
    shared_down: names in it.
    expert_latent: linear layers to and from the vectors that experts read and write in place of tokens.
    types: the token type table. dense: linear layers over a pooled row. dense_norm: the norm after the first of these.
    patches: a tower's convolution over an image.
    parted_latent: separate tensors make keys and values from latent vectors. delta_net: of gated delta nets.
    short_conv: of gated short convolutions. mamba: of Mamba-2 mixers.
    unused: full names of tensors that are ignored. other_modules: name prefixes of unused modules, such as multi-token
    prediction; {} is the number of layers.
    """

    embed: str = "model.embed_tokens"
    embed_norm: str = ""
    positions: str = ""
    layer: str = "model.layers.{}"
    attention_norm: str = "input_layernorm"
    post_attention_norm: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    post_mlp_norm: str = "post_feedforward_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    up: str = "mlp.up_proj"
    activation: str = "mlp.act_fn"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    choice_bias_row: bool = False
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")
    expert_down: str = "mlp.experts.{}.down_proj.weight"
    expert_gate_up_bias: tuple[str, ...] = ()
    expert_down_bias: str = ""
    experts_in_pairs: bool = False
    experts_turned: bool = False
    down_turned: bool = False
    experts_joined: bool = False
    shared: str = "mlp.shared_expert"
    shared_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    expert_latent: tuple[str, str] = ("", "")
    norm: str = "model.norm"
    head: str = "lm_head"
    types: str = ""
    dense: tuple[str, ...] = ()
    dense_norm: str = ""
    patches: str = ""
    qkv_rows: RowOrder | None = None
    interleaved: bool = False
    transposed: bool = False
    norm_plus: float = 0.0
    skipped_positions: int = 0
    parted_latent: bool = False
    delta_net: DeltaLayout = DELTA_LAYOUT
    short_conv: ShortConvLayout = SHORT_CONV_LAYOUT
    mamba: MambaLayout = MAMBA_LAYOUT
    unused: tuple[str, ...] = (
        "model.rotary_emb.inv_freq",
        "model.layers.{}.self_attn.rotary_emb.inv_freq",
    )
    other_modules: tuple[str, ...] = ()

    def moved(self, old: str, new: str) -> Layout:
        """The layout with the prefix `old` of full names replaced by `new`."""
        names = ("embed", "embed_norm", "positions", "types", "layer", "norm", "patches")
        moved = {name: new + getattr(self, name).removeprefix(old) for name in names if getattr(self, name)}
        return replace(self, **moved, unused=tuple(new + name.removeprefix(old) for name in self.unused))

    def weight_map(self, config: ModelConfig) -> WeightMap:
        """The map of `blocks.decoder.Decoder`, in the order of its parameters."""
        others = tuple(name.format(config.num_layers) for name in self.other_modules)
        head = self.head if config.pooled is None else ""
        return WeightMap(tuple(_targets(self, config)), frozenset(_unused(self, config)), others, head)


LLAMA_LAYOUT = Layout()


def behind(layout: Layout, prefix: str) -> Layout:
    """The layout of checkpoints that contain the decoder inside another model."""
    return _renamed(layout, lambda name: f"{prefix}{name}")


def without(layout: Layout, prefix: str) -> Layout:
    """The layout of checkpoints of the decoder alone, whose names lack the prefix."""
    return _renamed(layout, lambda name: name.removeprefix(prefix))


def _renamed(layout: Layout, of: Callable[[str], str]) -> Layout:
    """The layout with all names outside layers mapped by `of`."""
    return replace(
        layout,
        embed=of(layout.embed),
        embed_norm=of(layout.embed_norm),
        positions=of(layout.positions),
        layer=of(layout.layer),
        norm=of(layout.norm),
        head=of(layout.head),
        unused=tuple(map(of, layout.unused)),
        other_modules=tuple(map(of, layout.other_modules)),
    )


def _head_order(layout: Layout, config: ModelConfig, layer: int) -> np.ndarray | None:
    """The element order of rotated heads; None for identity."""
    if layout.interleaved:
        return halved(config)
    return rotated_first(config.layer_rope(layer), config.heads(layer).head_dim)


def _qkv_rows(layout: Layout, config: ModelConfig, layer: int) -> Rows | None:
    order, heads = _head_order(layout, config, layer), config.heads(layer)
    if order is None:
        return layout.qkv_rows(config) if layout.qkv_rows else None
    size = sum(config.qkv_parts(layer))
    rows = np.arange(size, dtype=np.int32) if layout.qkv_rows is None else layout.qkv_rows(config)
    of_heads = rows.reshape(-1, heads.head_dim)
    rotated = heads.num_heads + heads.num_kv_heads
    return np.concatenate((of_heads[:rotated, order], of_heads[rotated:])).ravel()


def _unused(layout: Layout, config: ModelConfig) -> Iterator[str]:
    for name in layout.unused:
        yield from (name.format(i) for i in range(config.num_layers if "{}" in name else 1))
    if config.tie_word_embeddings or config.pooled is not None:
        yield f"{layout.head}.weight"


class _Parts:
    """Targets of one checkpoint."""

    def __init__(self, layout: Layout, config: ModelConfig) -> None:
        self.layout, self.config = layout, config

    def norm(self, target: str, source: str) -> Iterator[Target]:
        """Over the hidden size."""
        size = self.config.hidden_size
        if self.config.norm_weight:
            yield Target(f"{target}.weight", (Source(f"{source}.weight", (size,)),), "f32", plus=self.layout.norm_plus)
        if self.config.norm_bias:
            yield Target(f"{target}.bias", (Source(f"{source}.bias", (size,)),), "f32")

    def linear(
        self,
        target: str,
        sources: tuple[str, ...],
        sizes: tuple[int, ...],
        columns: int,
        bias: bool,
        *,
        makes: str | None = None,
        rows: Rows | None = None,
        precise: bool = False,
    ) -> Iterator[Target]:
        """A linear of rows `sizes`, stored in one source or one source each."""
        found = sizes if len(sources) == len(sizes) else (sum(sizes),)
        parts = tuple(zip(sources, found, strict=True))
        turned = self.layout.transposed
        weights = tuple(Source(f"{n}.weight", (r, columns), (columns, r) if turned else None) for n, r in parts)
        yield Target(f"{target}.weight", weights, "act", makes, rows, precise=precise)
        if bias:
            yield Target(f"{target}.bias", tuple(Source(f"{n}.bias", (r,)) for n, r in parts), "f32", makes, rows)


def _targets(layout: Layout, config: ModelConfig) -> Iterator[Target]:
    parts = _Parts(layout, config)
    vocabulary = (config.vocab_size, config.hidden_size)
    if config.tower is None or config.tower.places:
        yield Target("embed.weight", (Source(f"{layout.embed}.weight", vocabulary),), "act", table=True)
    if count := config.learned_positions:
        skipped = layout.skipped_positions
        table = (Source(f"{layout.positions}.weight", (count + skipped, config.hidden_size)),)
        rows = np.arange(skipped, skipped + count, dtype=np.int32) if skipped else None
        yield Target("positions.weight", table, "act", rows=rows, table=True)
    yield from _types(layout, config)
    if config.embedding_norm:
        yield from parts.norm("embed_norm", layout.embed_norm)
    for layer in range(config.num_layers):
        yield from _layer(parts, layer, f"layers.{layer}", layout.layer.format(layer))
    if config.pooled is not None:
        yield from _pooled(parts, config.pooled)
        if config.tower is not None:
            yield from _patches(parts, config.tower)
        return
    yield from parts.norm("norm", layout.norm)
    if config.states_layers:
        joined = config.states_width, len(config.states_layers) * config.hidden_size
        yield Target("states_fc.weight", (Source(STATES_FC, joined),), "act", precise=True)
    elif config.states == "left":
        yield from parts.norm("states_norm", layout.norm)
    if not config.tie_word_embeddings:
        lengths = _of_length_1 if config.normed_head else None
        yield Target("lm_head.weight", (Source(f"{layout.head}.weight", vocabulary),), "act", of_rows=lengths)
    if config.head_bias:
        yield Target("lm_head.bias", (Source(f"{layout.head}.bias", vocabulary[:1]),), "f32")


def _types(layout: Layout, config: ModelConfig) -> Iterator[Target]:
    """The token type table, or only the vector of type 0."""
    count, hidden, name = config.token_types, config.hidden_size, f"{layout.types}.weight"
    if config.typed_inputs:
        yield Target("types.weight", (Source(name, (count, hidden)),), "act", table=True)
    elif count:
        rows = np.arange(hidden, dtype=np.int32)
        yield Target("kind", (Source(name, (count * hidden,), (count, hidden)),), "f32", rows=rows)


def _pooled(parts: _Parts, pooled: Pooled) -> Iterator[Target]:
    """The parts after the layers of a model that returns vectors."""
    layout, config = parts.layout, parts.config
    columns = config.hidden_size * (1 if config.tower is None else config.tower.merged)
    if config.final_norm:
        yield from parts.norm("pooled.norm", layout.norm)
    # The last names: a model without the first layers has no names for them.
    unnamed = sum(not dense.source for dense in pooled.dense)
    names = iter(layout.dense[len(layout.dense) - unnamed :])
    for i, dense in enumerate(pooled.dense):
        name = dense.source or next(names)
        target = f"pooled.dense.{i}.linear"
        if dense.token_ids:
            head = f"{layout.embed if config.tie_word_embeddings else layout.head}.weight"
            rows = np.array(dense.token_ids, np.int32)
            yield Target(
                f"{target}.weight", (Source(head, (config.vocab_size, columns)),), "act", rows=rows, precise=True
            )
        else:
            yield from parts.linear(target, (name,), (dense.size,), columns, dense.bias, precise=True)
        if dense.norm:
            yield from parts.norm(f"pooled.dense.{i}.norm", layout.dense_norm)
        columns = dense.size


def _patches(parts: _Parts, tower: Tower) -> Iterator[Target]:
    """The linear that reads patches, which checkpoints have as a convolution whose steps are as wide as its kernel."""
    name, size = parts.layout.patches, parts.config.hidden_size
    frames = (tower.frames,) if tower.frames > 1 else ()
    stored = (size, tower.channels, *frames, tower.patch_size, tower.patch_size)
    yield Target("patches.weight", (Source(f"{name}.weight", (size, tower.patch_width), stored),), "act", precise=True)
    if tower.patch_bias:
        yield Target("patches.bias", (Source(f"{name}.bias", (size,)),), "f32")


def _layer(parts: _Parts, layer: int, name: str, prefix: str) -> Iterator[Target]:
    layout, config = parts.layout, parts.config
    if layer not in config.mlp_only_layers:
        if config.residual not in ("post", "sums") and (layer > 0 or config.first_norm):
            yield from parts.norm(f"{name}.attention_norm", f"{prefix}.{layout.attention_norm}")
        yield from _mixer(parts, layer, name, prefix)
        if config.residual in ("sandwich", "post", "sums"):
            yield from parts.norm(f"{name}.attention_post_norm", f"{prefix}.{layout.post_attention_norm}")
    if layer in config.mixer_only_layers:
        return
    if config.residual in ("pre", "sandwich", "normed") or (
        config.residual == "parallel" and config.parallel_norms > 1
    ):
        yield from parts.norm(f"{name}.mlp_norm", f"{prefix}.{layout.mlp_norm}")
    yield from _feed_forward(parts, layer, name, prefix)
    if config.residual in ("sandwich", "post", "sums"):
        yield from parts.norm(f"{name}.mlp_post_norm", f"{prefix}.{layout.post_mlp_norm}")


def _mixer(parts: _Parts, layer: int, name: str, prefix: str) -> Iterator[Target]:
    """Attention, or what is in its place; also what is beside it."""
    layout, config, target = parts.layout, parts.config, f"{name}.attention"
    net = config.recurrent(layer)
    if isinstance(net, DeltaNet):
        of_net = f"{prefix}.{layout.delta_net.block}"
        yield from delta_targets(parts, config, net, layout.delta_net, target, of_net)
    elif isinstance(net, ShortConv):
        of_net = f"{prefix}.{layout.short_conv.block}"
        yield from short_conv_targets(parts, config, net, layout.short_conv, target, of_net)
    elif isinstance(net, Mamba2):
        yield from mamba_targets(parts, config, net, layout.mamba, target, f"{prefix}.{layout.mamba.block}")
    elif config.latent is None:
        yield from _attention(parts, layer, name, prefix)
        if (beside := config.mixer_beside(layer)) is not None:
            yield from mamba_targets(
                parts, config, beside, layout.mamba, f"{target}.mamba", f"{prefix}.{layout.mamba.block}"
            )
    else:
        names = target, f"{prefix}.self_attn"
        yield from latent_targets(parts, config, config.latent, *names, parted=layout.parted_latent)


def _attention(parts: _Parts, layer: int, name: str, prefix: str) -> Iterator[Target]:
    layout, config = parts.layout, parts.config
    hidden, heads = config.hidden_size, config.heads(layer)

    def at(*names: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{n}" for n in names)

    if config.sinks:
        yield Target(f"{name}.attention.sinks", (Source(f"{prefix}.{layout.sinks}", (heads.num_heads,)),), "f32")
    norms = [("q_norm", layout.q_norm, heads.num_heads), ("k_norm", layout.k_norm, heads.num_kv_heads)]
    qkv, bias = f"{name}.attention.qkv", config.attention_bias
    if config.makes_kv(layer):
        of_q, kv = heads.q_size * (1 + config.attention_gate), heads.kv_size
        names = layout.qkv[:2] if heads.keys_are_values else layout.qkv
        made = kv if heads.keys_are_values else 2 * kv
        sizes = (of_q, made) if len(names) == 2 else (of_q, kv, kv)
        yield from parts.linear(qkv, at(*names), sizes, hidden, bias, rows=_qkv_rows(layout, config, layer))
    else:
        rows = _qkv_rows(layout, config, layer)
        yield from parts.linear(qkv, at(layout.qkv[0]), (heads.q_size,), hidden, bias, rows=rows)
        norms = norms[:1]
    for norm, source, count in norms:
        yield from _head_norm(parts, f"{name}.attention.{norm}.weight", f"{prefix}.{source}.weight", count, layer)
    yield from parts.linear(f"{name}.attention.out", at(layout.out), (hidden,), heads.q_size, config.o_bias)


def _feed_forward(parts: _Parts, layer: int, name: str, prefix: str) -> Iterator[Target]:
    layout, config = parts.layout, parts.config
    hidden, inner, experts = config.hidden_size, config.inner_size(layer), config.experts
    if experts is not None and layer in experts.layers:
        yield from _experts(parts, experts, f"{name}.mlp", prefix)
        if not experts.beside_plain:
            return

    def at(*names: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{n}" for n in names)

    down = f"{name}.mlp.down"
    if config.gated:
        gates = at(*layout.gate_up)
        makes = f"{down}.weight"
        yield from parts.linear(f"{name}.mlp.gate_up", gates, (inner, inner), hidden, config.mlp_bias, makes=makes)
    else:
        yield from parts.linear(f"{name}.mlp.up", at(layout.up), (inner,), hidden, config.mlp_bias)
    if config.activation == "xielu":
        for alpha, least in (("alpha_p", 0.0), ("alpha_n", 0.5)):
            learned = Source(f"{prefix}.{layout.activation}.{alpha}", (1,))
            yield Target(f"{name}.mlp.xielu.{alpha}", (learned,), "f32", of_rows=_softplus(least))
    yield from parts.linear(down, at(layout.down), (hidden,), inner, config.mlp_bias or config.down_bias)


def _experts(parts: _Parts, experts: Experts, name: str, prefix: str) -> Iterator[Target]:
    """The router, the experts in order, and the shared expert."""
    layout, hidden, inner = parts.layout, parts.config.hidden_size, experts.intermediate_size
    width, first = experts.latent_size or hidden, (2 if experts.gated else 1) * inner
    router = (f"{prefix}.{layout.router}",)
    yield from parts.linear(f"{name}.router", router, (experts.count,), hidden, experts.router_bias, precise=True)
    if experts.choice_bias:
        stored = (1, experts.count) if layout.choice_bias_row else None
        added = Source(f"{prefix}.{layout.choice_bias}", (experts.count,), stored)
        yield Target(f"{name}.choice_bias", (added,), "f32")
    if experts.latent_size:
        latent = tuple(f"{prefix}.{part}" for part in layout.expert_latent)
        yield from parts.linear(f"{name}.latent_in", latent[:1], (width,), hidden, False)
    pairs = experts.count if layout.experts_in_pairs else 0
    gate_up = _of_experts(layout, experts.count, prefix, layout.expert_gate_up, first, width)
    rows = _experts_apart(experts.count, inner) if layout.experts_joined and len(gate_up) == 2 else None
    down_name, count = f"{name}.experts.down.weight", experts.count
    makes = down_name if experts.gated else None
    yield Target(f"{name}.experts.gate_up.weight", gate_up, "act", makes, rows, pairs=pairs, matrices=count)
    if experts.biases:
        biases = tuple(f"{prefix}.{bias}" for bias in layout.expert_gate_up_bias)
        yield _bias_of_experts(f"{name}.experts.gate_up", biases, experts.count, first, pairs, makes)
    of_down = replace(layout, experts_turned=layout.down_turned or layout.experts_turned)
    down = _of_experts(of_down, experts.count, prefix, (layout.expert_down,), width, inner)
    yield Target(down_name, down, "act", matrices=count)
    if experts.biases:
        biases = (f"{prefix}.{layout.expert_down_bias}",)
        yield _bias_of_experts(f"{name}.experts.down", biases, experts.count, width)
    if experts.latent_size:
        yield from parts.linear(f"{name}.latent_out", latent[1:], (hidden,), width, False)
    if experts.shared_size:
        gates = tuple(f"{prefix}.{layout.shared}.{part}" for part in layout.shared_gate_up)
        shared = f"{name}.shared"
        if experts.gated:
            sizes, makes = (experts.shared_size, experts.shared_size), f"{shared}.down.weight"
            yield from parts.linear(f"{shared}.gate_up", gates, sizes, hidden, False, makes=makes)
        else:
            yield from parts.linear(f"{shared}.up", gates, (experts.shared_size,), hidden, False)
        source = (f"{prefix}.{layout.shared}.{layout.shared_down}",)
        yield from parts.linear(f"{shared}.down", source, (hidden,), experts.shared_size, False)
    if experts.shared_gate:
        gate = (f"{prefix}.{layout.shared_gate}",)
        yield from parts.linear(f"{name}.shared_gate", gate, (1,), hidden, False, precise=True)


def _bias_of_experts(
    name: str, names: tuple[str, ...], count: int, rows: int, pairs: int = 0, makes: str | None = None
) -> Target:
    """The experts' biases, in order."""
    if "{}" in names[0]:
        sources = tuple(Source(one.format(i), (rows // len(names),)) for i in range(count) for one in names)
    else:
        sources = tuple(Source(one, (count * rows,), (count, rows)) for one in names)
    return Target(f"{name}.bias", sources, "f32", makes, pairs=pairs, matrices=count)


def _of_experts(
    layout: Layout, count: int, prefix: str, names: tuple[str, ...], rows: int, columns: int
) -> tuple[Source, ...]:
    """A matrix of `rows` rows per expert, from one tensor for all experts or several per expert."""
    shape = (rows // len(names), columns)
    if "{}" not in names[0]:
        turned = layout.experts_turned
        whole, each = (count * shape[0], columns), shape[::-1] if turned else shape
        stored: tuple[int, ...] | None = (count, *each)
        if layout.experts_joined:
            stored = (count * each[0], each[1]) if turned else None
        blocks = count if layout.experts_joined and turned else 0
        return tuple(Source(f"{prefix}.{name}", whole, stored, turned, blocks) for name in names)
    return tuple(Source(f"{prefix}.{name.format(i)}", shape) for i in range(count) for name in names)


def _experts_apart(count: int, inner: int) -> Rows:
    """Row order that gives each expert's gate, then up, if all gates are stored first."""
    rows = np.arange(2 * count * inner, dtype=np.int32).reshape(2, count, inner)
    return rows.transpose(1, 0, 2).ravel()


def _of_length_1(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows scaled to length 1, as by torch's `normalize`."""
    lengths = np.sqrt(np.square(rows).sum(-1, keepdims=True))
    normed: NDArray[np.float32] = rows / np.maximum(lengths, np.float32(1e-12))
    return normed


def _softplus(least: float) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """least + ln(1 + eˣ)."""
    return lambda x: np.float32(least) + np.logaddexp(np.float32(0.0), x)


def _head_norm(parts: _Parts, target: str, source: str, heads: int, layer: int) -> Iterator[Target]:
    """The norm of q or k: one head's weights, or those of all heads. {} in a name is the head number."""
    config, layout = parts.config, parts.layout
    if config.qk_norm in ("none", "unit"):
        return
    count, head_dim = 1 if config.qk_norm == "head" else heads, config.heads(layer).head_dim
    size = count * head_dim
    if "{}" in source:
        sources = tuple(Source(source.format(i), (head_dim,)) for i in range(count))
    else:
        sources = (Source(source, (size,), (count, head_dim) if config.qk_norm == "each_head" else None),)
    order = _head_order(layout, config, layer)
    rows = None if order is None else np.arange(size, dtype=np.int32).reshape(count, -1)[:, order].ravel()
    yield Target(target, sources, "f32", rows=rows, plus=layout.norm_plus)
