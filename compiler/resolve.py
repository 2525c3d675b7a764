"""Resolves every "auto" of a CompileConfig."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmc.buckets import BucketLadder
from llmc.buckets.bucket import PROMPT_PHASES, REQUIRED_PHASES
from llmc.buckets.verify_buckets import add_verify_buckets
from llmc.compiler.adapters import AdapterLimits, AdapterLinear, adapter_linears
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.dtypes import DTYPES
from llmc.compiler.graph.commands import GraphShape
from llmc.compiler.ops.adapters import is_too_large
from llmc.compiler.ops.definition import GraphParams
from llmc.compiler.partition import Partition, check_divisible
from llmc.compiler.recipes import recipe_of, stored_recipe
from llmc.compiler.resolve_ladder import cut_to_step, resolve_ladder
from llmc.compiler.stages import check_stages, divide_layers
from llmc.compiler.store import keys
from llmc.compiler.targets.base import Target
from llmc.compiler.targets.registry import resolve_target
from llmc.compiler.weight_request import WeightRequest, kv_scales_name
from llmc.graphs_records import ModelRecord, StageRecord
from llmc.kv_dtypes import KV_DTYPES, LATENT_SCALES
from llmc.models.config import ModelConfig
from llmc.models.context import sound_scaling, trained_length
from llmc.models.convert import Array
from llmc.models.loader import Parameter, load_parameters
from llmc.models.registry import get_family
from llmc.models.sources.base import Checkpoint, ModelSource
from llmc.models.tables import table_shapes, tables
from llmc.quantize import Recipe
from llmc.quantize.kv_scales import FILE_KV_DTYPE, read_kv_scales

DEFAULT_MAX_MODEL_LEN = 4096


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
            layers = {self.model.kv_layer(layer) for layer in range(end - count, end)}
            found.append(StageRecord(min(layers), len(layers)))
        return found

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
        layers = range(self.model.num_layers if self.kv_scales else 0)
        scales = {kv_scales_name(layer): (2 * self.model.num_kv_heads,) for layer in layers}
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
            for layer, scales in enumerate(self._stated_kv_scales(checkpoint)):
                yield Parameter.of(kv_scales_name(layer), "f32", np.ascontiguousarray(scales.reshape(-1)))
        for name, table in tables(self.model, self.max_model_len):
            yield Parameter.of(name, "f32", table)

    def _stated_kv_scales(self, checkpoint: Checkpoint) -> Array:
        """float32 [layers, 2, heads], keys before values. Raises CompileError if they are unavailable."""
        shape = self.model.num_layers, 2, self.model.num_kv_heads
        if self.kv_scale_values:
            return np.broadcast_to(np.array(self.kv_scale_values, np.float32)[:, None, None], shape)
        stated = checkpoint.kv_scales(self.kv_dtype, shape[0], shape[2]) if self.kv_scales == "checkpoint" else None
        if stated is None:
            raise CompileError(
                f"no scales of a KV cache of {self.kv_dtype} are stated, which the graphs read: compile the model by "
                "itself"
            )
        return stated

    def model_record(self) -> ModelRecord:
        """The model record of graphs.bin, without the number of weights shared by ranks."""
        model, of_rank = self.model, self.rank_model
        key_scales = 1 if model.latent is None else LATENT_SCALES
        keys_bytes, values_bytes = self.target.kv_block_bytes(
            of_rank.num_kv_heads, model.head_dim, self.block_size, self.kv_dtype, key_scales
        )
        if model.latent is not None:
            values_bytes = 0  # values are part of the keys
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
            key_block_bytes=keys_bytes,
            value_block_bytes=values_bytes,
            vector_width=0 if model.pooled is None else model.output_width,
            whole_prompts=int(model.whole_prompts),
            adapter_slots=0 if self.adapters is None else self.adapters.slots,
            adapter_rank=0 if self.adapters is None else self.adapters.rank,
            num_ranks=self.ranks if self.ranks > 1 else 0,
            states_width=model.states_width,
            takes_states=int(model.states == "taken"),
        )


def resolve(config: CompileConfig, source: ModelSource | None = None) -> Resolved:
    """Resolves dtypes, target, lengths and ladder. Raises CompileError, BucketError, QuantizeError, TargetError or
    ModelError. source: the opened model; None opens config.model.
    """
    source = source or config.open_source()
    model = source.config()
    act_dtype = config.dtype if config.dtype != "auto" else ("f32" if model.dtype == "f32" else "bf16")
    default_len = min(model.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    if model.task is not None and model.task.longest_text is not None:
        default_len = min(default_len, model.task.longest_text)
    phases = REQUIRED_PHASES if model.pooled is None else PROMPT_PHASES
    limits, ladder = resolve_ladder(config, default_len, trained_length(model), phases)
    if model.whole_prompts and limits.max_model_len > ladder.max_context:
        limits = cut_to_step(config, limits, ladder.max_context)
    if model.learned_positions and limits.max_model_len > model.learned_positions:
        raise CompileError(
            f"max-model-len is {limits.max_model_len}, but the model has a table of {model.learned_positions} "
            "positions; lower --max-model-len"
        )
    kv_dtype = config.kv_dtype if config.kv_dtype != "auto" else act_dtype
    kind, latent = KV_DTYPES[kv_dtype], model.latent
    if (
        latent is not None
        and kind.largest is not None
        and (latent.rank % kind.per_word or latent.key_dim % kind.per_word)
    ):
        raise CompileError(
            f"kv-dtype is {kv_dtype}, of which {kind.per_word} numbers are a word, but latent vectors have "
            f"{latent.rank} elements and keys {latent.key_dim}: give --kv-dtype bf16, f16 or f32"
        )
    kv_scales, values = _kv_scales(config, source, model, kv_dtype)
    cut_by = None
    if limits.max_model_len < trained_length(model):
        by_ladder = "default" if limits.max_model_len == default_len else "buckets"
        cut_by = by_ladder if config.max_model_len is None else "option"
    adapters = _adapter_limits(config, model)
    if adapters is not None and model.pooled is not None:
        raise CompileError("--lora-slots is for models that write text; leave it out, or merge one with --merge-lora")
    if config.speculate and model.pooled is not None:
        raise CompileError("--speculate is for models that write text; leave it out")
    if config.speculate:
        ladder = add_verify_buckets(ladder, limits.max_num_seqs, config.speculate, config.block_size)
    if config.leave_states or config.head is not None:
        model = _with_states(config, model)
    recipe = stored_recipe(source, model) if config.quant is None else recipe_of(config.quant, model)
    if config.tensor_parallel != 1:
        if adapters is not None:
            raise CompileError("--lora-slots and --tensor-parallel do not go together yet: merge one with --merge-lora")
        check_divisible(model, recipe, config.tensor_parallel, by_expert=config.expert_parallel)
    layers_by_stage: tuple[int, ...] = ()
    if config.pipeline_parallel != 1:
        if adapters is not None:
            raise CompileError(
                "--lora-slots and --pipeline-parallel do not go together yet: merge one with --merge-lora"
            )
        check_stages(model, config.pipeline_parallel, config.tensor_parallel)
        layers_by_stage = divide_layers(model, recipe, act_dtype, config.pipeline_parallel)
    if adapters is not None:
        # Adapters read and add in the model's own order.
        recipe = replace(recipe, rows_of={})
        _check_expert_order(adapters, model, recipe)
    target = resolve_target(config.target)
    if model.states != "none" and not target.keeps_states:
        raise CompileError(
            f"{target.name} is for devices of kind {target.device}, which keep no hidden states for an EAGLE head yet: "
            "leave out --eagle"
        )
    if config.tensor_parallel * config.pipeline_parallel != 1 and not target.runs_ranks:
        flag = "--tensor-parallel" if config.tensor_parallel != 1 else "--pipeline-parallel"
        raise CompileError(
            f"{target.name} is for devices of kind {target.device}, as which ranks do not run yet: leave out {flag}"
        )
    return Resolved(
        model=model,
        target=target,
        act_dtype=act_dtype,
        kv_dtype=kv_dtype,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        block_size=limits.block_size,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        ladder=ladder,
        recipe=recipe,
        cut_by=cut_by,
        kv_scales=kv_scales,
        kv_scale_values=values,
        ignored_config=source.ignored_config(),
        adapters=adapters,
        speculate=config.speculate,
        ranks=config.tensor_parallel,
        by_expert=config.expert_parallel,
        stage_layers=layers_by_stage,
    )


def _adapter_limits(config: CompileConfig, model: ModelConfig) -> AdapterLimits | None:
    if config.lora_slots is None:
        return None
    limits = AdapterLimits(config.lora_slots, config.lora_rank, config.lora_experts)
    if limits.experts and not any(linear.experts for linear in adapter_linears(model, limits).values()):
        raise CompileError(
            f"--lora-experts is for mixtures whose experts are linear layers of their own, and {model.model_type} "
            "models have none; leave it out, or merge an adapter with --merge-lora"
        )
    return limits


def _check_expert_order(limits: AdapterLimits, model: ModelConfig, recipe: Recipe) -> None:
    """Raises CompileError for experts in act-order: their inputs are gathered in that order, which no adapter has."""
    for name, linear in adapter_linears(model, limits).items():
        if linear.experts and name in recipe.permuted:
            raise CompileError(
                f"--lora-experts is not for experts in act-order, as {name} is: give --quant SCHEME, which rounds them "
                "anew, or leave it out, or merge an adapter with --merge-lora"
            )


def _with_states(config: CompileConfig, model: ModelConfig) -> ModelConfig:
    """The model with graphs that leave hidden states. Raises CompileError if they cannot."""
    if model.pooled is not None or model.bidirectional:
        raise CompileError("--eagle is for models that write text; leave it out")
    if config.tensor_parallel != 1:
        raise CompileError("--eagle and --tensor-parallel do not go together yet: leave out one of them")
    if config.pipeline_parallel != 1:
        raise CompileError("--eagle and --pipeline-parallel do not go together yet: leave out one of them")
    return model if model.states != "none" else replace(model, states="left")


def _kv_scales(
    config: CompileConfig, source: ModelSource, model: ModelConfig, kv_dtype: str
) -> tuple[Literal["checkpoint", "file"] | None, tuple[float, ...]]:
    """The source of the KV cache scales, and the values of a file. Raises ModelError for invalid scales, QuantizeError
    for an invalid file."""
    if config.kv_scales is not None:
        if kv_dtype != FILE_KV_DTYPE:
            raise CompileError(
                f"{config.kv_scales} has scales of a KV cache of {FILE_KV_DTYPE}, but this one is {kv_dtype}: give "
                f"--kv-dtype {FILE_KV_DTYPE}"
            )
        if model.latent is not None:
            raise CompileError(
                f"{config.kv_scales} has scales of keys and values, but {model.model_type} has latent vectors, whose "
                "scales are found as they are written: leave it out"
            )
        return "file", read_kv_scales(config.kv_scales, model.num_layers, model.model_type)
    if KV_DTYPES[kv_dtype].largest is None or not source.is_quantized or model.latent is not None:
        return None, ()
    stated = source.checkpoint().kv_scales(kv_dtype, model.num_layers, model.num_kv_heads)
    return None if stated is None else "checkpoint", ()


def _gate_and_up(order: NDArray[np.int32]) -> NDArray[np.int32]:
    """Row order of gate, then of up, that matches the columns of down: for one, [K], or per expert, [experts, K]."""
    orders = np.atleast_2d(order)
    inner, first = orders.shape[1], 2 * orders.shape[1] * np.arange(len(orders))[:, None]
    rows: NDArray[np.int32] = np.concatenate((first + orders, first + inner + orders), 1).ravel().astype(np.int32)
    return rows
