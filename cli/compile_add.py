"""`llmc compile ARTIFACT --add BUCKET`: adds one graph to an artifact and changes nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.buckets import Bucket, BucketError
from llmc.cli.options.artifact_checks import check_opens
from llmc.cli.options.compile import given_options
from llmc.units import format_bytes

if TYPE_CHECKING:
    from llmc.compiler.extend import AddReport

_TAKEN = frozenset({"model", "output", "add", "jobs", "cache_dir", "overwrite", "dump", "as_json"})


def add_command(
    context: typer.Context, artifact: Path, output: Path | None, add: Sequence[str], jobs: int, cache_dir: Path | None,
    overwrite: bool, dump: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Raises BadParameter for an invalid bucket, and for flags that only a whole compilation accepts."""
    buckets = parse_buckets(add)
    for flag in given_options(context, _TAKEN):
        raise typer.BadParameter(f"{flag} is fixed by the artifact: --add takes none of it")
    if not (artifact / "graphs.bin").is_file():
        raise typer.BadParameter(f"{artifact} is not an artifact: --add extends what llmc compile has written")
    from llmc.model_artifact import require_compiler

    require_compiler("llmc compile --add needs the compiler")
    from llmc.cli.render.compile_progress import progress_bar
    from llmc.compiler.extend import add_buckets

    with progress_bar() as progress:
        report = add_buckets(
            artifact, buckets, output, cache_dir=cache_dir, jobs=jobs, overwrite=overwrite, dump=dump, progress=progress
        )
    check_opens(report.artifact)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _print(report)


def parse_buckets(texts: Sequence[str]) -> list[Bucket]:
    """Raises BadParameter for an invalid bucket."""
    try:
        return [Bucket.parse(text) for text in texts]
    except BucketError as error:
        raise typer.BadParameter(f"--add: {error}") from error


def _print(report: AddReport) -> None:
    from llmc.cli.render.console import Console

    console = Console(file=sys.stdout, highlight=False)
    for bucket in report.present:
        console.print(f"{bucket} is in {report.artifact} already", soft_wrap=True)
    if not report.added:
        return
    seconds = sum(report.phase_seconds.values())
    console.print(f"{report.artifact}: added {', '.join(report.added)} in {seconds:.2f} s", soft_wrap=True)
    console.print(
        f"{report.num_graphs} graphs; {report.kernels_added} new kernels, {report.kernels_compiled} compiled; code "
        f"{format_bytes(report.code_bytes)}, arena {format_bytes(report.arena_bytes)}; weights {report.weights}",
        soft_wrap=True,
    )
