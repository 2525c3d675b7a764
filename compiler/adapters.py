"""Linear layers of a model that take LoRA adapters at run time, and their names in adapters. Imports no tvm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from llmc.compiler.config import CompileError
from llmc.graphs_format import MAX_ADAPTER_PARTS
from llmc.models.config import ModelConfig
from llmc.models.registry import get_family
from llmc.models.weight_map import Rows, Target

MAX_SLOTS, MAX_RANK = 256, 512
_LAYERS, _HEAD, _EMBEDDING, _WEIGHT = "layers.", "lm_head.weight", "embed.weight", ".weight"
_OF_EXPERTS = (".experts.gate_up.weight", ".experts.down.weight")

_TABLE = "#table"


def pool_name(weight: str, *, table: bool) -> str:
    """The name of a pool of adapters. table: of the weight as an embedding, whose rows are chosen by token."""
    return f"{weight}{_TABLE if table else ''}"


def pooled_weight(pool: str) -> str:
    """The weight of a pool."""
    return pool.removesuffix(_TABLE)


@dataclass(frozen=True)
class AdapterLimits:
    """Limits for adapters in an artifact. slots: most adapters held at once. rank: the largest of any adapter. experts:
    whether they may change experts, for which every slot needs memory."""

    slots: int
    rank: int
    experts: bool = False

    def __post_init__(self) -> None:
        for flag, value, most in (("--lora-slots", self.slots, MAX_SLOTS), ("--lora-rank", self.rank, MAX_RANK)):
            if not 1 <= value <= most:
                raise CompileError(f"{flag} {value} must be between 1 and {most}")

    def describe(self) -> str:
        """The limits as text, for cache keys."""
        return f"{self.slots} slots of rank {self.rank}{', of experts, too' if self.experts else ''}"

    @property
    def gates(self) -> str:
        """How gated layers are packed, for cache keys: adapters are added to gate and up before the activation."""
        return "as one, of experts, too" if self.experts else "as one"


@dataclass(frozen=True)
class AdapterPart:
    """Rows of a weight that form a layer of their own in the model that adapters are trained on.

    module: that layer's name in that model; of experts, with {} for the number of one.
    order: row i is row order[i] of that layer; None for identity.
    """

    module: str
    rows: int
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class AdapterHeads:
    """The heads whose matrices a weight holds, below each other.

    count: their number. rows, first: a head has `rows` rows of the trained layer, and this weight is those from `first`
    on. own: the matrix that each head has of its own, where the other is one for all. It is "a" if the trained layer's
    matrices are transposed here, else "b".
    """

    count: int
    rows: int
    first: int
    own: Literal["a", "b"]


@dataclass(frozen=True)
class AdapterLinear:
    """A weight [rows of all parts, columns] that adapters may be added to.

    experts: number of such weights below each other; 0 for a plain linear layer.
    table: the weight is the embedding, [columns, rows]; an adapter's A has a column for each token.
    heads: of weights of heads below each other; columns and rows are those of one.
    """

    weight: str
    columns: int
    parts: tuple[AdapterPart, ...]
    experts: int = 0
    table: bool = False
    heads: AdapterHeads | None = None

    @property
    def pool(self) -> str:
        """The name of its pool. The embedding's weight may also be that of the output projection."""
        return pool_name(self.weight, table=self.table)

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(part.rows for part in self.parts)

    @property
    def of_vocabulary(self) -> bool:
        """Whether it is the embedding or the output projection, with a row or a column for each token."""
        return self.weight in (_EMBEDDING, _HEAD)


def adapter_linears(model: ModelConfig, limits: AdapterLimits) -> dict[str, AdapterLinear]:
    """Pool name → matrix of a decoder layer, the output projection, matrices of experts, or the embedding.

    The graph decides which of them are plain linear layers. A tied output projection has the embedding's weight.
    """
    weights = get_family(model.model_type).weight_map(model)
    found = [*_linears(weights.targets), *_head_linears(weights.targets)]
    if limits.experts:
        found += _expert_linears(weights.targets)
    for target in weights.targets:
        if target.name == _EMBEDDING and target.rows is None:
            rows = AdapterPart(target.sources[0].name.removesuffix(_WEIGHT), model.hidden_size)
            found.append(AdapterLinear(_EMBEDDING, model.vocab_size, (rows,), table=True))
    if model.tie_word_embeddings and weights.head:
        found.append(AdapterLinear(_EMBEDDING, model.hidden_size, (AdapterPart(weights.head, model.vocab_size),)))
    return {linear.pool: linear for linear in found}


def _linears(targets: Iterable[Target]) -> Iterator[AdapterLinear]:
    for target in targets:
        plain = target.dtype == "act" and target.part is None and target.of_rows is None
        plain = plain and target.matrices == 1 and not target.pairs
        ours = target.name.startswith(_LAYERS) or target.name == _HEAD
        named = all(source.name.endswith(_WEIGHT) for source in target.sources)
        if not plain or not ours or not named or len(target.shape) != 2 or len(target.sources) > MAX_ADAPTER_PARTS:
            continue
        if (parts := _parts(target)) is not None:
            yield AdapterLinear(target.name, target.shape[1], parts)


def _head_linears(targets: Iterable[Target]) -> Iterator[AdapterLinear]:
    """Weights that are a part of each head of one layer of the trained model. Several of them may be of one layer."""
    for target in targets:
        if (part := target.part) is None:
            continue
        (source,) = target.sources
        count = source.shape[0] // part.rows
        heads = AdapterHeads(count, part.rows, part.first, "a" if part.turned else "b")
        of_head = AdapterPart(source.name.removesuffix(_WEIGHT), target.shape[0] // count)
        yield AdapterLinear(target.name, target.shape[1], (of_head,), heads=heads)


def _expert_linears(targets: Iterable[Target]) -> Iterator[AdapterLinear]:
    """Weights of experts that the published checkpoint has one by one, or all in one tensor."""
    for target in targets:
        whole = target.rows is None and target.part is None and target.of_rows is None
        if not whole or not target.name.endswith(_OF_EXPERTS):
            continue
        count = target.matrices
        if len(target.sources) == 1 and not target.sources[0].blocks:
            each = target.shape[0] // count
            # Gate and up alternate in the tensor; here gate comes first.
            order = (*range(0, each, 2), *range(1, each, 2)) if target.pairs else None
            # Adapters have all experts as one, or a layer of the number that stands here.
            of_all = AdapterPart(f"{target.sources[0].name.removesuffix(_WEIGHT)}.{{}}", each, order)
            yield AdapterLinear(target.name, target.shape[1], (of_all,), count)
            continue
        if target.pairs or any(source.stored for source in target.sources):
            continue
        of_first = target.sources[: len(target.sources) // count]
        # Of a checkpoint that stacks experts, a source is of all of them.
        if len(target.sources) % count or not all(".0." in source.name for source in of_first):
            continue
        before, after = zip(*(source.name.removesuffix(_WEIGHT).rsplit(".0.", 1) for source in of_first), strict=True)
        modules = [f"{first}.{{}}.{last}" for first, last in zip(before, after, strict=True)]
        names = [f"{module.format(expert)}{_WEIGHT}" for expert in range(count) for module in modules]
        if names == [source.name for source in target.sources]:
            rows = (source.shape[0] for source in of_first)
            parts = tuple(AdapterPart(module, n) for module, n in zip(modules, rows, strict=True))
            yield AdapterLinear(target.name, target.shape[1], parts, count)


def _parts(target: Target) -> tuple[AdapterPart, ...] | None:
    """The parts of a weight; None if rows of several layers are interleaved."""
    counts = [source.shape[0] for source in target.sources]
    taken = np.arange(sum(counts), dtype=np.int32) if target.rows is None else target.rows
    ends = np.cumsum(counts)
    of = np.searchsorted(ends, taken, side="right")
    if (np.diff(of) < 0).any():
        return None
    parts = []
    for i, source in enumerate(target.sources):
        rows: Rows = taken[of == i] - (ends[i] - counts[i])
        order = None if np.array_equal(rows, np.arange(len(rows))) else tuple(map(int, rows))
        if len(rows) == 0:
            return None
        parts.append(AdapterPart(source.name.removesuffix(_WEIGHT), len(rows), order))
    return tuple(parts)


def record(
    limits: AdapterLimits,
    linears: Iterable[AdapterLinear],
    left_out: Iterable[AdapterLinear] = (),
    unread: Sequence[str] = (),
) -> dict[str, Any]:
    """The manifest's record of them; equal row orders are stored once. left_out: those whose pools are too large.
    unread: prefixes of parts of the model that are not in the artifact."""
    orders: dict[tuple[int, ...], int] = {}

    def part(one: AdapterPart) -> dict[str, Any]:
        found = {} if one.order is None else {"order": orders.setdefault(one.order, len(orders))}
        return {"module": one.module, "rows": one.rows, **found}

    def linear(one: AdapterLinear) -> dict[str, Any]:
        found: dict[str, Any] = {"experts": one.experts} if one.experts else {}
        found |= {"table": True} if one.table else {}
        found |= {"heads": asdict(one.heads)} if one.heads else {}
        return {"weight": one.weight, "columns": one.columns, **found, "parts": [part(p) for p in one.parts]}

    listed, without = [linear(one) for one in linears], [linear(one) for one in left_out]
    return {
        "slots": limits.slots,
        "rank": limits.rank,
        "linears": listed,
        **({"left_out": without} if without else {}),
        **({"unread": list(unread)} if unread else {}),
        "orders": [list(order) for order in orders],
    }


def limits_of(manifest: Mapping[str, Any]) -> AdapterLimits | None:
    """The limits in a manifest; None if the artifact takes no adapters."""
    found = manifest.get("lora")
    if found is None:
        return None
    return AdapterLimits(int(found["slots"]), int(found["rank"]), any("experts" in one for one in found["linears"]))
