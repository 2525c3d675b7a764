"""`llmc cache export` and `import`: share entries with other machines, in an archive or a directory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from llmc.cli.options.cache import AsJson, CacheDir, open_cache, print_json
from llmc.compiler.store.cache import GraphCache, ImportReport


def export(
    archive: Annotated[Path, typer.Argument(help="Tar file to write, or an existing shared directory.")],
    keys: Annotated[list[str] | None, typer.Argument(help="Keys or their first digits; default: all.")] = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Write entries to an archive for another machine, or add them to a directory that machines share.

    A shared directory is a cache, too: many processes may add to it and read from it at any time. Entries contain
    machine code: whoever may write to the directory can run programs on each of those machines.

    \b
    Examples:
      llmc cache export kernels.tar
      llmc cache export some.tar 7c351fac 91d0e2
      llmc cache export /mnt/shared/llmc/
    """
    cache = open_cache(cache_dir)
    chosen = [cache.resolve(k) for k in keys] if keys else None
    if archive.is_dir():
        _print_report(GraphCache(archive).copy_from(cache, chosen), as_json)
        return
    count = cache.export(chosen, archive)
    if as_json:
        print_json({"archive": str(archive), "exported": count})
    else:
        typer.echo(f"{count} entries written to {archive}")


def import_(
    archive: Annotated[Path, typer.Argument(help="Tar file or shared directory that llmc cache export wrote.")],
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Add the entries of an archive or of a shared directory.

    Entries hold machine code that compiled artifacts run: import only what you trust as much as a program.

    \b
    Examples:
      llmc cache import kernels.tar
      llmc cache import /mnt/shared/llmc/
    """
    cache = open_cache(cache_dir)
    report = cache.copy_from(GraphCache(archive)) if archive.is_dir() else cache.import_(archive)
    _print_report(report, as_json)


def _print_report(report: ImportReport, as_json: bool) -> None:
    if as_json:
        print_json(asdict(report))
    else:
        typer.echo(f"{len(report.added)} entries added, {len(report.present)} were there already")
