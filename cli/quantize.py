"""`llmc quantize`: size, speed and quality of quantization schemes on one model, side by side."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.cli.options.calibration import WriteOptions
from llmc.cli.options.compile import check_dtype, given_options, quant_config
from llmc.cli.options.sample import read_sample
from llmc.cli.render.compile_progress import progress_bar
from llmc.quantize import SCHEMES, QuantConfig

if TYPE_CHECKING:
    from llmc.compiler.config import Progress
    from llmc.compiler.rounding import Rounding

_HELP = """Compare quantization schemes on a model, or with -o write a quantized checkpoint.

Without -o, the command compares size, rounding errors, and perplexity on a text; it writes nothing. Perplexity is that
of the artifact of `llmc compile --quant SCHEME`, in windows of --window tokens. The scheme "none" is the unquantized
model. Without --text, only sizes and errors are shown, which takes seconds.

\b
Examples:
  llmc quantize models/qwen2.5-0.5b
  llmc quantize Qwen/Qwen3-0.6B
  llmc quantize models/qwen2.5-0.5b --text held-out.txt --tokens 20000
  llmc quantize models/llama --schemes w4a16,w4a8 --group-size 32 --asymmetric --text held-out.txt
  llmc quantize models/llama --schemes w4a8 --layers

With -o, it writes a checkpoint in Hugging Face's format, for llmc compile and other programs. rtn rounds to nearest;
gptq, awq and smoothquant calibrate on the text of --calibration, layer by layer. The output projection and the
embedding are not quantized. A killed command resumes where it stopped, and gives the same bytes.

\b
Examples:
  llmc quantize models/llama -o llama-w4a16 --scheme w4a16 --calibration text.txt
  llmc quantize models/llama -o llama-awq --scheme w4a16 --method awq --group-size 128 --calibration text.txt
  llmc quantize models/llama -o llama-w8a8 --scheme w8a8 --calibration text.txt
  llmc quantize models/llama -o llama-fp8 --scheme fp8
  llmc quantize models/llama -o llama-q4.gguf --scheme w4a16 --format gguf --calibration text.txt
  llmc quantize models/llama -o llama-gptq --scheme w4a16 --format gptq --calibration text.txt --dry-run
  llmc quantize models/llama -o llama-mixed --target-kl 0.01 --calibration text.txt

--target-kl chooses for each layer: 4 bits in groups of 128, 64 or 32, 8 bits, or no quantization. The cost of each
choice is the KL divergence of the next token, measured alone. The command takes the smallest recipe whose costs add up
to at most X. It measures the whole recipe, and takes a stricter one if it misses X.
"""
NONE = "none"
_OF_WRITING = {
    "--scheme", "--method", "--format", "--calibration", "--samples", "--sample-tokens", "--damping", "--jobs",
    "--dry-run", "--target-kl",
}  # fmt: skip
_OF_COMPARING = {"--schemes", "--text", "--tokens", "--window", "--dtype", "--layers", "--cache-dir"}
_SEQS = 64  # windows scored at once


@dataclass(frozen=True)
class SchemeResult:
    """Result of a scheme on a model. perplexity: None without a text."""

    scheme: str
    groups: str
    rounding: Rounding
    perplexity: float | None

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        return {**found, **found.pop("rounding")}


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("quantize", help=_HELP)(quantize_command)


def quantize_command(
    context: typer.Context,
    model: Path = typer.Argument(
        ..., metavar="MODEL", help="Directory with config.json and safetensors, .gguf file, or ORG/NAME of the hub."
    ),
    schemes: str = typer.Option(
        ",".join((NONE, *SCHEMES)), metavar="LIST", help="Schemes to compare; none: the unquantized model."
    ),
    output: Path | None = typer.Option(None, "-o", "--output", metavar="OUT", help="Checkpoint directory to write."),
    scheme: str | None = typer.Option(
        None, metavar="SCHEME", help="Scheme to write: w4a16, w8a16, w8a8, w4a8, fp8 or mxfp4."
    ),
    method: str | None = typer.Option(
        None,
        metavar="METHOD",
        help="rtn, gptq, awq or smoothquant; default: gptq of w4a16, w4a8 and mxfp4, smoothquant of w8a8, else rtn.",
    ),
    format: str = typer.Option(
        "compressed-tensors", "--format", metavar="FORMAT", help="compressed-tensors, gptq, awq, mxfp4 or gguf."
    ),
    calibration: Path | None = typer.Option(None, metavar="FILE", help="UTF-8 text to calibrate on."),
    samples: int = typer.Option(128, min=1, metavar="N", help="Windows of the text; fewer if it is short."),
    sample_tokens: int = typer.Option(512, min=2, metavar="N", help="Tokens per window."),
    damping: float = typer.Option(
        0.01, min=0, max=1, metavar="X", help="For gptq: damping, as a share of the mean diagonal."
    ),
    target_kl: float | None = typer.Option(
        None, metavar="X", help="Choose bits per layer: the smallest model within X nats of the original."
    ),
    jobs: int = typer.Option(0, min=0, metavar="N", help="Threads; 0: one per CPU. The number changes no byte."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Estimate time, memory and disk space; write nothing."),
    group_size: int | None = typer.Option(None, metavar="N", help="As in llmc compile, for the w4 schemes."),
    asymmetric: bool | None = typer.Option(None, "--asymmetric/--symmetric", help="As in llmc compile."),
    skip: str | None = typer.Option(None, metavar="LIST", help="As in llmc compile."),
    text: Path | None = typer.Option(None, metavar="FILE", help="UTF-8 text to measure perplexity on."),
    tokens: int = typer.Option(10_000, min=2, metavar="N", help="Tokens of the text to use."),
    window: int = typer.Option(256, min=2, metavar="N", help="Tokens per window."),
    dtype: str = typer.Option("auto", help="As in llmc compile."),
    layers: bool = typer.Option(False, "--layers", help="Also show the error of every weight."),
    cache_dir: Path | None = typer.Option(None, envvar="LLMC_CACHE_DIR", metavar="DIR", help="Graph cache."),
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON."),
) -> None:
    _check_kind(context, output)
    if output is not None:
        from llmc.cli.quantize_write import write_command

        options = WriteOptions(
            method, format, calibration, samples, sample_tokens, damping, jobs, target_kl, dry_run, as_json
        )
        return write_command(model, output, scheme, group_size, asymmetric, skip, options)
    check_dtype(dtype)
    names = [name.strip() for name in schemes.split(",") if name.strip()]
    for name in names:
        if name not in (NONE, *SCHEMES):
            raise typer.BadParameter(f"--schemes names {name!r}, which is unknown: use {NONE}, {', '.join(SCHEMES)}")
    configs = {name: _config(name, group_size, asymmetric, skip) for name in names}
    if not configs:
        raise typer.BadParameter(f"--schemes is empty; name some of {NONE}, {', '.join(SCHEMES)}")
    sample = read_sample(text) if text is not None else None
    from llmc.model_artifact import require_compiler

    require_compiler("llmc quantize needs the compiler")
    from llmc.compiler.hub import locate

    with progress_bar() as progress:
        model = locate(model, lambda done, total: progress("download", done, total)).path
        results = [
            _result(model, name, config, sample, (tokens, window), dtype, cache_dir, progress)
            for name, config in configs.items()
        ]
    if as_json:
        print(json.dumps([result.as_dict() for result in results], indent=2))
        return
    _print_table(results)
    if layers:
        _print_layers(results)


def _check_kind(context: typer.Context, output: Path | None) -> None:
    """Checks flags that belong only to the comparison, or only to the written checkpoint."""
    given = set(given_options(context))
    if output is None and (wrong := sorted(given & _OF_WRITING)):
        raise typer.BadParameter(f"{wrong[0]} says how to write a checkpoint; add -o OUT, or leave it out")
    if output is not None and (wrong := sorted(given & _OF_COMPARING)):
        raise typer.BadParameter(f"{wrong[0]} is of the comparison, which -o does not make; leave out one of them")


def _config(name: str, group_size: int | None, asymmetric: bool | None, skip: str | None) -> QuantConfig | None:
    """Flags about groups apply only to schemes with groups."""
    if name == NONE:
        return None
    grouped = SCHEMES[name].weight.is_regrouped
    return quant_config(name, group_size if grouped else None, asymmetric if grouped else None, skip, "--schemes")


def _result(
    model: Path,
    name: str,
    config: QuantConfig | None,
    sample: str | None,
    extent: tuple[int, int],
    dtype: str,
    cache_dir: Path | None,
    progress: Progress,
) -> SchemeResult:
    from llmc.compiler.config import CompileConfig
    from llmc.compiler.rounding import rounding_of

    rounding = rounding_of(
        CompileConfig(model=model, output=model, dtype=dtype, quant=config),
        lambda done, count: progress(f"{name}: round", done, count),
    )
    perplexity = None
    if sample is not None:
        perplexity = _perplexity(model, name, config, sample, extent, dtype, cache_dir, progress)
    groups = config.layers.describe().partition(" in ")[2] if config is not None else ""
    return SchemeResult(name, groups, rounding, perplexity)


def _perplexity(
    model: Path,
    name: str,
    config: QuantConfig | None,
    sample: str,
    extent: tuple[int, int],
    dtype: str,
    cache_dir: Path | None,
    progress: Progress,
) -> float:
    from llmc.compiler.config import CompileConfig
    from llmc.compiler.pipeline import compile_model
    from llmc.runtime.eval.perplexity import perplexity

    most, window = extent
    # One more position for the token that every request generates.
    context = -(-(window + 1) // 32) * 32
    with tempfile.TemporaryDirectory(prefix="llmc-quantize-") as folder:
        artifact = Path(folder) / name
        compiling = CompileConfig(
            model=model,
            output=artifact,
            buckets=f"prefill=[{_SEQS}]x[8],decode=[{_SEQS}]x[{context}]",
            dtype=dtype,
            max_num_seqs=_SEQS,
            quant=config,
            cache_dir=cache_dir,
        )
        compile_model(compiling, lambda phase, done, count: progress(f"{name}: {phase}", done, count))
        return perplexity(
            artifact,
            sample,
            window=window,
            max_tokens=most,
            on_window=lambda done, count: progress(f"{name}: score", done, count),
        ).perplexity


def _print_table(results: list[SchemeResult]) -> None:
    from rich.table import Table

    from llmc.cli.render.tables import print_table

    table = Table()
    for column in ("scheme", "groups", "bits a weight", "matrices, MiB", "error"):
        table.add_column(column, justify="left" if column in ("scheme", "groups") else "right")
    if any(r.perplexity is not None for r in results):
        table.add_column("perplexity", justify="right")
    for r in results:
        made = r.rounding
        row = [r.scheme, r.groups, f"{made.bits_per_weight:.2f}", f"{made.weight_bytes / (1 << 20):.1f}"]
        row.append(f"{made.error:.2%}")
        table.add_row(*row, *([f"{r.perplexity:.3f}"] if r.perplexity is not None else []))
    print_table(table)


def _print_layers(results: list[SchemeResult]) -> None:
    from rich.table import Table

    from llmc.cli.render.tables import print_table

    table = Table()
    for column in ("scheme", "weight", "rounded as", "error"):
        table.add_column(column)
    for r in results:
        for layer in r.rounding.layers:
            table.add_row(r.scheme, layer.name, layer.scheme, f"{layer.error:.2%}")
    print_table(table)
