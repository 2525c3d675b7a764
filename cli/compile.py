"""`llmc compile`: a model directory to an artifact."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.buckets import BucketError, Limits, parse_spec, spec_from_environment
from llmc.buckets.bucket import MAX_DIM

from .units import format_bytes

if TYPE_CHECKING:
    from llmc.compiler.config import CompileReport, Progress
    from llmc.quantize import QuantConfig

_HELP = """Compile a Hugging Face model directory into an artifact.

SPEC of --buckets is batch x sequence for each phase, prefill, decode and, if wanted, mixed (sequences x tokens of a
step, decodes beside chunks of prompts). A size is a ramp-up range MIN:STEP:MAX, bounded padding
MIN:STEP:MAX:pad:PERCENT, MIN:STEP:MAX:exp:LIMIT, a list [1,2,4] or one number; MAX may be "max". Or it is the name of a
.toml, .json or .txt file, as llmc buckets plan writes it; docs/buckets.md explains all of them. Environment variables
LLMC_{PROMPT,DECODE,MIXED}_{BS,SEQ,BLOCK}_BUCKET_{MIN,STEP,MAX} are its defaults.

\b
Examples:
  llmc compile models/qwen2.5-0.5b -o qwen.llmc
  llmc compile models/llama -o llama.llmc --buckets "prefill=1:32:4x128:128:1024,decode=1:128:4x128:128:2048"
  llmc compile models/llama -o llama.llmc --buckets "prefill=[1,2]x[128,512],decode=[1,8]x2048" --dtype bf16
  llmc compile models/llama -o llama.llmc --buckets "prefill=1x[128,512],decode=[1,8]x2048,mixed=8x[128,256]"
  llmc compile models/llama -o llama-w8a8.llmc --quant w8a8
  llmc compile models/llama -o llama-w4a16.llmc --quant w4a16 --group-size 32 --skip lm_head,mlp.down
  llmc compile models/llama -o avx2.llmc --target x86-64-v3 --jobs 2 --json
  llmc compile qwen.llmc --add decode:4x512
"""


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("compile", help=_HELP)(compile_command)


def compile_command(
    context: typer.Context,
    model: Path = typer.Argument(..., metavar="MODEL", help="Directory with config.json and safetensors."),
    output: Path | None = typer.Option(None, "-o", "--output", metavar="OUT", help="Artifact directory to write."),
    add: list[str] = typer.Option(
        [], metavar="BUCKET", help="Give MODEL, an artifact, this bucket, too; in place without -o; may be repeated."
    ),
    buckets: str | None = typer.Option(None, metavar="SPEC", help="Buckets; default: ramp-up ladders of the limits."),
    target: str = typer.Option("native", help="CPU to compile for: native, x86-64-v3, znver4, sapphirerapids, …"),
    dtype: str = typer.Option("auto", help="Weights and activations: auto, f32 or bf16."),
    kv_dtype: str = typer.Option("auto", help="KV cache: auto (as dtype), f32 or bf16."),
    max_model_len: int | None = typer.Option(
        None, min=1, max=MAX_DIM, metavar="N", help="Longest prompt plus output, tokens."
    ),
    max_num_seqs: int = typer.Option(16, min=1, max=4096, metavar="N", help="Sequences that run at once."),
    block_size: int = typer.Option(32, min=16, metavar="N", help="Tokens of a KV block, a multiple of 16."),
    quant: str | None = typer.Option(
        None, metavar="SCHEME", help="Quantize linear weights: w8a16, w8a8, w4a16 or w4a8 (a8: int8 activations)."
    ),
    group_size: int | None = typer.Option(
        None, metavar="N", help="Weights that share a scale: 32, 64, 128 or -1 (a whole channel); w4 schemes only."
    ),
    asymmetric: bool | None = typer.Option(
        None, "--asymmetric/--symmetric", help="A zero point for each group, or none; w4 schemes only."
    ),
    skip: str | None = typer.Option(
        None, metavar="LIST", help="Layers left unquantized: kinds (lm_head, mlp.down, …) or weights, comma-separated."
    ),
    jobs: int = typer.Option(0, min=0, metavar="N", help="Compiling processes; 0: one a CPU."),
    cache_dir: Path | None = typer.Option(
        None, envvar="LLMC_CACHE_DIR", metavar="DIR", help="Graph cache; default: $XDG_CACHE_HOME/llmc."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON on stdout."),
) -> None:
    if add:
        from .compile_add import add_command

        return add_command(context, model, output, add, jobs, cache_dir, as_json)
    if output is None:
        raise typer.BadParameter("-o or --output OUT is missing: name the artifact directory to write")
    if buckets is None:
        buckets = _buckets_from_environment(max_num_seqs, max_model_len, block_size)
    _check_usage(buckets, Limits(max_num_seqs, max_model_len, block_size), dtype, kv_dtype)
    quantization = quant_config(quant, group_size, asymmetric, skip)
    from llmc import require_compiler

    require_compiler("llmc compile needs the compiler")
    from llmc.compiler.config import CompileConfig
    from llmc.compiler.pipeline import compile_model
    from llmc.compiler.resources import seconds_since_start
    from llmc.compiler.targets.cpu import TargetError, resolve_target

    config = CompileConfig(
        model=model,
        output=output,
        buckets=buckets,
        target=target,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        jobs=jobs,
        quant=quantization,
        cache_dir=cache_dir,
    )
    try:
        resolve_target(target)
    except TargetError as error:
        raise typer.BadParameter(f"--target: {error}") from error
    start_s = round(seconds_since_start(), 3)
    with progress_bar() as progress:
        report = compile_model(config, progress)
    report = replace(report, phase_seconds={"start": start_s, **report.phase_seconds})
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _print_table(report)


def _buckets_from_environment(max_num_seqs: int, max_model_len: int | None, block_size: int) -> str | None:
    try:
        return spec_from_environment(os.environ, max_num_seqs, max_model_len, block_size)
    except BucketError as error:
        raise typer.BadParameter(str(error)) from error


def _check_usage(buckets: str | None, limits: Limits, dtype: str, kv_dtype: str) -> None:
    """What is wrong whatever the model is: reported before anything heavy is imported."""
    for name, value in (("--dtype", dtype), ("--kv-dtype", kv_dtype)):
        if value not in ("auto", "f32", "bf16"):
            raise typer.BadParameter(f"{name} {value!r} is unknown: use auto, f32 or bf16")
    if limits.block_size is not None and limits.block_size % 16:
        raise typer.BadParameter(f"--block-size {limits.block_size} is not a multiple of 16")
    # A `max` that only the model knows is checked once the model is read.
    if buckets is not None and not (limits.max_model_len is None and "max" in buckets):
        try:
            parse_spec(buckets, limits)
        except BucketError as error:
            raise typer.BadParameter(f"--buckets: {error}") from error


def quant_config(
    scheme: str | None, group_size: int | None, asymmetric: bool | None, skip: str | None
) -> QuantConfig | None:
    """What the flags of quantization ask for; None without --quant."""
    if scheme is None:
        given = {"--group-size": group_size, "--asymmetric/--symmetric": asymmetric, "--skip": skip}
        for name, value in given.items():
            if value is not None:
                raise typer.BadParameter(f"{name} says how to quantize; add --quant w8a16, w8a8, w4a16 or w4a8")
        return None
    from llmc.quantize import QuantConfig, QuantizeError

    try:
        return QuantConfig(scheme, group_size, asymmetric, tuple(filter(None, (skip or "").split(","))))
    except QuantizeError as error:
        raise typer.BadParameter(f"--quant: {error}") from error


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress callback for the compiler that draws one bar a phase on stderr, or nothing when it is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def update(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done, total=total)

        yield update


def _print_table(report: CompileReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report.artifact}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row("graphs", f"{report.num_graphs}")
    table.add_row(
        "distinct kernels",
        f"{report.num_kernels} ({report.kernels_compiled} compiled, {report.kernels_cached} from the cache)",
    )
    table.add_row("code", format_bytes(report.code_bytes))
    table.add_row("weights", format_bytes(report.weight_bytes))
    table.add_row("arena (largest graph)", format_bytes(report.arena_bytes))
    table.add_row("peak memory", format_bytes(report.peak_memory_bytes))
    table.add_section()
    for phase, seconds in report.phase_seconds.items():
        table.add_row(phase, f"{seconds:.2f} s")
    table.add_row("total", f"{sum(report.phase_seconds.values()):.2f} s")
    Console(file=sys.stdout).print(table)
