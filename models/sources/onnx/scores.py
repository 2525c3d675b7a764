"""Attention in graphs: scores of queries and keys, masks, softmax, and weighted values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from llmc.models.convert import Array
from llmc.models.errors import ModelError
from llmc.models.sources.onnx.importer import Imported
from llmc.models.sources.onnx.probe import Probe
from llmc.models.sources.onnx.rows import Flat, Rows, Term, Unrecognised

_BLOCKED = -1e4
"""Upper bound of values that mask a score out; f16 cannot go below -65504."""


@dataclass(frozen=True)
class MaskStep:
    """A mask that is added to scores, or keeps those where it equals `keep`. name: of the known value."""

    name: str
    keep: bool | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores [batch, heads, tokens, keys], in the graph's shape. q, k: rows of a token, [heads · head_dim] each.

    scale: of q · k. cap: of tanh; None for none. capped: factor up to the tanh. mask: added float64 values; None for
    none. steps: how the mask was formed. softmax: whether these are weights already.
    """

    shape: tuple[int, ...]
    batch: int
    heads: int
    head_dim: int
    q: Flat
    k: Flat
    space: str
    scale: float = 1.0
    cap: float | None = None
    mask: Array | None = None
    steps: tuple[MaskStep, ...] = ()
    softmax: bool = False

    def times(self, factor: Array) -> Scores:
        by = float(factor.reshape(())) if factor.size == 1 else 0.0
        # A masked score stays masked under any factor.
        taken = self.mask is None or bool(((self.mask == 0) | (self.mask <= _BLOCKED)).all())
        if self.softmax or factor.size != 1 or not (self.mask is None or (by > 0 and taken)):
            raise Unrecognised("multiplies scores of attention behind their mask")
        if self.cap is not None:
            return replace(self, cap=self.cap * by)
        return replace(self, scale=self.scale * by)

    def capped(self) -> Scores:
        """Bounded by tanh."""
        if self.softmax or self.mask is not None or self.cap is not None:
            raise Unrecognised("takes tanh of scores behind their mask")
        return replace(self, cap=1.0)

    def masked(self, values: Array, name: str, keep: bool | None = None) -> Scores:
        """values: floats are added; bools with `keep` keep scores where they equal it."""
        if self.softmax:
            raise Unrecognised("masks the weights of attention")
        before = np.zeros(self.shape) if self.mask is None else self.mask
        with np.errstate(over="ignore"):
            if keep is None:
                mask = before + np.asarray(values, np.float64)
            else:
                mask = np.where(np.asarray(values, np.bool_) == keep, before, -np.inf)
        if mask.shape != self.shape:
            raise Unrecognised("has a mask of another shape than scores")
        return replace(self, mask=mask, steps=(*self.steps, MaskStep(name, keep)))

    def weights(self) -> Scores:
        if self.softmax:
            raise Unrecognised("takes softmax twice")
        return replace(self, softmax=True)


@dataclass(frozen=True, eq=False)
class Attended(Term):
    """The attention output of a token: its heads in order. scores: the weights. v: rows of keys' tokens, [heads ·
    elements]."""

    scores: Scores
    v: Flat


def scores_of(q: Rows, k: Rows, batch: int) -> Scores:
    """q [..., tokens, head_dim] · k [..., head_dim, keys]; leading axes are texts by heads, or one head for all."""
    q, k = (_for_heads_of(x, other) for x, other in ((q, k), (k, q)))
    _, tokens, dim = _heads(q, batch)
    heads, dim_k, keys = _heads(k, batch)
    if k.space == "cached" or q.space != "new" or dim_k != dim or q.tok.size != batch * heads * tokens * dim:
        raise Unrecognised("multiplies rows that are not queries and keys")
    _check_tokens(q, batch, heads, tokens, token_axis=2)
    _check_tokens(k, batch, heads, keys, token_axis=3)
    return Scores((*q.shape[:-1], keys), batch, heads, dim, q.flat, k.flat, k.space)


def attended(weights: Scores, v: Rows) -> Rows:
    """weights [..., tokens, keys] · v [..., keys, elements]."""
    if not weights.softmax:
        raise Unrecognised("multiplies scores without a softmax by values")
    v = _for_heads_of(v, weights)
    heads, keys, width = _heads(v, weights.batch)
    if v.space != weights.space or heads != weights.heads or keys != weights.shape[-1]:
        raise Unrecognised("weighs rows that are not values of the keys")
    _check_tokens(v, weights.batch, heads, keys, token_axis=2)
    tokens = weights.shape[-2]
    shape = (*weights.shape[:-1], width)
    tok = np.arange(weights.batch * tokens, dtype=np.int32).reshape(-1, 1, tokens, 1)
    tok = np.broadcast_to(tok, (weights.batch, heads, tokens, width)).reshape(shape)
    term = Attended(heads * width, weights, v.flat)
    plain = Rows(tok, (), None)
    return plain.of(term)


def _for_heads_of(x: Rows, other: Rows | Scores) -> Rows:
    """The same rows for each of the other operand's heads, as a product of matrices takes a single head."""
    wanted = (*np.broadcast_shapes(x.shape[:-2], other.shape[:-2]), *x.shape[-2:])
    return x if wanted == x.shape else x.moved(lambda array: np.broadcast_to(array, wanted))


def _heads(x: Rows, batch: int) -> tuple[int, int, int]:
    """(heads, the last two sizes)."""
    before = int(np.prod(x.shape[:-2]))
    if x.tok.ndim < 3 or before % batch:
        raise Unrecognised("multiplies rows of several tokens by each other")
    return before // batch, x.shape[-2], x.shape[-1]


def _check_tokens(x: Rows, batch: int, heads: int, tokens: int, token_axis: int) -> None:
    """Checks that the first axis is texts and that tokens are on the expected axis."""
    shape = [batch, heads, *x.shape[-2:]]
    wanted = np.arange(batch * tokens).reshape([batch, 1, *(tokens if i == token_axis else 1 for i in (2, 3))])
    if not np.array_equal(x.tok.reshape(shape), np.broadcast_to(wanted, shape)):
        raise Unrecognised("multiplies rows of tokens in another order than that of the text")


@dataclass(frozen=True)
class Sight:
    """Which keys tokens see. causal: only those up to themselves. window: of these the last `window`, or those less
    than that far away; 0 for all."""

    causal: bool
    window: int = 0


def sight_of(scores: Scores, probe: Probe, far: Imported | None) -> Sight:
    """far: an import of the graph with a long text, which reveals windows; None if the text length is unknown.

    Raises Unrecognised for a mask of no supported kind.
    """
    heads = scores.mask if scores.mask is None else scores.mask.reshape(scores.batch, scores.heads, *scores.shape[-2:])
    for causal in (True, False):
        seen = _seen(probe, causal)
        if _agrees(heads, seen, probe, causal):
            break
    else:
        raise Unrecognised(
            "has a mask that is neither causal nor that of whole texts, or a bias of scores such as ALiBi's"
        )
    window = 0 if far is None else _window(scores, far, causal=causal)
    return Sight(causal, window)


def _seen(probe: Probe, causal: bool) -> Array:
    """bool [batch, tokens, keys]."""
    keys = np.arange(probe.keys)
    whole = np.broadcast_to(probe.seen(probe.past > 0)[:, None], (probe.batch, probe.tokens, probe.keys))
    positions = probe.past + np.arange(probe.tokens)
    return whole & (keys <= positions[:, None]) if causal else whole


def _agrees(mask: Array | None, seen: Array, probe: Probe, causal: bool) -> bool:
    """Whether all tokens but padding see the expected keys, with nothing added to their scores."""
    if mask is None:
        return bool(seen.all())
    valid = probe.seen(probe.past > 0)[:, probe.past :]
    for text in range(probe.batch):
        some = mask[text][:, valid[text]]
        wanted = np.broadcast_to(seen[text, valid[text]], some.shape)
        if not np.array_equal(some > _BLOCKED, wanted) or np.abs(some[wanted]).max(initial=0.0) > 1e-6:
            return False
    return True


def _window(scores: Scores, far: Imported, *, causal: bool) -> int:
    """Number of keys that the last token sees; 0 for all."""
    probe = far.inputs.probe
    mask = np.zeros((1, 1, probe.tokens, probe.keys))
    for step in scores.steps:
        values = far.known.get(step.name)
        if values is None:
            raise ModelError(f"the mask {step.name} depends on what is in the cache, which no model of llmc does")
        with np.errstate(over="ignore"):
            if step.keep is None:
                mask = mask + np.asarray(values, np.float64)
            else:
                mask = np.where(np.asarray(values, np.bool_) == step.keep, mask, -np.inf)
    open_to = mask.reshape(-1, *mask.shape[-2:])[0] > _BLOCKED
    ages = probe.past + np.arange(probe.tokens)[:, None] - np.arange(probe.keys)
    counts = open_to.sum(-1)
    window = int(counts[-1])
    if np.array_equal(open_to, ages >= 0) if causal else open_to.all():
        return 0
    if np.array_equal(open_to, (ages >= 0) & (ages < window) if causal else np.abs(ages) < window):
        return window
    raise Unrecognised("has a mask of long texts that is neither causal, a sliding window, nor that of whole texts")
