"""Resolves every "auto" of a CompileConfig."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from llmc.buckets.bucket import PROMPT_PHASES, REQUIRED_PHASES
from llmc.buckets.ladder import DEFAULT_BLOCK_SIZE
from llmc.buckets.verify_buckets import add_verify_buckets
from llmc.compiler.adapters import AdapterLimits, adapter_linears
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.partition import check_divisible
from llmc.compiler.recipes import recipe_of, stored_recipe
from llmc.compiler.resolve_ladder import cut_to_step, resolve_ladder
from llmc.compiler.resolved import Resolved
from llmc.compiler.stages import check_stages, divide_layers
from llmc.compiler.targets.registry import resolve_target
from llmc.kv_dtypes import KV_DTYPES
from llmc.models.config import ModelConfig
from llmc.models.context import trained_length
from llmc.models.registry import get_family
from llmc.models.sources.base import ModelSource
from llmc.quantize import Recipe
from llmc.quantize.kv_scales import FILE_KV_DTYPE, read_kv_scales

DEFAULT_MAX_MODEL_LEN = 4096


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
    kv_dtype = config.kv_dtype if config.kv_dtype != "auto" else act_dtype
    lengths = default_len, trained_length(model)
    limits, ladder = resolve_ladder(config, config.block_size or DEFAULT_BLOCK_SIZE, *lengths, phases)
    if model.whole_prompts and limits.max_model_len > ladder.max_context:
        limits = cut_to_step(config, limits, ladder.max_context)
    if model.learned_positions and limits.max_model_len > model.learned_positions:
        raise CompileError(
            f"max-model-len is {limits.max_model_len}, but the model has a table of {model.learned_positions} "
            "positions; lower --max-model-len"
        )
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
    if adapters is not None:
        source.check_adapters()
    if config.speculate and model.pooled is not None:
        raise CompileError("--speculate is for models that write text; leave it out")
    if config.speculate:
        ladder = add_verify_buckets(ladder, limits.max_num_seqs, config.speculate, limits.block_size)
    if config.images:
        model = _with_placed_rows(config, model, source)
    elif config.leave_states or config.head is not None or config.mtp:
        model = _with_states(config, model)
    recipe = stored_recipe(source, model) if config.quant is None else recipe_of(config.quant, model, source)
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
            f"{target.name} is for devices of kind {target.device}, which keep no rows beside a graph's inputs yet: "
            f"leave out {_states_flag(config)}"
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
        images=source.image_form(),
    )


def _adapter_limits(config: CompileConfig, model: ModelConfig) -> AdapterLimits | None:
    if config.lora_slots is None:
        return None
    limits = AdapterLimits(config.lora_slots, config.lora_rank, config.lora_experts)
    if limits.experts and not any(linear.experts for linear in adapter_linears(model, limits).values()):
        raise CompileError(
            f"--lora-experts is for mixtures, and no experts of {model.model_type} models take adapters; leave it out"
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


def _states_flag(config: CompileConfig) -> str:
    """The flag that asks for rows beside a graph's inputs: for images, or for a drafting head."""
    if config.images or config.tower:
        return "--images"
    return "--mtp" if config.mtp else "--eagle"


def _with_states(config: CompileConfig, model: ModelConfig) -> ModelConfig:
    """The model with graphs that leave hidden states. Raises CompileError if they cannot."""
    _check_states(config, model)
    return model if model.states != "none" else replace(model, states="left")


def _with_placed_rows(config: CompileConfig, model: ModelConfig, source: ModelSource) -> ModelConfig:
    """The model with graphs in which rows of images take the place of tokens. Raises CompileError if they cannot."""
    _check_states(config, model)
    if config.leave_states or config.head is not None or config.mtp:
        head = "--mtp" if config.mtp else "--eagle"
        raise CompileError(f"--images and {head} do not go together yet: leave out one of them")
    if get_family(model.model_type).tower is None:
        raise CompileError(f"llmc sees no images with {model.model_type} models; leave out --images")
    placed = source.placed_config()
    return replace(model, states=placed.states, rope=placed.rope, stacked_rows=placed.stacked_rows)


def _check_states(config: CompileConfig, model: ModelConfig) -> None:
    """Raises CompileError if graphs of the model can have no rows beside their inputs."""
    flag = _states_flag(config)
    if model.pooled is not None or model.bidirectional:
        raise CompileError(f"{flag} is for models that write text; leave it out")
    if config.tensor_parallel != 1:
        raise CompileError(f"{flag} and --tensor-parallel do not go together yet: leave out one of them")
    if config.pipeline_parallel != 1:
        raise CompileError(f"{flag} and --pipeline-parallel do not go together yet: leave out one of them")


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
    stated = source.checkpoint().kv_scales(kv_dtype, model.kv_head_counts)
    return None if stated is None else "checkpoint", ()
