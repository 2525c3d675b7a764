"""Compares two artifacts of one model over the same tokens, command by command, to find where they diverge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

from llmc.runtime.debug.replay import CommandReplay, DebugError, Value

# Ops that compute the same tensor → the name it is compared under.
_SAME = {
    "embedding_quant": "embedding",
    "linear_quant": "linear",
    "normed_linear": "linear",
    "normed_linear_quant": "linear",
    # merge_attention completes both variants.
    "latent_attention": "paged_attention",
    "merge_attention": "paged_attention",
    "rotated_attention": "paged_attention",
}
_HELPERS = ("quantize_rows", "permute_columns")  # rewrite the same values


@dataclass(frozen=True)
class Place:
    """The element of a tensor that differs most: its index, and both values."""

    index: tuple[int, ...]
    a: float
    b: float


@dataclass(frozen=True)
class Compared:
    """A tensor that both artifacts compute.

    a, b: command indices. max_error: the largest difference. error: max_error divided by the largest magnitude in A.
    Both are infinite if exactly one of two values is NaN or infinite.
    """

    name: str
    op: str
    layer: int
    shape: tuple[int, ...]
    a: int
    b: int
    max_error: float
    error: float
    most: Place

    def differs(self, bound: float) -> bool:
        return not self.error <= bound


@dataclass(frozen=True)
class Diff:
    """graphs: those that ran the step. tensors: computed by both, in order. only_a, only_b: names of the rest."""

    graphs: tuple[str, str]
    tensors: tuple[Compared, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    def first(self, bound: float) -> Compared | None:
        """The first tensor whose error exceeds `bound`, or None."""
        return next((tensor for tensor in self.tensors if tensor.differs(bound)), None)

    def as_dict(self, bound: float) -> dict[str, Any]:
        first = self.first(bound)
        return {
            "graphs": list(self.graphs),
            "bound": bound,
            "same": first is None,
            "first": None if first is None else asdict(first),
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }


def compare(a: Value, b: Value) -> Compared:
    """Compares two arrays of equal shape."""
    x, y = a.array.astype(np.float64), b.array.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(x - y))
    difference = np.where(np.isnan(difference), np.inf, difference)
    at = tuple(int(i) for i in np.unravel_index(int(difference.argmax()), difference.shape))
    largest = float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
    max_error = float(difference[at])
    error = 0.0 if max_error == 0 else max_error / largest if largest else float("inf")
    most = Place(at, float(x[at]), float(y[at]))
    return Compared(a.name, _SAME.get(a.op, a.op), a.layer, x.shape, a.command, b.command, max_error, error, most)


def diff_artifacts(a: Path, b: Path, prompt: Sequence[int], step: int = 0) -> Diff:
    """Runs `prompt` on both, then `step` decode steps with A's likeliest tokens; compares the last step. Raises
    DebugError, and errors of opening an artifact."""
    replays = [CommandReplay(path, len(prompt) + step) for path in (a, b)]
    if replays[0].vocab_size != replays[1].vocab_size:
        sizes = " and ".join(str(replay.vocab_size) for replay in replays)
        raise DebugError(f"{a} and {b} have vocabularies of {sizes} tokens: they are not of one model")
    check_tokens(prompt, replays[0].vocab_size)
    tokens = list(prompt)
    for _ in range(step):
        (_, values), (_, others) = (replay.step(tokens) for replay in replays)
        found, _ = list(values), list(others)
        tokens = [int(found[-1].array[-1].argmax())]
    (graph_a, values), (graph_b, others) = (replay.step(tokens) for replay in replays)
    unwritten = replays[0].unwritten(graph_a) | replays[1].unwritten(graph_b)
    return _aligned((graph_a, graph_b), list(values), list(others), unwritten)


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises DebugError for an empty list, or a token that the model lacks."""
    if not tokens:
        raise DebugError("there are no tokens to run: give a --prompt or --ids")
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise DebugError(f"token {token} is outside the vocabulary: give ids below {vocab_size}")


def _label(value: Value) -> tuple[str, str, tuple[int, ...]]:
    return _SAME.get(value.op, value.op), _tensor_name(value), value.array.shape


def _tensor_name(value: Value) -> str:
    """A tensor's name, equal for all kernels that may compute it."""
    return f"layers.{value.layer}" if value.cached else value.name


def _aligned(graphs: tuple[str, str], a: list[Value], b: list[Value], unwritten: set[str]) -> Diff:
    """unwritten: names of tensors that either computes within other kernels, so that there is nothing to compare."""
    a, b = ([one for one in values if one.op not in _HELPERS and one.name not in unwritten] for values in (a, b))
    labels_a, labels_b = [_label(value) for value in a], [_label(value) for value in b]
    tensors: list[Compared] = []
    pairs_a, pairs_b = set[int](), set[int]()
    for block in SequenceMatcher(None, labels_a, labels_b, autojunk=False).get_matching_blocks():
        for i in range(block.size):
            tensors.append(compare(a[block.a + i], b[block.b + i]))
            pairs_a.add(block.a + i)
            pairs_b.add(block.b + i)
    if not tensors:
        raise DebugError("the two artifacts make no tensor in common: they are not of one model")
    only_a = tuple(value.name for i, value in enumerate(a) if i not in pairs_a)
    only_b = tuple(value.name for i, value in enumerate(b) if i not in pairs_b)
    return Diff(graphs, tuple(tensors), only_a, only_b)
