"""A CompileConfig with every "auto" resolved, and what follows from it: keys, weights and the model record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmc.buckets import BucketLadder
from llmc.compiler.adapters import AdapterLimits, AdapterLinear, adapter_linears
from llmc.compiler.config import CompileError
from llmc.compiler.dtypes import DTYPES
from llmc.compiler.graph.commands import GraphShape
from llmc.compiler.kv_layers import kv_layer_records, state_layers
from llmc.compiler.ops.adapters import is_too_large
from llmc.compiler.ops.definition import GraphParams
from llmc.compiler.partition import Partition
from llmc.compiler.store import keys
from llmc.compiler.targets.base import Target
from llmc.compiler.weight_request import WeightRequest, kv_scales_name
from llmc.graphs_format import STATES_USES
from llmc.graphs_records import KvLayerRecord, ModelRecord, StageRecord
from llmc.images.form import ImageForm
from llmc.kv_dtypes import KV_DTYPES
from llmc.models.config import ModelConfig
from llmc.models.context import sound_scaling, trained_length
from llmc.models.convert import Array
from llmc.models.loader import Parameter, load_parameters
from llmc.models.registry import get_family
from llmc.models.sources.base import Checkpoint
from llmc.models.tables import table_shapes, tables
from llmc.quantize import Recipe


@dataclass(frozen=True)
class Resolved:
    """A CompileConfig with every "auto" resolved.

    cut_by: why max_model_len is below the model's own: "default", "buckets" or "option"; None if it is not.
    kv_scales: source of the KV cache scales; None if they are computed when keys and values are written.
    kv_scale_values: from a file; one for keys and values of each layer.
    ignored_config: sentences on configuration of the model that llmc does not follow.
    adapters: limits of those that can be loaded; None if none can be.
    speculate: draft tokens per sequence for which the ladder has rows with all sequences running; 0 if it was not made
    for any.
    ranks: number of ranks that share each layer.
    stage_layers: number of layers of each stage; empty for a single one.
    images: of a tower, what becomes of images before it reads them; None for any other model.
    """

    model: ModelConfig
    target: Target
    act_dtype: str
    kv_dtype: str
    max_model_len: int
    max_num_seqs: int
    block_size: int
    max_num_batched_tokens: int
    ladder: BucketLadder
    recipe: Recipe
    cut_by: str | None = None
    kv_scales: Literal["checkpoint", "file"] | None = None
    kv_scale_values: tuple[float, ...] = ()
    ignored_config: tuple[str, ...] = ()
    adapters: AdapterLimits | None = None
    speculate: int = 0
    ranks: int = 1
    by_expert: bool = False
    stage_layers: tuple[int, ...] = ()
    images: ImageForm | None = None

    @property
    def partition(self) -> Partition | None:
        """The division of the model among ranks; None for a single one."""
        return Partition(self.model, self.ranks, self.by_expert) if self.ranks > 1 else None

    @property
    def rank_model(self) -> ModelConfig:
        """The model to trace: the whole one, or one rank's share."""
        return self.model if self.partition is None else self.partition.rank_model()

    @property
    def num_ranks(self) -> int:
        """Ranks that run each step together, of all stages."""
        return self.ranks * max(1, len(self.stage_layers))

    @property
    def first_layers(self) -> tuple[int, ...]:
        """The first layer of each stage but the first."""
        return tuple(accumulate(self.stage_layers[:-1]))

    def stage_records(self) -> list[StageRecord]:
        """The layers of the KV cache that each stage has; none for a single stage."""
        found = []
        for count, end in zip(self.stage_layers, accumulate(self.stage_layers), strict=True):
            layers = [i for i, layer in enumerate(self.model.cached_layers) if end - count <= layer < end]
            found.append(StageRecord(layers[0], len(layers)))
        return found

    def kv_layer_records(self) -> tuple[KvLayerRecord, ...]:
        """KV blocks of one rank's layers of the KV cache, or slots of those with a state."""
        return kv_layer_records(self.rank_model, self.target, self.block_size, self.kv_dtype)

    def state_layers(self) -> tuple[int, ...]:
        """Layers of the KV cache that hold a state in place of keys and values."""
        return state_layers(self.rank_model)

    @property
    def max_decode_rows(self) -> int:
        """Rows in the largest decode step: each sequence's last token and its draft tokens."""
        return self.max_num_seqs * (1 + self.speculate)

    @property
    def model_len(self) -> int:
        """The longest context, in tokens, that the model was made for."""
        return trained_length(self.model)

    def warnings(self) -> tuple[str, ...]:
        """Sentences on what the user may not have intended."""
        return (*self.ignored_config, *self._length_warnings(), *self._adapter_warnings())

    def _length_warnings(self) -> tuple[str, ...]:
        if self.max_model_len > self.model_len:
            stretched = self.model.rope.scaling
            if stretched is not None and stretched.rope_type == "ntk_steps":
                return (
                    f"max-model-len {self.max_model_len} is beyond the {self.model_len} tokens that the model was "
                    "trained for: it reads shorter texts with the rotary frequencies of one that long, too",
                )
            scaling = json.dumps(sound_scaling(self.model, self.max_model_len))
            return (
                f"max-model-len {self.max_model_len} is beyond the {self.model_len} tokens that the model was trained "
                f"for: it reads longer texts badly unless rope_parameters of its config.json (rope_scaling of an older "
                f"one) has {scaling}",
            )
        if self.cut_by == "default":
            return (
                f"the context is cut to {self.max_model_len} of the model's {self.model_len} tokens: --max-model-len "
                f"{self.model_len} compiles all of it",
            )
        return ()

    def _adapter_warnings(self) -> tuple[str, ...]:
        if self.adapters is None or not (left_out := self.left_out()):
            return ()
        names = " and ".join(linear.parts[0].module for linear in left_out)
        return (
            f"{names}: no adapters by name, for {self.adapters.slots} of rank {self.adapters.rank} are more than "
            "kernels count with this vocabulary; lower --lora-slots or --lora-rank to have them",
        )

    def adapter_linears(self) -> dict[str, AdapterLinear]:
        """Pool name → layer that takes adapters, where the graph has it as a linear layer of its own."""
        return {pool: linear for pool, linear in self._all_linears().items() if not self._is_too_large(linear)}

    def left_out(self) -> tuple[AdapterLinear, ...]:
        """The layers of the vocabulary's size whose pools kernels could not count."""
        return tuple(filter(self._is_too_large, self._all_linears().values()))

    def _all_linears(self) -> dict[str, AdapterLinear]:
        return {} if self.adapters is None else adapter_linears(self.model, self.adapters)

    def _is_too_large(self, linear: AdapterLinear) -> bool:
        """Raises CompileError if it is another layer than one of the vocabulary's size."""
        assert self.adapters is not None
        if not is_too_large(linear, self.adapters, self.target, self.act_dtype):
            return False
        if not linear.of_vocabulary:
            of_each = f" for each of {linear.experts} experts" if linear.experts else ""
            of_each = f" for each of {linear.heads.count} heads" if linear.heads else of_each
            raise CompileError(
                f"{self.adapters.slots} adapters of rank {self.adapters.rank} of {linear.weight}, {sum(linear.rows)} "
                f"rows by {linear.columns} columns{of_each}, are more than kernels count; lower --lora-slots or "
                "--lora-rank"
            )
        return True

    def graph_params(self) -> GraphParams:
        """What kernels depend on; a graph's shape replaces the empty one."""
        return GraphParams(
            target=self.target,
            shape=GraphShape(0, 0, 0, 0, 0),
            max_model_len=self.max_model_len,
            act_dtype=self.act_dtype,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            kv_scales=self.kv_scales is not None,
            merged=0 if self.model.tower is None else self.model.tower.merged,
        )

    def graph_components(self) -> dict[str, str]:
        """Cache key components shared by all graphs."""
        return keys.graph_components(
            self.rank_model,
            self.max_model_len,
            self.graph_params(),
            self.recipe,
            self.adapters,
            self.ranks,
            self.stage_layers,
        )

    def trace_components(self) -> dict[str, str]:
        """Cache key components of the lowered model."""
        return keys.trace_components(self.rank_model, self.max_model_len, self.act_dtype)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Logical shapes, by name, of everything that graphs of one rank may read as a weight."""
        targets = get_family(self.model.model_type).weight_map(self.model).targets
        tables = table_shapes(self.model, self.max_model_len)
        counts = self.model.kv_head_counts if self.kv_scales else {}
        scales = {kv_scales_name(self.model.kv_layer(layer)): (2 * count,) for layer, count in counts.items()}
        whole = {**{target.name: target.shape for target in targets}, **scales, **tables}
        return whole if self.partition is None else self.partition.rank_shapes(whole)

    def requests(self, of_rank: Iterable[WeightRequest]) -> list[WeightRequest]:
        """Everything stored for the requests of one rank's graphs."""
        return list(of_rank) if self.partition is None else self.partition.requests(of_rank)

    def parameters(self, whole: Iterable[Parameter]) -> Iterator[Parameter]:
        """The values of `requests`. whole: see `whole_parameters`."""
        return iter(whole) if self.partition is None else self.partition.parameters(whole)

    def whole_parameters(self, checkpoint: Checkpoint) -> Iterator[Parameter]:
        """The values of all weights, with rows and columns in the order that the recipe requires."""
        found = {p.name: p for p in load_parameters(self.model, checkpoint, self.act_dtype)}
        rows_of = self.recipe.rows_of
        for name, parameter in found.items():
            if name in self.recipe.act_order:
                parameter = parameter.in_stored_order()
            if name in rows_of and (order := found[rows_of[name]].in_stored_order().columns) is not None:
                parameter = parameter.with_rows(_gate_and_up(order))
            yield parameter
        if self.kv_scales:
            multipliers = self.model.multipliers
            cached = np.array((1.0, 1.0) if multipliers is None else multipliers.cached, np.float32)[:, None]
            for layer, scales in zip(self.model.kv_head_counts, self._stated_kv_scales(checkpoint), strict=True):
                name = kv_scales_name(self.model.kv_layer(layer))
                yield Parameter.of(name, "f32", np.ascontiguousarray((scales * cached).reshape(-1)))
        for name, table in tables(self.model, self.max_model_len):
            yield Parameter.of(name, "f32", table)

    def _stated_kv_scales(self, checkpoint: Checkpoint) -> list[Array]:
        """Of each layer of `kv_head_counts`, float32 [2, heads], keys before values. Raises CompileError if they are
        unavailable."""
        counts = self.model.kv_head_counts
        if self.kv_scale_values:
            values = np.array(self.kv_scale_values, np.float32)
            return [np.broadcast_to(values[layer], (2, count)) for layer, count in counts.items()]
        stated = checkpoint.kv_scales(self.kv_dtype, counts) if self.kv_scales == "checkpoint" else None
        if stated is None:
            raise CompileError(
                f"no scales of a KV cache of {self.kv_dtype} are stated, which the graphs read: compile the model by "
                "itself"
            )
        return stated

    def model_record(self) -> ModelRecord:
        """The model record of graphs.bin, without the number of weights shared by ranks."""
        model, of_rank, layers = self.model, self.rank_model, self.kv_layer_records()
        return ModelRecord(
            num_layers=model.num_kv_layers,
            num_kv_heads=of_rank.num_kv_heads,
            head_dim=model.head_dim,
            block_size=self.block_size,
            kv_dtype=KV_DTYPES[self.kv_dtype].code,
            vocab_size=model.num_inputs,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            act_dtype=DTYPES[self.act_dtype].code,
            sliding_window=model.sliding_window or 0,
            eos=tuple(model.eos_token_ids) if model.pooled is None else (),
            bos=-1 if model.bos_token_id is None else model.bos_token_id,
            key_block_bytes=max(layer.key_block_bytes for layer in layers),
            value_block_bytes=max(layer.value_block_bytes for layer in layers),
            vector_width=0 if model.pooled is None else model.output_width,
            whole_prompts=int(model.whole_prompts),
            adapter_slots=0 if self.adapters is None else self.adapters.slots,
            adapter_rank=0 if self.adapters is None else self.adapters.rank,
            num_ranks=self.ranks if self.ranks > 1 else 0,
            states_width=model.states_width,
            takes_states=_states_use(model),
        )


def _gate_and_up(order: NDArray[np.int32]) -> NDArray[np.int32]:
    """Row order of gate, then of up, that matches the columns of down: for one, [K], or per expert, [experts, K]."""
    orders = np.atleast_2d(order)
    inner, first = orders.shape[1], 2 * orders.shape[1] * np.arange(len(orders))[:, None]
    rows: NDArray[np.int32] = np.concatenate((first + orders, first + inner + orders), 1).ravel().astype(np.int32)
    return rows


def _states_use(model: ModelConfig) -> int:
    """Index in STATES_USES."""
    if model.states == "none":
        return 0
    return STATES_USES.index("placed_on_axes" if model.on_axes else model.states)
