"""Tensor parallelism: how a model is divided among ranks that run each step together. Imports neither torch nor tvm.

Each rank has an equal number of attention heads, KV heads and feed-forward elements. These are rows of the linears that
produce them, and columns of the linears that read them, whose results are partial sums. Latent KV vectors, which all
heads share, are replicated. Of a mixture, each rank has a part of every expert, or whole experts (`by_expert`). The
embedding and the output projection are divided by vocabulary rows, as one weight where they are tied. The router and
everything as wide as the hidden size is replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np

from llmc.compiler.config import CompileError
from llmc.compiler.weight_request import WeightRequest
from llmc.graphs_format import MAX_RANKS, name_in_model
from llmc.models.config import Experts, Latent, ModelConfig
from llmc.models.loader import Parameter
from llmc.models.sources.sliced import ColumnsOf, RowsOf, splits_columns
from llmc.quantize import Recipe, layer_kind, layer_of

EMBEDDING, HEAD = "embed.weight", "lm_head.weight"
SUMMED = ("attention.out", "mlp.down", "mlp.shared.down", "mlp.experts.down")
"""Kinds of weights whose layers make a sum over ranks."""
_OF_EXPERTS = "mlp.experts."
PLACES = "expert_places"
"""A table of each rank that holds whole experts: float32 [E], the index of each expert among those that the rank holds.
Experts of other ranks have the number of held experts as their index."""
FIRST_TOKEN = "first_token"
"""A table of each rank: float32 [1], the first token of the vocabulary whose rows of the embedding it has."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Slice:
    """Division of a weight: `axis` consists of parts of these sizes, and each rank gets an equal piece of each part."""

    axis: int
    parts: tuple[int, ...]

    def ranges(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """(first index, size) of each piece of a rank."""
        starts = accumulate(self.parts, initial=0)
        return [
            (start + rank * (size // ranks), size // ranks) for start, size in zip(starts, self.parts, strict=False)
        ]

    def shape_of(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """The shape of one rank's share."""
        return (*shape[: self.axis], sum(self.parts) // ranks, *shape[self.axis + 1 :])


def check_divisible(model: ModelConfig, recipe: Recipe, ranks: int, *, by_expert: bool = False) -> None:
    """Raises CompileError with one sentence on what cannot be divided among `ranks` ranks.

    by_expert: see `Partition`.
    """
    if not 2 <= ranks <= MAX_RANKS:
        raise CompileError(f"tensor-parallel is {ranks}, but 2 to {MAX_RANKS} ranks run a model together")
    for present, what in (
        (model.pooled is not None or model.bidirectional, "gives vectors in place of text"),
        (model.streams is not None, "has several hidden vectors of a token"),
        (any(map(model.has_state, range(model.num_layers))), "has layers with a state"),
        (model.qk_norm == "whole", "norms all heads of a token as one vector"),
    ):
        if present:
            raise CompileError(f"{model.model_type} {what}, which --tensor-parallel does not divide yet: leave it out")
    if by_expert and model.experts is None:
        raise CompileError(f"{model.model_type} has no experts: leave out --expert-parallel")
    if model.experts is not None and model.experts.biases and not by_expert:
        raise CompileError(
            f"experts of {model.model_type} have biases, so a rank has whole ones: add --expert-parallel"
        )
    for name, count in _divided_counts(model, by_expert=by_expert):
        if count % ranks:
            raise CompileError(f"{count} {name} cannot be divided among {ranks} ranks: choose a divisor of {count}")
    _check_recipe(model, recipe, ranks, by_expert=by_expert)


def _divided_counts(model: ModelConfig, *, by_expert: bool) -> Iterator[tuple[str, int]]:
    """(name, count) of everything that each rank has an equal part of."""
    experts, layers = model.experts, range(model.num_layers)
    for heads in dict.fromkeys(map(model.heads, layers)):
        yield "attention heads", heads.num_heads
        if model.latent is None:
            yield "KV heads", heads.num_kv_heads
    if experts is None or experts.beside_plain or len(experts.layers) < model.num_layers:
        for inner in dict.fromkeys(map(model.inner_size, layers)):
            yield "elements inside the feed-forward block", inner
    if experts is not None:
        yield ("experts", experts.count) if by_expert else ("elements inside an expert", experts.intermediate_size)
        yield "elements inside the shared expert", experts.shared_size
    yield "tokens of the vocabulary", model.vocab_size


def _check_recipe(model: ModelConfig, recipe: Recipe, ranks: int, *, by_expert: bool) -> None:
    widths = {}
    if model.latent is not None:
        widths["attention.out"] = model.num_heads * model.latent.value_dim
    if model.experts is not None:
        widths["mlp.shared.down"] = model.experts.shared_size
        widths["mlp.experts.down"] = model.experts.intermediate_size
    for name, scheme in recipe.schemes.items():
        kind = layer_kind(name)
        if name in recipe.act_order and (kind in SUMMED or kind.startswith(_OF_EXPERTS)):
            raise CompileError(
                f"{name} is in act-order, so it cannot be divided among ranks: take a checkpoint that was "
                "quantized without desc_act"
            )
        if kind not in SUMMED or (by_expert and kind.startswith(_OF_EXPERTS)):
            continue
        layer = layer_of(name)
        of_layer = {"attention.out": model.heads(layer).q_size, "mlp.down": model.inner_size(layer)}
        inner = (of_layer | widths)[kind]
        if not splits_columns(scheme.weight, inner // ranks):
            raise CompileError(
                f"{name} is stored in {scheme.weight.describe()} along its {inner} columns, of which {ranks} ranks "
                f"have {inner // ranks} each: choose fewer ranks, or smaller groups"
            )


@dataclass(frozen=True)
class Partition:
    """A model divided among ranks; `check_divisible` refuses what cannot be divided.

    by_expert: each rank holds whole experts, the r-th equal part in the model's order; else a part of every expert.
    """

    model: ModelConfig
    ranks: int
    by_expert: bool = False

    def rank_model(self) -> ModelConfig:
        """The model that each rank computes, except that its embedding and its output projection are whole."""
        model, ranks = self.model, self.ranks
        alibi = model.alibi
        if alibi is not None:
            alibi = replace(alibi, slopes=alibi.slopes[: model.num_heads // ranks])
        full = model.full_heads
        if full is not None:
            full = replace(full, num_heads=full.num_heads // ranks, num_kv_heads=full.num_kv_heads // ranks)
        return replace(
            model,
            num_heads=model.num_heads // ranks,
            num_kv_heads=model.num_kv_heads if model.latent is not None else model.num_kv_heads // ranks,
            intermediate_size=model.intermediate_size // ranks,
            full_heads=full,
            layer_sizes=tuple(size // ranks for size in model.layer_sizes),
            experts=None if model.experts is None else self._rank_experts(model.experts),
            alibi=alibi,
        )

    def _rank_experts(self, experts: Experts) -> Experts:
        """Experts that each rank computes, or its part of every expert."""
        shared = experts.shared_size // self.ranks
        if self.by_expert:
            return replace(experts, held=experts.count // self.ranks, shared_size=shared)
        return replace(experts, intermediate_size=experts.intermediate_size // self.ranks, shared_size=shared)

    def slice_of(self, name: str) -> Slice | None:
        """Division of a weight; None if every rank has all of it."""
        model, layer = self.model, max(0, layer_of(name))
        heads, qkv = model.heads(layer), model.qkv_parts(layer)
        kind, inner = layer_kind(name), model.inner_size(layer)
        by_kind = {
            "attention.qkv": Slice(0, qkv),
            "attention.qkv.bias": Slice(0, qkv),
            "attention.out": Slice(1, (heads.q_size,)),
            "attention.sinks": Slice(0, (heads.num_heads,)),
            "attention.kv_scales": Slice(0, (heads.num_kv_heads, heads.num_kv_heads)),
            "mlp.gate_up": Slice(0, (inner, inner)),
            "mlp.gate_up.bias": Slice(0, (inner, inner)),
            "mlp.up": Slice(0, (inner,)),
            "mlp.up.bias": Slice(0, (inner,)),
            "mlp.down": Slice(1, (inner,)),
            "embed": Slice(0, (model.vocab_size,)),
            FIRST_TOKEN: Slice(0, (self.ranks,)),
            "lm_head": Slice(0, (model.vocab_size,)),
            "lm_head.bias": Slice(0, (model.vocab_size,)),
            "slopes": Slice(0, (model.num_heads,)),
        }
        if model.qk_norm == "each_head":
            by_kind |= {"attention.q_norm": Slice(0, (heads.q_size,)), "attention.k_norm": Slice(0, (heads.kv_size,))}
        if model.latent is not None:
            by_kind |= self._slices_of_latent(model.latent)
        if model.experts is not None:
            by_kind |= self._slices_of_experts(model.experts)
        return by_kind.get(kind)

    def _slices_of_latent(self, latent: Latent) -> dict[str, Slice]:
        """Slices by kind of weight. Heads are divided; every rank caches the latent vectors, which all heads share."""
        heads = self.model.num_heads
        return {
            "attention.q": Slice(0, (heads * latent.query_dim,)),
            "attention.key_up": Slice(0, (heads * latent.rank,)),
            "attention.value_up": Slice(0, (heads * latent.value_dim,)),
            "attention.out": Slice(1, (heads * latent.value_dim,)),
        }

    def _slices_of_experts(self, experts: Experts) -> dict[str, Slice]:
        """Slices of a mixture's weights, by kind."""
        count, inner, shared = experts.count, experts.intermediate_size, experts.shared_size
        hidden = self.model.hidden_size
        found = {"mlp.shared.gate_up": Slice(0, (shared, shared)), "mlp.shared.down": Slice(1, (shared,))}
        if not self.by_expert:
            return found | {
                "mlp.experts.gate_up": Slice(0, (inner,) * (2 * count)),
                "mlp.experts.down": Slice(1, (inner,)),
            }
        gate_up, down = Slice(0, (2 * inner * count,)), Slice(0, (hidden * count,))
        return found | {
            "mlp.experts.gate_up": gate_up,
            "mlp.experts.gate_up.bias": gate_up,
            "mlp.experts.down": down,
            "mlp.experts.down.bias": down,
            PLACES: Slice(0, (count * self.ranks,)),
        }

    @property
    def head(self) -> str:
        """The weight of the output projection."""
        return EMBEDDING if self.model.tie_word_embeddings else HEAD

    def rank_shapes(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Logical shapes of one rank's weights, from those of the whole model."""
        found = {**shapes, **{table.name: table.shape for table in self._tables()}}
        for name, shape in found.items():
            divided = self.slice_of(name)
            if divided is not None:
                found[name] = divided.shape_of(shape, self.ranks)
        return found

    def _tables(self) -> Iterator[Parameter]:
        """What tells a rank its part, of all ranks, one behind the other."""
        rows = self.model.vocab_size // self.ranks
        yield Parameter.of(FIRST_TOKEN, "f32", (np.arange(self.ranks) * rows).astype(np.float32))
        experts = self.model.experts
        if experts is None or not self.by_expert:
            return
        held = experts.count // self.ranks
        rank, number = np.divmod(np.arange(experts.count), held)
        places = np.where(rank == np.arange(self.ranks)[:, None], number, held)
        yield Parameter.of(PLACES, "f32", places.astype(np.float32).reshape(-1))

    def requests(self, of_rank: Iterable[WeightRequest]) -> list[WeightRequest]:
        """The stored weights: those shared by all ranks, then each rank's own, rank by rank."""
        wanted = list(of_rank)
        shared = [request for request in wanted if self.slice_of(request.name) is None]
        own = [request for request in wanted if self.slice_of(request.name) is not None]
        each = (replace(one, name=rank_name(one.name, rank)) for rank in range(self.ranks) for one in own)
        return [*shared, *each]

    def parameters(self, whole: Iterable[Parameter]) -> Iterator[Parameter]:
        """The values of `requests`, computed from the whole model's."""
        for parameter in chain(whole, self._tables()):
            yield from self._pieces(parameter)

    def _pieces(self, parameter: Parameter) -> Iterator[Parameter]:
        divided = self.slice_of(parameter.name)
        if divided is None:
            yield parameter
            return
        for rank in range(self.ranks):
            ranges = divided.ranges(rank, self.ranks)
            part = (
                RowsOf(parameter, parameter.stored, ranges)
                if divided.axis == 0
                else ColumnsOf(parameter, parameter.stored, *ranges[0])
            )
            yield replace(parameter, name=rank_name(parameter.name, rank), parts=(part,))


def rank_name(name: str, rank: int) -> str:
    """The name of a rank's piece of a weight in weights.safetensors."""
    return f"rank{rank}.{name}"


def of_one_rank(request: WeightRequest) -> WeightRequest:
    """The request under the weight's name in the model."""
    return replace(request, name=name_in_model(request.name))


def shared_weights(names: Iterable[str]) -> int:
    """The number of stored tensors shared by all ranks."""
    return sum(name == name_in_model(name) for name in names)
