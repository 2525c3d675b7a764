"""The options that determine a compilation, shared by commands that compile and commands that explain."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.buckets import BucketError, LadderVariables, Limits, parse_spec, read_environment
from llmc.buckets.bucket import MAX_DIM, PROMPT_PHASES, REQUIRED_PHASES
from llmc.buckets.ladder import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_SEQS
from llmc.buckets.verify_buckets import MAX_GUESSES
from llmc.kv_dtypes import KV_DTYPES
from llmc.quantize import SCHEMES, QuantConfig, QuantizeError
from llmc.task_names import POOLINGS, RANK_PROMPTS, TASKS

if TYPE_CHECKING:
    from llmc.compiler.config import CompileConfig

*_SOME, _LAST = SCHEMES
_SCHEMES = f"{', '.join(_SOME)} or {_LAST}"
DTYPES = ("auto", "f32", "bf16", "f16")
_KV_DTYPES = f"{', '.join([*KV_DTYPES][:-1])} or {[*KV_DTYPES][-1]}"


@dataclass(frozen=True)
class CompileOptions:
    """Values of the options; each field is one option."""

    buckets: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Buckets; default: ramp-up ladders of the limits.")
    ] = None
    target: Annotated[
        str,
        typer.Option(
            help="Target to compile for: x86-64-v3, znver4, reference, opencl, cuda:sm_90, … (llmc targets lists all); "
            "native: this machine's CPU, or LLMC_NATIVE_TARGET."
        ),
    ] = "native"
    dtype: Annotated[str, typer.Option(help="Weights and activations: auto, f32, bf16 or f16.")] = "auto"
    kv_dtype: Annotated[str, typer.Option(help=f"KV cache: auto (as dtype), {_KV_DTYPES}.")] = "auto"
    task: Annotated[
        str,
        typer.Option(
            metavar="TASK",
            help="Task: generate (text), embed, rank or classify (vectors, scores); auto: from the model's files.",
        ),
    ] = "auto"
    pooling: Annotated[
        str,
        typer.Option(
            metavar="POOLING",
            help="Pooling of vectors: mean, cls (the first token) or last; auto: from the model's files.",
        ),
    ] = "auto"
    rank_prompt: Annotated[
        str,
        typer.Option(
            metavar="PROMPT",
            help="Prompt around the pairs of rank: none or qwen3-reranker; auto: from the model's files.",
        ),
    ] = "auto"
    quantization_param_path: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file with scales for --kv-dtype fp8_e4m3, in vLLM's format."),
    ] = None
    merge_lora: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="LoRA adapter to merge into the weights, as PEFT saves it; repeatable."),
    ] = None
    lora_slots: Annotated[
        int | None,
        typer.Option(
            min=1, max=256, metavar="N", help="LoRA adapters that can be loaded at once at run time; default: none."
        ),
    ] = None
    lora_rank: Annotated[
        int | None,
        typer.Option(min=1, max=512, metavar="N", help="Largest rank of a loaded adapter; default: 16."),
    ] = None
    lora_experts: Annotated[
        bool, typer.Option("--lora-experts", help="Let loaded adapters change experts; slots then need more memory.")
    ] = False
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_DIM,
            metavar="N",
            help="Longest prompt plus output, in tokens; default: the longest of SPEC, else the model's, at most 4096.",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            min=1, max=4096, metavar="N", help="Sequences per step; default: the largest decode batch of SPEC, else 16."
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_DIM,
            metavar="N",
            help="New tokens per bucket; default: no limit with SPEC, else max-model-len, at least 2048.",
        ),
    ] = None
    speculate: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_GUESSES,
            metavar="N",
            help="Add decode buckets with rows for N guesses per sequence, for --speculate of run and serve.",
        ),
    ] = 0
    tensor_parallel: Annotated[
        int,
        typer.Option(min=1, max=256, metavar="N", help="Ranks that share each layer and run each step together."),
    ] = 1
    pipeline_parallel: Annotated[
        int,
        typer.Option(min=1, max=256, metavar="N", help="Stages of such ranks; each stage has some of the layers."),
    ] = 1
    expert_parallel: Annotated[
        bool,
        typer.Option(
            "--expert-parallel", help="With --tensor-parallel: each rank holds whole experts, not parts of all."
        ),
    ] = False
    block_size: Annotated[
        int | None,
        typer.Option(
            min=16,
            metavar="N",
            help="Tokens of a KV block, a multiple of 16; default: 32.",
        ),
    ] = None
    quant: Annotated[
        str | None,
        typer.Option(metavar="SCHEME", help=f"Quantize linear weights: {_SCHEMES} (a8: int8 activations)."),
    ] = None
    group_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Weights that share a scale: 32, 64, 128 or -1 (a whole channel); w4 schemes only."
        ),
    ] = None
    asymmetric: Annotated[
        bool | None,
        typer.Option("--asymmetric/--symmetric", help="Give each group a zero point, or none; w4 schemes only."),
    ] = None
    skip: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Layers left unquantized: kinds (lm_head, mlp.down, …) or weights, comma-separated."
        ),
    ] = None
    allow_unknown_config: Annotated[
        bool,
        typer.Option(
            "--allow-unknown-config",
            help="Ignore, with a warning, unknown keys of the model's config that may matter.",
        ),
    ] = False

    def config(
        self, model: Path, output: Path, *, needs: str, jobs: int = 0, cache_dir: Path | None = None
    ) -> CompileConfig:
        """The configuration for these options. Usage is checked before anything heavy is imported.

        needs: start of the sentence that says the compiler is not installed. Raises BadParameter, ModelPathError.
        """
        buckets: str | LadderVariables | None = self.buckets
        if buckets is None:
            buckets = _variables()
        # Without --max-num-seqs, the ladder of a SPEC determines it; `max` refers to the default ladder.
        limits = Limits(
            self.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
            self.max_model_len,
            self.block_size or DEFAULT_BLOCK_SIZE,
            self.max_num_batched_tokens,
        )
        if self.task not in TASKS:
            raise typer.BadParameter(f"--task {self.task!r} is unknown: use {', '.join(TASKS)}")
        if self.pooling not in POOLINGS:
            raise typer.BadParameter(f"--pooling {self.pooling!r} is unknown: use {', '.join(POOLINGS)}")
        if self.rank_prompt not in RANK_PROMPTS:
            raise typer.BadParameter(f"--rank-prompt {self.rank_prompt!r} is unknown: use {', '.join(RANK_PROMPTS)}")
        _check_usage(buckets, limits, self.dtype, self.kv_dtype, self.task)
        if self.lora_rank is not None and self.lora_slots is None:
            raise typer.BadParameter("--lora-rank says how large adapters may be: add --lora-slots N, how many of them")
        if self.lora_experts and self.lora_slots is None:
            raise typer.BadParameter("--lora-experts says what loaded adapters may change: add --lora-slots N")
        quantization = quant_config(self.quant, self.group_size, self.asymmetric, self.skip)
        from llmc.model_artifact import require_compiler

        require_compiler(needs)
        from llmc.compiler.config import DEFAULT_LORA_RANK, CompileConfig
        from llmc.compiler.targets.base import TargetError
        from llmc.compiler.targets.registry import resolve_target

        try:
            resolve_target(self.target)
        except TargetError as error:
            raise typer.BadParameter(f"--target: {error}") from error
        return CompileConfig(
            model=model,
            output=output,
            buckets=buckets,
            target=self.target,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            kv_scales=self.quantization_param_path,
            merge_lora=tuple(self.merge_lora or ()),
            lora_slots=self.lora_slots,
            lora_rank=self.lora_rank or DEFAULT_LORA_RANK,
            lora_experts=self.lora_experts,
            speculate=self.speculate,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            expert_parallel=self.expert_parallel,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            jobs=jobs,
            quant=quantization,
            cache_dir=cache_dir,
            allow_unknown_config=self.allow_unknown_config,
            task=self.task,
            pooling=self.pooling,
            rank_prompt=self.rank_prompt,
        )


def given_options(context: typer.Context, but: Collection[str] = ()) -> list[str]:
    """Flags given on the command line, as --max-num-seqs, except those of the parameters in `but`."""
    given = []
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in but and source is not None and source.name == "COMMANDLINE":
            given.append(f"--{name.replace('_', '-')}")
    return given


def _variables() -> LadderVariables | None:
    try:
        return read_environment(os.environ)
    except BucketError as error:
        raise typer.BadParameter(str(error)) from error


def _check_usage(buckets: str | LadderVariables | None, limits: Limits, dtype: str, kv_dtype: str, task: str) -> None:
    """Reports errors that do not depend on the model, before anything heavy is imported."""
    # For task "auto", the model determines the required phases.
    of_task: dict[str, tuple[str, ...]] = {"auto": (), "generate": REQUIRED_PHASES}
    phases = of_task.get(task, PROMPT_PHASES)
    check_dtype(dtype)
    if kv_dtype not in ("auto", *KV_DTYPES):
        raise typer.BadParameter(f"--kv-dtype {kv_dtype!r} is unknown: use auto, {_KV_DTYPES}")
    if limits.block_size is not None and limits.block_size % 16:
        raise typer.BadParameter(f"--block-size {limits.block_size} is not a multiple of 16: use 16, 32 or 64")
    # Checks that need the model follow once it is read.
    known = limits.max_model_len is not None
    try:
        if isinstance(buckets, LadderVariables):
            if known:
                buckets.ladder(limits, phases)
        elif buckets is not None and (known or "max" not in buckets):
            parse_spec(buckets, limits, phases)
    except BucketError as error:
        source = "" if isinstance(buckets, LadderVariables) else "--buckets: "
        raise typer.BadParameter(f"{source}{error}") from error


def check_dtype(dtype: str) -> None:
    """Raises BadParameter for a type of activations that is unknown."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype {dtype!r} is unknown: use {', '.join(DTYPES)}")


def quant_config(
    scheme: str | None, group_size: int | None, asymmetric: bool | None, skip: str | None, flag: str = "--quant"
) -> QuantConfig | None:
    """Quantization configured by the flags; None without a scheme. flag: that of the scheme."""
    if scheme is None:
        given = {"--group-size": group_size, "--asymmetric/--symmetric": asymmetric, "--skip": skip}
        for name, value in given.items():
            if value is not None:
                raise typer.BadParameter(f"{name} says how to quantize; add --quant {_SCHEMES}")
        return None
    try:
        return QuantConfig(scheme, group_size, asymmetric, tuple(filter(None, (skip or "").split(","))))
    except QuantizeError as error:
        raise typer.BadParameter(f"{flag}: {error}") from error
