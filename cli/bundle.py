"""`llmc bundle`: graphs and kernels of an artifact in one file, for all fine-tunes of its architecture."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.cli.options.artifact_checks import check_opens
from llmc.units import format_bytes

if TYPE_CHECKING:
    from llmc.compiler.store.bundle import Bundle

_HELP = """Pack everything of an artifact except its weights into one file: graphs, kernels for one or several CPUs,
costs.

With a bundle, a fine-tune of the same architecture becomes an artifact without compiling: only its weights are packed.
A bundle contains machine code: use only bundles that you trust as much as a program.

\b
Examples:
  llmc bundle create qwen.llmc qwen-v3.llmc -o qwen.bundle
  llmc bundle inspect qwen.bundle
  llmc bundle apply qwen.bundle models/my-fine-tune -o mine.llmc
"""

bundle_app = typer.Typer(no_args_is_help=True, help=_HELP)


@bundle_app.command("create")
def create(
    artifacts: list[Path] = typer.Argument(
        ..., metavar="ARTIFACT…", help="Artifacts of one architecture, each for another target."
    ),
    output: Path = typer.Option(..., "-o", "--output", metavar="FILE", help="Bundle to write."),
    costs: bool = typer.Option(True, help="Include the measured costs of these artifacts."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
) -> None:
    """Write a bundle of artifacts.

    \b
    Examples:
      llmc bundle create qwen.llmc -o qwen.bundle
      llmc bundle create qwen-v3.llmc qwen-znver4.llmc -o qwen.bundle --no-costs
    """
    from llmc.cache_root import cost_folder
    from llmc.compiler.store.bundle import create_bundle

    bundle = create_bundle(artifacts, output, cost_folder() if costs else None)
    _show(bundle, as_json)


@bundle_app.command("inspect")
def inspect(
    bundle: Path = typer.Argument(..., metavar="BUNDLE", help="File that llmc bundle create wrote."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout."),
) -> None:
    """Show the content of a bundle, and compare every file with its hash.

    \b
    Examples:
      llmc bundle inspect qwen.bundle --json
    """
    from llmc.compiler.store.bundle import read_bundle

    found = read_bundle(bundle)
    for variant in found.variants:
        for name in variant.sha256:
            found.read(variant, name)
    _show(found, as_json)


@bundle_app.command("apply")
def apply(
    bundle: Path = typer.Argument(..., metavar="BUNDLE", help="File that llmc bundle create wrote."),
    model: Path = typer.Argument(
        ..., metavar="MODEL", help="Directory with config.json and safetensors, .gguf file, or ORG/NAME of the hub."
    ),
    output: Path = typer.Option(..., "-o", "--output", metavar="OUT", help="Artifact directory to write."),
    target: str = typer.Option(
        "native", metavar="NAME", help="CPU to choose; native: the best in the bundle for this machine."
    ),
    jobs: int = typer.Option(0, min=0, metavar="N", help="Threads that pack weights; 0: one per CPU."),
    tokenizer: bool = typer.Option(True, "--tokenizer/--no-tokenizer", help="As in llmc compile."),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace OUT even if it is of another model or other options."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON on stdout."),
) -> None:
    """Make an artifact of a fine-tune; nothing is compiled.

    The artifact runs the bundle's machine code: use only a bundle that you trust as much as a program.

    \b
    Examples:
      llmc bundle apply qwen.bundle models/my-fine-tune -o mine.llmc
    """
    _require("ml_dtypes")
    from llmc.cache_root import cost_folder
    from llmc.cli.render.compile_progress import progress_bar
    from llmc.compiler.bundle_apply import apply_bundle
    from llmc.compiler.store.bundle import read_bundle

    found = read_bundle(bundle)
    with progress_bar() as progress:
        report = apply_bundle(
            found, model, output, target=target, jobs=jobs or len(os.sched_getaffinity(0)),
            cost_folder=cost_folder(), tokenizer="required" if tokenizer else "none", overwrite=overwrite,
            progress=progress,
        )  # fmt: skip
    check_opens(report.artifact)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
        return
    seconds = sum(report.phase_seconds.values())
    print(
        f"{report.artifact}: {report.num_graphs} graphs and {report.num_kernels} kernels for {report.target}, weights "
        f"of {format_bytes(report.weight_bytes)} packed in {seconds:.2f} s; {report.costs} cost tables taken over"
    )


def _require(module: str) -> None:
    from importlib.util import find_spec

    from llmc import ModelPathError

    if find_spec(module) is None:
        raise ModelPathError(f"packing weights needs {module}, which is not installed: pip install {module}")


def _show(bundle: Bundle, as_json: bool) -> None:
    data = _data(bundle)
    if as_json:
        print(json.dumps(data, indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from llmc.cli.render.console import Console
    from llmc.cli.render.tables import print_table

    console = Console(file=sys.stdout, highlight=False)
    console.print(f"{bundle.path}: {format_bytes(data['bytes'])}, fingerprint {bundle.fingerprint}", soft_wrap=True)
    model = data["architecture"]
    console.print(
        f"{model['model_type']}, {model['num_layers']} layers of {model['hidden_size']}, vocabulary of "
        f"{model['vocab_size']:,}; {data['act_dtype']}, max-model-len {data['max_model_len']}"
        + (f"; {data['quantization']}" if data["quantization"] else ""),
        soft_wrap=True,
    )
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("target", "level", "graphs", "kernels", "code"):
        table.add_column(name, justify="left" if name == "target" else "right")
    for one in data["variants"]:
        table.add_row(one["target"], str(one["level"]), str(len(one["buckets"])), str(one["kernels"]),
                      format_bytes(one["code_bytes"]))  # fmt: skip
    print_table(table, console)
    for cost in data["costs"]:
        console.print(f"{cost['buckets']} costs of {cost['processor']}, {cost['threads']} threads", soft_wrap=True)


def _data(bundle: Bundle) -> dict[str, Any]:
    facts = bundle.architecture
    return {
        "path": str(bundle.path),
        "bytes": bundle.path.stat().st_size,
        "fingerprint": bundle.fingerprint,
        "llmc_version": bundle.llmc_version,
        "architecture": json.loads(facts["architecture"]),
        "act_dtype": facts["act_dtype"],
        "max_model_len": int(facts["max_model_len"]),
        "quantization": facts.get("quantization"),
        "variants": [
            {
                "target": v.resolved.target.name,
                "level": v.resolved.target.level,
                "buckets": [str(bucket) for bucket in v.described.buckets],
                "kernels": len(v.described.kernels),
                "code_bytes": v.file_bytes["kernels.so"],
            }
            for v in bundle.variants
        ],
        "costs": [
            {
                "processor": table.machine.get("processor", "an unnamed CPU"),
                "threads": table.machine.get("threads", "?"),
                "buckets": len(table.buckets),
            }
            for table in bundle.costs
        ],
    }


def register(app: typer.Typer) -> None:
    """Adds `bundle` to the command line."""
    app.add_typer(bundle_app, name="bundle")
