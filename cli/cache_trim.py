"""`llmc cache verify` and `gc`: remove entries from the cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from llmc.cli.options.cache import AsJson, CacheDir, open_cache, print_json
from llmc.compiler.store.collect import collect
from llmc.units import format_bytes, parse_age, parse_size


def verify(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """Read every entry and drop the damaged ones; exit code 1 if there were any.

    \b
    Examples:
      llmc cache verify
    """
    report = open_cache(cache_dir).verify()
    if as_json:
        print_json(asdict(report))
    else:
        typer.echo(f"{report.checked} entries checked, {len(report.damaged)} damaged and dropped")
        for key in report.damaged:
            typer.echo(f"  {key}")
        if report.unreadable:
            typer.echo(f"{len(report.unreadable)} cannot be read, nor removed; see to the disk or their permissions")
            for key in report.unreadable:
                typer.echo(f"  {key}")
    if report.damaged or report.unreadable:
        raise typer.Exit(1)


def gc(
    max_size: Annotated[str | None, typer.Option(help="Total size to keep, such as 500M.")] = None,
    older_than: Annotated[str | None, typer.Option(help="Remove everything unused for this time, such as 30d.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove the least recently used entries and artifacts; artifacts that a process uses stay.

    \b
    Examples:
      llmc cache gc --max-size 2G
      llmc cache gc --older-than 30d --dry-run
    """
    if max_size is None and older_than is None:
        raise typer.BadParameter("say what to remove: --max-size, --older-than or both")
    report = collect(
        open_cache(cache_dir),
        parse_size(max_size) if max_size is not None else None,
        parse_age(older_than) if older_than is not None else None,
        dry_run,
    )
    if as_json:
        print_json({**asdict(report), "dry_run": dry_run})
        return
    verb = "would remove" if dry_run else "removed"
    typer.echo(
        f"{verb} {len(report.removed)} entries, {format_bytes(report.freed_bytes)}; "
        f"{report.kept} left, {format_bytes(report.kept_bytes)}"
    )
