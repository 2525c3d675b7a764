"""`llmc cache ls` and `show`: contents of the cache."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from llmc.cli.options.cache import AsJson, CacheDir, age, open_cache, print_json
from llmc.cli.render.text_columns import table
from llmc.compiler.store.cache import CacheError, Entry
from llmc.compiler.store.cached_artifacts import cached_artifacts
from llmc.units import format_bytes


def ls(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """List the entries.

    \b
    Examples:
      llmc cache ls
      llmc cache ls --json --cache-dir /var/cache/llmc
    """
    cache = open_cache(cache_dir)
    entries, artifacts = cache.entries(), cached_artifacts(cache.root)
    if as_json:
        listed = [{**asdict(a), "path": str(a.path)} for a in artifacts]
        print_json({"directory": str(cache.root), "entries": [asdict(e) for e in entries], "artifacts": listed})
        return
    total = format_bytes(sum(e.file_bytes for e in entries))
    compiled = format_bytes(sum(a.file_bytes for a in artifacts))
    typer.echo(f"{cache.root}: {len(entries)} entries, {total}; {len(artifacts)} artifacts, {compiled}")
    rows = [(e.key[:16], e.components.get("kind", "-"), _label(e), e.file_bytes, age(e.last_used)) for e in entries]
    rows += [(a.key[:16], "artifact", "a model directory", a.file_bytes, age(a.last_used)) for a in artifacts]
    if rows:
        typer.echo(table(("key", "kind", "what", "bytes", "used"), rows))


def show(
    key: Annotated[str, typer.Argument(help="Key of an entry, or its first digits.")],
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what an entry's key is made of.

    \b
    Examples:
      llmc cache show 7c351fac
    """
    cache = open_cache(cache_dir)
    entry = cache.entry(cache.resolve(key))
    if entry is None:
        raise CacheError(f"cache entry {key} is damaged; `llmc cache verify` drops it")
    if as_json:
        print_json(asdict(entry))
        return
    typer.echo(f"{entry.key}\n{format_bytes(entry.payload_bytes)}, used {age(entry.last_used)}\ncomponents")
    typer.echo(table(("name", "value"), sorted(entry.components.items())))
    if entry.meta:
        typer.echo("meta\n" + table(("name", "value"), [(k, json.dumps(v)) for k, v in sorted(entry.meta.items())]))


def _label(entry: Entry) -> str:
    for name in ("symbol", "bucket", "name"):
        if isinstance(entry.meta.get(name), str):
            return str(entry.meta[name])
    return entry.components.get("op", "-")
