"""Finds a model's layers from its output: the residual stream, and the blocks that read it and add to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from llmc.models.config import Residual
from llmc.models.sources.onnx.activations import Activated, read_activated
from llmc.models.sources.onnx.probe import Probe
from llmc.models.sources.onnx.rotary import Heads, read_heads
from llmc.models.sources.onnx.rows import Flat, FlatPart, Term, Unrecognised
from llmc.models.sources.onnx.scores import Attended
from llmc.models.sources.onnx.terms import Cache, Elementwise, Embedding, First, Linear, Norm, parts_of


@dataclass(frozen=True, eq=False)
class Attention:
    """scores: with heads q [heads], k and v [KV heads]. caches: inputs that hold k and v; None without a cache."""

    term: Attended
    q: Heads
    k: Heads
    v: Heads
    caches: tuple[str, str] | None


@dataclass(frozen=True, eq=False)
class Block:
    """A block that adds to the stream. reads: the stream it reads. before, after: norms. out: its last layer. factor:
    of its result."""

    reads: Flat
    before: Norm | None
    after: Norm | None
    out: Linear
    factor: float
    attention: Attention | None
    inner: Activated | None


@dataclass(frozen=True, eq=False)
class Base:
    """The input of the first layer. factor: of token vectors. norm: of the sum."""

    tokens: Embedding
    factor: float
    positions: Embedding | None = None
    types: Embedding | None = None
    norm: Norm | None = None


@dataclass(frozen=True, eq=False)
class Head:
    """The end of a model that returns logits. multiplier, cap: of logits."""

    linear: Linear
    multiplier: float = 1.0
    cap: float | None = None


@dataclass(frozen=True, eq=False)
class PooledLayer:
    """A linear layer over one row of a text; then an activation and a norm, if any."""

    linear: Linear
    activation: Literal["tanh", "gelu", "relu"] | None = None
    norm: Norm | None = None


@dataclass(frozen=True, eq=False)
class Structure:
    """final: the norm after the layers. head: None for a model that returns rows. dense: layers over the first token's
    row."""

    base: Base
    layers: tuple[tuple[Block, Block], ...]
    residual: Residual
    final: Norm | None
    head: Head | None
    dense: tuple[PooledLayer, ...] = ()


def read_structure(output: Flat, probe: Probe, kind: Literal["logits", "rows", "labels"]) -> Structure:
    """Raises Unrecognised for a model of another structure."""
    head: Head | None = None
    dense: tuple[PooledLayer, ...] = ()
    if kind == "logits":
        head, stream = _head(output)
    elif kind == "labels":
        dense, stream = _dense(output)
    else:
        stream = output
    final = None
    only = stream.only
    if isinstance(only, Norm) and not _is_sum_norm(only):
        final, stream = only, only.x
    base, blocks, sums = _walk(stream, probe)
    if kind == "logits" and final is None:
        raise Unrecognised("has no norm before its logits")
    if not blocks:
        raise Unrecognised("has no layers of attention and feed-forward blocks")
    if not sums and blocks[0].before is not None and blocks[0].before is base.norm:
        # The embeddings' norm, with whose result the stream begins.
        blocks[0] = replace(blocks[0], before=None)
    layers, residual = _layers(blocks, sums=sums)
    return Structure(base, layers, residual, final, head, dense)


def _head(logits: Flat) -> tuple[Head, Flat]:
    part, cap, multiplier = _single(logits, "logits"), None, 1.0
    if isinstance(part.term, Elementwise) and part.term.op == "tanh":
        cap = part.factor
        part = _single(part.term.args[0], "logits")
        assert cap is not None
        multiplier = cap
    if not isinstance(part.term, Linear) or not part.is_whole or part.factor is None:
        raise Unrecognised("gives logits that are not those of one linear layer")
    return Head(part.term, multiplier * part.factor, cap), part.term.x


def _single(flat: Flat, what: str) -> FlatPart:
    parts = parts_of(flat)
    if len(parts) != 1 or flat.const is not None or parts[0].factor is None:
        raise Unrecognised(f"gives {what} that are sums")
    return parts[0]


def _dense(output: Flat) -> tuple[tuple[PooledLayer, ...], Flat]:
    """(layers over the first row of a text, the rows)."""
    found: list[PooledLayer] = []
    flat = output
    while not found or not isinstance(flat.only, First):
        layer = _pooled_layer(flat)
        found.insert(0, layer)
        flat = layer.linear.x
    first = flat.only
    assert isinstance(first, First)
    if found[-1].activation is not None or found[-1].norm is not None:
        raise Unrecognised("scores texts by something else than the result of a linear layer")
    return tuple(found), first.x


def _pooled_layer(flat: Flat) -> PooledLayer:
    norm = flat.only if isinstance(flat.only, Norm) else None
    if norm is not None:
        flat = norm.x
    only: Term | None = flat.only
    activation: Literal["tanh", "gelu", "relu"] | None = None
    if isinstance(only, Elementwise) and only.op == "tanh":
        only, activation = only.args[0].only, "tanh"
    elif not isinstance(only, (Linear, First)):
        only, activation = _activated_row(flat)
    if not isinstance(only, Linear):
        raise Unrecognised("scores texts otherwise than by linear layers over the row of their first token")
    return PooledLayer(only, activation, norm)


def _activated_row(flat: Flat) -> tuple[Term | None, Literal["gelu", "relu"]]:
    """(what an activation is applied to, the activation)."""
    found = read_activated(flat)
    inner, name = found.inner, found.activation
    if found.up is not None or not inner.is_whole or (name != "gelu" and name != "relu"):
        raise Unrecognised("scores texts by a function of a row that is none of tanh, gelu and relu")
    return inner.term, name


def _is_sum_norm(norm: Norm) -> bool:
    """Whether the norm applies to a block's result plus its input, or to the embeddings, rather than to the model's
    end."""
    parts = parts_of(norm.x)
    if all(isinstance(part.term, Embedding) for part in parts):
        return True
    # In a sum norm, the stream before it is a norm as well.
    norms = [part for part in parts if isinstance(part.term, Norm) and not isinstance(part.term.x.only, Linear)]
    return len(parts) == 2 and len(norms) == 1 and any(isinstance(part.term, Linear) for part in parts)


def _walk(stream: Flat, probe: Probe) -> tuple[Base, list[Block], bool]:
    """(input of the first layer, blocks in order, whether norms apply to sums)."""
    blocks: list[Block] = []
    while True:
        only = stream.only
        if isinstance(only, Norm) and _is_sum_norm(only) and not _is_base(stream):
            (part,) = [p for p in parts_of(only.x) if isinstance(p.term, Linear)]
            block = replace(_block(part, probe, sums=True), after=only)
            rest = [p for p in parts_of(only.x) if p is not part]
            if not _alike(rest, block.reads):
                raise Unrecognised("adds a block to another row than that which it reads")
            blocks.insert(0, block)
            stream = block.reads
        elif blocks:
            return _base(stream), blocks, True
        else:
            break
    inside = [part for part in parts_of(stream) if _is_of_block(part.term)]
    if stream.const is not None:
        raise Unrecognised("adds numbers that are not a bias to the rows of a layer")
    made = (_block(part, probe, sums=False) for part in inside)
    found = sorted(made, key=lambda block: len(parts_of(block.reads)))
    outside = Flat(stream.size, tuple(p for p in parts_of(stream) if not any(p is q for q in inside)))
    return _base(outside), found, False


def _is_of_block(term: Term) -> bool:
    return isinstance(term, Linear) or (isinstance(term, Norm) and isinstance(term.x.only, Linear))


def _is_base(flat: Flat) -> bool:
    only = flat.only
    return isinstance(only, Norm) and all(isinstance(part.term, Embedding) for part in parts_of(only.x))


def _alike(parts: list[FlatPart], reads: Flat) -> bool:
    other = parts_of(reads)
    return len(parts) == len(other) and {id(p.term) for p in parts} == {id(p.term) for p in other}


def _base(flat: Flat) -> Base:
    only, norm = flat.only, None
    if isinstance(only, Norm):
        flat, norm = only.x, only
    of: dict[str, tuple[Embedding, float]] = {}
    for part in parts_of(flat):
        term = part.term
        if not isinstance(term, Embedding) or not part.is_whole or part.factor is None or term.by in of:
            raise Unrecognised("begins with something else than embeddings")
        of[term.by] = term, part.factor
    if flat.const is not None or "input_ids" not in of:
        raise Unrecognised("begins with something else than the embedding of tokens")
    tokens, factor = of.pop("input_ids")
    if any(other != 1.0 for _, other in of.values()):
        raise Unrecognised("scales the embedding of positions")
    positions, types = of.get("position_ids"), of.get("token_type_ids")
    return Base(tokens, factor, positions and positions[0], types and types[0], norm)


def _block(part: FlatPart, probe: Probe, *, sums: bool) -> Block:
    """sums: norms follow sums, and none precede blocks."""
    after, term = None, part.term
    if isinstance(term, Norm):
        after, inner = term, term.x.only
        assert isinstance(inner, Linear)
        term = inner
    if not isinstance(term, Linear) or not part.is_whole or part.factor is None:
        raise Unrecognised("adds a part of what a layer makes")
    made = term.x.only
    if isinstance(made, Attended):
        attention = _attention(made, probe)
        read = _read_by_heads(attention)
        return Block(*_normed(read, sums=sums), after, term, part.factor, attention, None)
    activated = read_activated(term.x)
    layers = [leaf.term for leaf in (activated.inner, activated.up) if leaf is not None]
    if not all(isinstance(layer, Linear) for layer in layers):
        raise Unrecognised("has a feed-forward block without a first linear layer")
    return Block(*_normed(_common(layers), sums=sums), after, term, part.factor, None, activated)


def _common(layers: list[Term]) -> Flat:
    """The common input of linear layers."""
    reads = [layer.x for layer in layers if isinstance(layer, Linear)]
    if not reads or not all(reads[0].same(other) for other in reads[1:]):
        raise Unrecognised("reads different rows in one block")
    return reads[0]


def _normed(read: Flat, *, sums: bool) -> tuple[Flat, Norm | None]:
    """(stream, norm before the block)."""
    only = read.only
    if isinstance(only, Norm) and not sums:
        return only.x, only
    return read, None


def linear_of(heads: Heads) -> tuple[Linear, Norm | None]:
    """The layer that heads come from, and the per-head norm in between."""
    source, norm = heads.source, None
    if isinstance(source, Norm):
        norm = source
        parts = parts_of(source.x)
        if len(parts) != 1 or parts[0].factor != 1.0 or source.x.const is not None:
            raise Unrecognised("norms heads that are not part of one layer")
        source = parts[0].term
    if not isinstance(source, Linear):
        raise Unrecognised("attends to rows that no linear layer makes")
    return source, norm


def _read_by_heads(attention: Attention) -> Flat:
    return _common([linear_of(heads)[0] for heads in (attention.q, attention.k, attention.v)])


def _attention(term: Attended, probe: Probe) -> Attention:
    scores, dim = term.scores, term.scores.head_dim
    if term.width != scores.heads * dim:
        raise Unrecognised("has values of another size than keys")
    q = read_heads(scores.q, dim, probe)
    k_cache, k = _kept(scores.k, scores.heads, dim, probe)
    v_cache, v = _kept(term.v, scores.heads, dim, probe)
    if k.num_heads != v.num_heads or (k_cache is None) != (v_cache is None):
        raise Unrecognised("keeps keys of other tokens than values")
    if len(v.angles) or list(q.order) != list(k.order) or not _close(q, k):
        raise Unrecognised("rotates queries otherwise than keys")
    caches = None if k_cache is None or v_cache is None else (k_cache, v_cache)
    return Attention(term, q, k, v, caches)


def _close(q: Heads, k: Heads) -> bool:
    return len(q.angles) == len(k.angles) and bool((abs(q.angles - k.angles) <= 1e-6).all())


def _kept(flat: Flat, heads: int, dim: int, probe: Probe) -> tuple[str | None, Heads]:
    """(cache input, heads of a token); each KV head serves several of `heads` query heads."""
    parts = parts_of(flat)
    cache = parts[0].term if len(parts) == 1 else None
    if not isinstance(cache, Cache):
        return None, _once(read_heads(flat, dim, probe), heads)
    factor = parts[0].factor
    if factor is None or flat.const is not None or cache.width % dim:
        raise Unrecognised("changes what it reads from the cache")
    found = read_heads(cache.new, dim, probe)
    _check_shared(list(parts[0].idx.reshape(heads, dim)[:, 0] // dim), cache.width // dim)
    if list(parts[0].idx.reshape(heads, dim)[0] - parts[0].idx[0]) != list(range(dim)):
        raise Unrecognised("reads elements of the cache in another order than they are kept in")
    return cache.past.name, replace(found, factor=found.factor * factor, amplitude=found.amplitude * factor)


def _once(found: Heads, heads: int) -> Heads:
    """Removes the adjacent copies of heads that several query heads share."""
    first = [i for i in range(heads) if i == 0 or list(found.idx[i]) != list(found.idx[i - 1])]
    _check_shared([sum(j <= i for j in first) - 1 for i in range(heads)], len(first))
    bias = None if found.bias is None else found.bias[first]
    return replace(found, idx=found.idx[first], bias=bias)


def _check_shared(of: list[int], count: int) -> None:
    heads = [int(head) for head in of]
    if len(heads) % count or heads != [i * count // len(heads) for i in range(len(heads))]:
        raise Unrecognised("shares heads of keys otherwise than between neighbours")


def _layers(blocks: list[Block], *, sums: bool) -> tuple[tuple[tuple[Block, Block], ...], Residual]:
    """Pairs of attention and feed-forward blocks, and the placement of norms."""
    if len(blocks) % 2:
        raise Unrecognised("has an attention without a feed-forward block, or the other way round")
    first, second = blocks[0], blocks[1]
    parallel = not sums and len(parts_of(first.reads)) == len(parts_of(second.reads))
    layers = []
    read = len(parts_of(first.reads))
    for a, m in zip(blocks[::2], blocks[1::2], strict=True):
        if parallel and a.attention is None:
            a, m = m, a
        if a.attention is None or m.inner is None:
            raise Unrecognised("has blocks of attention and of feed-forward in another order than in turn")
        if not sums:
            wanted = (read, read if parallel else read + 1)
            if (len(parts_of(a.reads)), len(parts_of(m.reads))) != wanted:
                raise Unrecognised("has blocks that read the rows of other layers than those before them")
            read += 2
        layers.append((a, m))
    return tuple(layers), _residual(layers, sums=sums, parallel=parallel)


def _residual(layers: list[tuple[Block, Block]], *, sums: bool, parallel: bool) -> Residual:
    blocks = [block for layer in layers for block in layer]
    # The first block may read the raw stream where later ones have norms before them.
    first = blocks[0].before is None and not parallel and any(block.before is not None for block in blocks)
    befores = {block.before is not None for block in blocks[first:]}
    afters = {block.after is not None for block in blocks}
    if sums and befores == {False}:
        return "sums"
    if len(befores) == 1 and len(afters) == 1 and not sums:
        before, after = befores.pop(), afters.pop()
        if parallel and before and not after:
            return "parallel"
        if not parallel and (before or after):
            return "sandwich" if before and after else "pre" if before else "post"
    raise Unrecognised("has norms in other places in some layers than in others")
