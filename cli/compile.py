"""`llmc compile`: a model directory to an artifact."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.cli.options.artifact_checks import check_opens
from llmc.cli.options.compile import CompileOptions
from llmc.cli.options.group import takes_option_groups
from llmc.cli.options.sample import read_sample
from llmc.cli.render.compile_progress import progress_bar
from llmc.units import format_bytes

if TYPE_CHECKING:
    from llmc.compiler.config import CompileReport

_HELP = """Compile a model in Hugging Face's format, GGUF or ONNX into an artifact.

MODEL is a directory, a .gguf file (the first of a split model), an .onnx file of Optimum's exporter, or
ORG/NAME[@REVISION] on the Hugging Face hub. The latter is downloaded into the hub's cache (see HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE), and the artifact records its commit. Quantized weights keep their numbers; --quant rounds them again.
Notes report what is kept and the errors of conversions.

SPEC of --buckets is batch x sequence for each phase: prefill, decode and, optionally, mixed. Mixed is sequences x
tokens of a step with decodes beside chunks of prompts. A size is a ramp-up range MIN:STEP:MAX, bounded padding
MIN:STEP:MAX:pad:PERCENT, MIN:STEP:MAX:exp:LIMIT, a list [1,2,4] or one number; MAX may be "max". SPEC may also be a
.toml, .json or .txt file, such as llmc buckets plan writes; see docs/buckets.md. Defaults come from environment
variables such as LLMC_PROMPT_BS_BUCKET_MIN, else from the default ladder. llmc
buckets import converts the VLLM_ variables of a server on Gaudi.

An artifact at OUT is replaced only if it is of the same model and options, which gives the same bytes, or with
--overwrite. Files that are not llmc's are never replaced.

\b
Examples:
  llmc compile models/qwen2.5-0.5b -o qwen.llmc
  llmc compile Qwen/Qwen3-0.6B -o qwen.llmc
  llmc compile qwen3-0.6b-q4_k_m.gguf -o qwen.llmc --quant w4a16
  llmc compile exported/model.onnx -o qwen.llmc
  llmc compile models/llama -o llama.llmc --buckets "prefill=1:32:4x128:128:1024,decode=1:128:4x128:128:2048"
  llmc compile models/llama -o llama.llmc --buckets "prefill=[1,2]x[128,512],decode=[1,8]x2048" --dtype bf16
  llmc compile models/llama -o llama.llmc --buckets "prefill=1x[128,512],decode=[1,8]x2048,mixed=8x[128,256]"
  llmc compile models/llama -o llama-w8a8.llmc --quant w8a8
  llmc compile models/llama -o llama-int8kv.llmc --kv-dtype int8
  llmc compile models/llama -o llama-medical.llmc --merge-lora adapters/medical
  llmc compile models/llama -o llama-loras.llmc --lora-slots 8 --lora-rank 64
  llmc compile models/llama -o llama-2.llmc --tensor-parallel 2
  llmc compile models/llama -o llama-2.llmc --pipeline-parallel 2
  llmc compile models/llama -o llama.llmc --eagle models/llama-eagle
  llmc compile Qwen/Qwen3.5-0.8B -o qwen.llmc --mtp
  llmc compile HuggingFaceTB/SmolVLM-256M-Instruct -o smolvlm.llmc --images
  llmc compile models/llama -o llama-w4a16.llmc --quant w4a16 --group-size 32 --skip lm_head,mlp.down
  llmc compile models/llama -o v3.llmc --target x86-64-v3 --jobs 2 --json
  llmc compile models/llama -o llama.llmc --tune
  llmc compile sentence-transformers/all-MiniLM-L6-v2 -o minilm.llmc
  llmc compile Qwen/Qwen3-Reranker-0.6B -o reranker.llmc --task rank
  llmc compile models/llama -o llama.llmc --max-num-seqs 64 --overwrite
  llmc compile qwen.llmc --add decode:4x512
"""


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("compile", help=_HELP)(compile_command)


@takes_option_groups
def compile_command(
    context: typer.Context,
    model: Path = typer.Argument(
        ..., metavar="MODEL", help="Directory with config.json, .gguf or .onnx file, or ORG/NAME of the hub."
    ),
    output: Path | None = typer.Option(None, "-o", "--output", metavar="OUT", help="Artifact directory to write."),
    add: list[str] = typer.Option(
        [], metavar="BUCKET", help="Add this bucket to MODEL, an artifact; in place, or to -o; repeatable."
    ),
    options: CompileOptions = CompileOptions(),
    eagle: Path | None = typer.Option(
        None,
        metavar="HEAD",
        help="Also compile this EAGLE head, for --draft; its artifact is beside OUT, with -eagle in its name.",
    ),
    mtp: bool = typer.Option(
        False,
        "--mtp",
        help="Also compile the model's own layer for multi-token prediction, for --draft; its artifact is beside OUT, "
        "with -mtp in its name.",
    ),
    images: bool = typer.Option(
        False,
        "--images",
        help="The model sees images: also compile what reads them, for --images of other commands; its artifact is "
        "beside OUT, with -images in its name.",
    ),
    draft_vocab: int = typer.Option(
        0,
        min=0,
        metavar="N",
        help="Tokens that the head of --mtp or --eagle may guess, the most frequent ones; 0: all. Choosing among fewer "
        "ones is faster.",
    ),
    draft_vocab_text: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="UTF-8 text whose tokens count as frequent for --draft-vocab; default: the tokenizer's lowest ids.",
    ),
    jobs: int = typer.Option(0, min=0, metavar="N", help="Compiling processes; 0: one per CPU."),
    tune: bool = typer.Option(
        False,
        "--tune",
        help="Measure the fastest schedule of each linear layer on this machine; takes some minutes, once.",
    ),
    tokenizer: bool = typer.Option(
        True,
        "--tokenizer/--no-tokenizer",
        help="Copy the model's tokenizer; without it the artifact takes only token ids.",
    ),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace OUT even if it is of another model or other options."
    ),
    cache_dir: Path | None = typer.Option(
        None, envvar="LLMC_CACHE_DIR", metavar="DIR", help="Graph cache; default: $XDG_CACHE_HOME/llmc."
    ),
    dump: Path | None = typer.Option(
        None, metavar="DIR", help="Write the result of each phase, as text, into this new directory."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON on stdout."),
) -> None:
    if add and tune:
        raise typer.BadParameter("--tune measures a whole artifact, not what is added to one; leave out one of them")
    if eagle is not None and mtp:
        raise typer.BadParameter("--eagle and --mtp each add a head, and a model has one: leave out one of them")
    if images and (eagle is not None or mtp):
        flag = "--mtp" if mtp else "--eagle"
        raise typer.BadParameter(f"--images and {flag} do not go together yet: leave out one of them")
    if draft_vocab and eagle is None and not mtp:
        raise typer.BadParameter("--draft-vocab is for a head that guesses: add --mtp or --eagle HEAD, or leave it out")
    if draft_vocab_text is not None and not draft_vocab:
        raise typer.BadParameter("--draft-vocab-text chooses the tokens of --draft-vocab N: add that, or leave it out")
    text = "" if draft_vocab_text is None else read_sample(draft_vocab_text, "--draft-vocab-text")
    if add and (eagle is not None or mtp or images):
        flag = "--images" if images else "--mtp" if mtp else "--eagle"
        raise typer.BadParameter(f"{flag} changes every graph, and --add none: compile the model again with {flag}")
    if add:
        from llmc.cli.compile_add import add_command

        return add_command(context, model, output, add, jobs, cache_dir, overwrite, dump, as_json)
    if output is None:
        raise typer.BadParameter("-o or --output OUT is missing: name the artifact directory to write")
    config = options.config(model, output, needs="llmc compile needs the compiler", jobs=jobs, cache_dir=cache_dir)
    config = replace(config, tokenizer="required" if tokenizer else "none", overwrite=overwrite, dump=dump)
    if tune:
        from llmc.machine import machine_facts, num_cores

        config = replace(config, tune_for=machine_facts(num_cores()))
    from llmc.compiler.compile_times import note
    from llmc.compiler.pipeline import compile_model
    from llmc.compiler.resources import seconds_since_start

    start_s = round(seconds_since_start(), 3)
    beside: dict[str, CompileReport] = {}
    with progress_bar() as progress:
        if images:
            from llmc.compiler.images import compile_with_images

            report, beside["images"] = compile_with_images(config, progress)
        elif eagle is None and not mtp:
            report = compile_model(config, progress)
        else:
            from llmc.compiler.drafting_heads import compile_with_head

            report, head = compile_with_head(config, eagle, progress, draft_vocab=draft_vocab, draft_text=text)
            beside["head"] = head
    report = replace(report, phase_seconds={"start": start_s, **report.phase_seconds})
    if not tune:
        note(report, config)
    for one in (report, *beside.values()):
        check_opens(one.artifact)
        for warning in one.warnings:
            print(f"llmc: warning: {warning}", file=sys.stderr)
        for note_ in one.notes:
            print(f"llmc: note: {note_}", file=sys.stderr)
    if as_json:
        others = {name: one.as_dict() for name, one in beside.items()}
        print(json.dumps({**report.as_dict(), **others}, indent=2))
        return
    _print_table(report, _context(report))
    for name, one in beside.items():
        _print_table(one, f"{one.max_model_len:,} patches" if name == "images" else _context(one))


def _context(report: CompileReport) -> str:
    if report.max_model_len == report.model_len:
        return f"{report.max_model_len:,} tokens"
    return f"{report.max_model_len:,} tokens, the model's is {report.model_len:,}"


def _print_table(report: CompileReport, context: str) -> None:
    from rich.table import Table

    from llmc.cli.render.tables import print_table

    table = Table(title=f"{report.artifact}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("context", context)
    table.add_row("graphs", f"{report.num_graphs}")
    table.add_row(
        "distinct kernels",
        f"{report.num_kernels} ({report.kernels_compiled} compiled, {report.kernels_cached} from the cache)",
    )
    if report.tuned:
        gains = sorted(report.tuned.values())
        table.add_row("tuned kernels", f"{len(gains)}, {gains[0]:.2f} to {gains[-1]:.2f} times as fast")
    table.add_row("code", format_bytes(report.code_bytes))
    table.add_row("weights", format_bytes(report.weight_bytes))
    table.add_row("arena (largest graph)", format_bytes(report.arena_bytes))
    table.add_row("peak memory", format_bytes(report.peak_memory_bytes))
    table.add_section()
    for phase, seconds in report.phase_seconds.items():
        table.add_row(phase, f"{seconds:.2f} s")
    table.add_row("total", f"{sum(report.phase_seconds.values()):.2f} s")
    print_table(table)
