"""From a graph's structure to a configuration and the model's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from llmc.models.config import ModelConfig, QkNorm
from llmc.models.convert import Array
from llmc.models.families.onnx import MODEL_TYPE
from llmc.models.pooled import Dense, Pooled
from llmc.models.rotary import NO_ROPE, Rope
from llmc.models.sources.onnx.importer import Imported
from llmc.models.sources.onnx.probe import Probe, past_name
from llmc.models.sources.onnx.rotary import Heads, rope_of
from llmc.models.sources.onnx.rows import Unrecognised
from llmc.models.sources.onnx.scores import sight_of
from llmc.models.sources.onnx.structure import Attention, Block, Structure, linear_of
from llmc.models.sources.onnx.terms import Linear, Norm
from llmc.models.sources.onnx.weights import Weight

T = TypeVar("T")
_CLOSE_SCALE, _CLOSE_SCALE_IN_SHORT = 1e-6, 1e-3
"""Relative tolerances of a scale of scores. In f16, queries and keys each have its rounded root as a factor."""


@dataclass(frozen=True)
class Stated:
    """Facts from config files that the graph does not show. max_len: longest text in tokens; None if unknown. ropes:
    candidate rotary positions."""

    max_len: int | None
    ropes: tuple[Rope, ...]
    eos: tuple[int, ...]
    bos: int | None


@dataclass(frozen=True)
class Types:
    """Of a graph's matrices. most: of most elements. has_short: whether some are of 16 bits."""

    most: str
    has_short: bool


@dataclass(frozen=True, eq=False)
class Recovered:
    """A model and its tensors, by the names of `families/onnx.py`."""

    config: ModelConfig
    tensors: dict[str, Weight | Array]


def recover(structure: Structure, probe: Probe, far: Imported | None, stated: Stated, types: Types) -> Recovered:
    """Raises Unrecognised for layers that differ, or a model that llmc cannot express; Unstated."""
    return _Recovery(structure, probe, far, stated, types).recovered()


def _alike(heads: Sequence[Heads]) -> bool:
    """Whether all are rotated by the same angles."""
    return not any((abs(one.angles - heads[0].angles) > 1e-6).any() for one in heads)


class Unstated(Exception):
    """A fact that neither the graph nor the files beside it have; the message says which, and what to do."""


class _Recovery:
    def __init__(self, structure: Structure, probe: Probe, far: Imported | None, stated: Stated, types: Types) -> None:
        self._structure, self._probe, self._far, self._stated = structure, probe, far, stated
        self._types = types
        self._tensors: dict[str, Weight | Array] = {}
        self._norms = [norm for norm in self._all_norms() if norm is not None]

    def _all_norms(self) -> Iterable[Norm | None]:
        structure = self._structure
        yield from (structure.base.norm, structure.final)
        for block in (block for layer in structure.layers for block in layer):
            yield from (block.before, block.after)
        yield from (layer.norm for layer in structure.dense)

    def recovered(self) -> Recovered:
        config = self._config()
        self._place_ends(config)
        for i, (attention, mlp) in enumerate(self._structure.layers):
            self._place_attention(f"layers.{i}", config, attention)
            self._place_mlp(f"layers.{i}", config, mlp)
        return Recovered(config, self._tensors)

    # Configuration

    def _config(self) -> ModelConfig:
        structure, base = self._structure, self._structure.base
        attentions = [attention.attention for attention, _ in structure.layers if attention.attention is not None]
        inners = [mlp.inner for _, mlp in structure.layers if mlp.inner is not None]
        hidden = base.tokens.width
        heads = _one((a.q.num_heads for a in attentions), "numbers of heads")
        # A bias by position, such as ALiBi's, explains a missing table of positions.
        sights = [sight_of(a.term.scores, self._probe, self._far) for a in attentions]
        max_len = self._max_len()
        windows = tuple(sight.window for sight in sights)
        ropes = self._ropes(attentions, windows, max_len)
        (rope, _), (local, _) = ropes
        head = structure.head
        norm_kind = _one((norm.kind for norm in self._norms), "kinds of norms")
        qkv = [linear_of(h)[0] for a in attentions for h in (a.q, a.k, a.v)]
        gated = _one((inner.up is not None for inner in inners), "kinds of feed-forward blocks")
        ups = [_linear(part.term) for inner in inners for part in (inner.inner, inner.up) if part is not None]
        mlp_bias = any(layer.bias is not None for layer in ups)
        down_bias = any(mlp.out.bias is not None for _, mlp in structure.layers)
        return ModelConfig(
            model_type=MODEL_TYPE,
            vocab_size=base.tokens.weight.shape[0],
            hidden_size=hidden,
            intermediate_size=_one((len(inner.inner.idx) for inner in inners), "sizes of feed-forward blocks"),
            num_layers=len(structure.layers),
            num_heads=heads,
            num_kv_heads=_one((a.k.num_heads for a in attentions), "numbers of heads of keys"),
            head_dim=_one((a.term.scores.head_dim for a in attentions), "sizes of heads"),
            norm_eps=_one((n.eps for n in (*self._norms, *self._head_norms(attentions))), "epsilons of norms"),
            rope=rope,
            local_rope=None if local == rope else local,
            unrotated_layers=tuple(i for i, a in enumerate(attentions) if rope != NO_ROPE and not len(a.q.angles)),
            max_position_embeddings=max_len,
            tie_word_embeddings=head is not None and self._is_tied(head.linear),
            attention_bias=any(layer.bias is not None for layer in qkv)
            or any(h.bias is not None for a in attentions for h in (a.q, a.k, a.v)),
            o_bias=any(attention.out.bias is not None for attention, _ in structure.layers),
            mlp_bias=mlp_bias,
            down_bias=down_bias and not mlp_bias,
            qk_norm=self._qk_norm(attentions, norm_kind),
            attention_scale=_one(
                (self._scale(a, ropes[window > 0][1]) for a, window in zip(attentions, windows, strict=True)),
                "scales of scores",
            ),
            sliding_window=max(windows) or None,
            layer_windows=windows,
            eos_token_ids=self._stated.eos,
            bos_token_id=self._stated.bos,
            dtype=self._types.most,
            norm=norm_kind,
            norm_weight=True,
            norm_bias=norm_kind == "layer",
            residual=structure.residual,
            parallel_norms=self._parallel_norms(),
            activation=_one((inner.activation for inner in inners), "activations"),
            gated=gated,
            learned_positions=max_len if base.positions is not None else 0,
            head_bias=head is not None and head.linear.bias is not None,
            attention_cap=_one((a.term.scores.cap for a in attentions), "bounds of scores"),
            embedding_norm=base.norm is not None,
            embedding_multiplier=base.factor,
            residual_multiplier=_one(
                (block.factor for layer in structure.layers for block in layer), "factors of what blocks make"
            ),
            logit_multiplier=1.0 if head is None else head.multiplier,
            logit_cap=None if head is None else head.cap,
            first_norm=structure.residual != "pre" or structure.layers[0][0].before is not None,
            final_norm=structure.final is not None,
            bidirectional=not _one((sight.causal for sight in sights), "kinds of masks"),
            token_types=base.types.weight.shape[0] if base.types is not None else 0,
            pooled=self._pooled(),
        )

    def _max_len(self) -> int:
        positions = self._structure.base.positions
        rows = None if positions is None else positions.weight.shape[0] - positions.first
        known = [count for count in (rows, self._stated.max_len) if count is not None]
        if not known:
            raise Unstated(
                "has no table of positions, and no config.json beside it says how long texts may be; put one there "
                "with max_position_embeddings"
            )
        return rows if rows is not None else known[0]

    def _ropes(
        self, attentions: Sequence[Attention], windows: Sequence[int], max_len: int
    ) -> tuple[tuple[Rope, float], tuple[Rope, float]]:
        """(rotary positions, cosine factor) of layers without and with a window."""
        turned = [(a.q, window > 0) for a, window in zip(attentions, windows, strict=True) if len(a.q.angles)]
        if not turned:
            return (NO_ROPE, 1.0), (NO_ROPE, 1.0)
        if any(len(q.angles) != len(turned[0][0].angles) for q, _ in turned):
            raise Unrecognised("rotates heads in some layers otherwise than in others")
        if _alike([q for q, _ in turned]):
            both = rope_of(turned[0][0], self._stated.ropes, max_len)
            return both, both
        kinds = [[q for q, windowed in turned if windowed is local] for local in (False, True)]
        if not all(kind and _alike(kind) for kind in kinds):
            raise Unrecognised(
                "rotates heads in some layers by other angles than in others that have a window like them"
            )
        full, windowed = (rope_of(kind[0], self._stated.ropes, max_len) for kind in kinds)
        return full, windowed

    def _scale(self, attention: Attention, rope_factor: float) -> float:
        """The score scale, including factors of queries and keys."""
        # tanh's argument was divided by the bound before.
        scale = attention.term.scores.scale * (attention.term.scores.cap or 1.0)
        for heads in (attention.q, attention.k):
            rotated = len(heads.angles) > 0
            whole = 2 * len(heads.angles) == heads.idx.shape[1]
            ratio = 1.0 if heads.is_short else heads.amplitude / rope_factor
            if rotated and not whole and abs(ratio - heads.factor) > 1e-5 * abs(heads.factor):
                raise Unrecognised("scales the part of a head that is rotated, and not the rest")
            scale *= ratio if rotated else heads.factor
        close = _CLOSE_SCALE_IN_SHORT if self._types.has_short else _CLOSE_SCALE
        return _nice(scale, attention.term.scores.head_dim, close)

    def _head_norms(self, attentions: Sequence[Attention]) -> list[Norm]:
        found = (linear_of(heads)[1] for a in attentions for heads in (a.q, a.k))
        return [norm for norm in found if norm is not None]

    def _qk_norm(self, attentions: Sequence[Attention], kind: str) -> QkNorm:
        norms = [[linear_of(heads)[1] for heads in (a.q, a.k)] for a in attentions]
        if any(linear_of(a.v)[1] is not None for a in attentions):
            raise Unrecognised("norms values")
        if all(norm is None for pair in norms for norm in pair):
            return "none"
        may_be: list[QkNorm] = ["head", "each_head", "whole"]
        for attention, pair in zip(attentions, norms, strict=True):
            for heads, norm in zip((attention.q, attention.k), pair, strict=True):
                if norm is None or norm.kind != kind or norm.bias is not None or norm.weight is None:
                    raise Unrecognised("norms heads in another way than rows, or only some")
                weight = norm.weight[heads.idx]
                by_head = norm.groups == heads.num_heads
                fits = {"head": by_head and (weight == weight[:1]).all(), "each_head": by_head}
                may_be = [kind for kind in may_be if fits.get(kind, norm.groups == 1)]
        if not may_be:
            raise Unrecognised("norms groups of heads, or those of queries otherwise than those of keys")
        return may_be[0]

    def _is_tied(self, head: Linear) -> bool:
        name = self._structure.base.tokens.weight.name
        return head.weight.name == name and name is not None and head.weight.turned

    def _parallel_norms(self) -> int:
        if self._structure.residual != "parallel":
            return 1
        return 1 if all(a.before is m.before for a, m in self._structure.layers) else 2

    def _pooled(self) -> Pooled | None:
        """The pooled head, without its pooling, which config files state."""
        structure = self._structure
        if structure.head is not None:
            return None
        dense = tuple(
            Dense(layer.linear.width, layer.linear.bias is not None, layer.activation, layer.norm is not None)
            for layer in structure.dense
        )
        if len(dense) > 2:
            raise Unrecognised(f"has {len(dense)} linear layers over the row of a text")
        return Pooled("first", dense)

    # Tensors

    def _place_ends(self, config: ModelConfig) -> None:
        structure, base = self._structure, self._structure.base
        self._tensors["embed.weight"] = Weight(base.tokens.weight)
        if base.positions is not None:
            first = base.positions.first
            rows = np.arange(first, first + config.learned_positions) if first else None
            self._tensors["positions.weight"] = Weight(base.positions.weight, rows)
        if base.types is not None:
            self._tensors["types.weight"] = Weight(base.types.weight)
        self._place_norm("embed_norm", config, base.norm)
        self._place_norm("norm", config, structure.final)
        head = structure.head
        if head is not None and not config.tie_word_embeddings:
            self._tensors["lm_head.weight"] = Weight(head.linear.weight.transposed)
        if head is not None and head.linear.bias is not None:
            self._tensors["lm_head.bias"] = head.linear.bias
        names = [f"dense.{i}" for i in range(2 - len(structure.dense), 2)]
        for name, layer in zip(names, structure.dense, strict=True):
            linear = layer.linear
            self._place_linear(name, linear, np.arange(linear.width), bias=linear.bias is not None)
            self._place_norm("dense.norm", config, layer.norm)

    def _place_norm(self, name: str, config: ModelConfig, norm: Norm | None) -> None:
        if norm is None:
            return
        self._tensors[f"{name}.weight"] = np.ones(norm.width, np.float32) if norm.weight is None else norm.weight
        if config.norm_bias:
            self._tensors[f"{name}.bias"] = np.zeros(norm.width, np.float32) if norm.bias is None else norm.bias
        elif norm.bias is not None:
            raise Unrecognised("adds a bias to a norm by the root of the mean square")

    def _place_linear(self, name: str, layer: Linear, rows: Array, *, bias: bool, more: Array | None = None) -> None:
        """rows: rows to take, in this order. more: added to the bias."""
        self._tensors[f"{name}.weight"] = Weight(layer.weight.transposed, rows)
        if bias:
            own = np.zeros(len(rows), np.float32) if layer.bias is None else layer.bias[rows]
            self._tensors[f"{name}.bias"] = own if more is None else own + more

    def _place_attention(self, name: str, config: ModelConfig, block: Block) -> None:
        attention = block.attention
        assert attention is not None
        self._check_caches(name, attention)
        before, after = ("attention_norm", "attention_post_norm")
        self._place_norm(f"{name}.{before}", config, block.before)
        self._place_norm(f"{name}.{after}", config, block.after)
        for part, heads in (("q", attention.q), ("k", attention.k), ("v", attention.v)):
            self._place_heads(f"{name}.attention.{part}", config, heads, is_value=part == "v")
        self._place_linear(f"{name}.attention.out", block.out, np.arange(block.out.width), bias=config.o_bias)

    def _place_heads(self, name: str, config: ModelConfig, heads: Heads, *, is_value: bool) -> None:
        layer, norm = linear_of(heads)
        if is_value and heads.factor != 1.0:
            raise Unrecognised("scales values")
        rows = heads.idx.ravel()
        if norm is not None:
            assert norm.weight is not None
            weight = norm.weight[heads.idx]
            shapes = {"head": weight[0], "each_head": weight}
            self._tensors[f"{name}_norm.weight"] = shapes.get(config.qk_norm, weight.ravel())
            rows = norm.x.parts[0].idx[rows]
        bias = None if heads.bias is None else heads.bias.ravel() / np.float32(heads.factor)
        self._place_linear(name, layer, rows, bias=config.attention_bias, more=bias)

    def _check_caches(self, name: str, attention: Attention) -> None:
        """Checks that each layer uses caches of its own."""
        if attention.caches is None:
            return
        layer = int(name.rpartition(".")[2])
        if [past_name(cache) for cache in attention.caches] != [(layer, "key"), (layer, "value")]:
            raise Unrecognised(f"keeps layer {layer} in {' and '.join(attention.caches)}")

    def _place_mlp(self, name: str, config: ModelConfig, block: Block) -> None:
        inner = block.inner
        assert inner is not None
        if config.residual != "parallel" or config.parallel_norms > 1:
            self._place_norm(f"{name}.mlp_norm", config, block.before)
        self._place_norm(f"{name}.mlp_post_norm", config, block.after)
        down_bias = config.mlp_bias or config.down_bias
        self._place_linear(f"{name}.mlp.down", block.out, np.arange(block.out.width), bias=down_bias)
        first, up = inner.inner, inner.up
        gate = "mlp.up" if up is None else "mlp.gate"
        self._place_linear(f"{name}.{gate}", _linear(first.term), first.idx, bias=config.mlp_bias)
        if up is not None:
            self._place_linear(f"{name}.mlp.up", _linear(up.term), up.idx, bias=config.mlp_bias)


def _linear(term: Any) -> Linear:
    assert isinstance(term, Linear)
    return term


def _one(values: Iterable[T], what: str) -> T:
    """The value common to all layers. Raises Unrecognised if they differ."""
    found = list(dict.fromkeys(values))
    if len(found) != 1:
        raise Unrecognised(f"has layers of different {what}: {', '.join(map(str, found[:4])) or 'none'}")
    return found[0]


def _nice(scale: float, head_dim: int, close: float) -> float:
    """The usual scale if it was rounded from that."""
    usual = head_dim**-0.5
    return usual if abs(scale - usual) <= close * usual else float(str(np.float32(scale)))
