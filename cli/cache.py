"""`llmc cache`: the cache of compiled kernels and graphs."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from llmc.cli.inspect import human_bytes, read_manifest, table
from llmc.compiler.cache import CacheError, Difference, Entry, GraphCache, cache_root

CacheDir = Annotated[Path | None, typer.Option("--cache-dir", help="Default: $LLMC_CACHE_DIR or ~/.cache/llmc.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", re.IGNORECASE)
_AGE_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

_HELP = """List, explain, check and trim the cache of compiled kernels.

\b
Examples:
  llmc cache ls
  llmc cache why models/qwen2.5-0.5b
  llmc cache diff old.llmc new.llmc
  llmc cache gc --max-size 2G
"""

cache_app = typer.Typer(no_args_is_help=True, help=_HELP)


def parse_size(text: str) -> int:
    """Bytes of `500M`, `2GiB`, `1024`; units are powers of 1024. Raises typer.BadParameter."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise typer.BadParameter(f"{text!r} is not a size; write bytes or a number with K, M, G or T, as in 500M")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def parse_age(text: str) -> float:
    """Seconds of `30d`, `12h`, `90m`, `60s`, `2w`. Raises typer.BadParameter."""
    match = _AGE.fullmatch(text.strip())
    if not match:
        raise typer.BadParameter(f"{text!r} is not an age; write a number with s, m, h, d or w, as in 30d")
    return float(match[1]) * _AGE_SECONDS[match[2].lower()]


def _open(cache_dir: Path | None) -> GraphCache:
    return GraphCache(cache_root(cache_dir))


def _print_json(data: object) -> None:
    typer.echo(json.dumps(data, indent=2))


def _age(entry: Entry) -> str:
    seconds = max(0.0, time.time() - entry.last_used)
    for unit in ("w", "d", "h", "m"):
        if seconds >= _AGE_SECONDS[unit]:
            return f"{seconds / _AGE_SECONDS[unit]:.0f}{unit} ago"
    return f"{seconds:.0f}s ago"


def _label(entry: Entry) -> str:
    for name in ("symbol", "bucket", "name"):
        if isinstance(entry.meta.get(name), str):
            return str(entry.meta[name])
    return entry.components.get("op", "-")


@cache_app.command("ls")
def ls(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """List the entries.

    \b
    Examples:
      llmc cache ls
      llmc cache ls --json --cache-dir /var/cache/llmc
    """
    cache = _open(cache_dir)
    entries = cache.entries()
    if as_json:
        _print_json({"directory": str(cache.root), "entries": [asdict(e) for e in entries]})
        return
    total = human_bytes(sum(e.file_bytes for e in entries))
    typer.echo(f"{cache.root}: {len(entries)} entries, {total}")
    if entries:
        rows = [(e.key[:16], e.components.get("kind", "-"), _label(e), e.file_bytes, _age(e)) for e in entries]
        typer.echo(table(("key", "kind", "what", "bytes", "used"), rows))


@cache_app.command("show")
def show(
    key: Annotated[str, typer.Argument(help="A key or its first digits.")],
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what an entry's key is made of.

    \b
    Examples:
      llmc cache show 7c351fac
    """
    cache = _open(cache_dir)
    entry = cache.entry(cache.resolve(key))
    if entry is None:
        raise CacheError(f"cache entry {key} is damaged; `llmc cache verify` drops it")
    if as_json:
        _print_json(asdict(entry))
        return
    typer.echo(f"{entry.key}\n{human_bytes(entry.payload_bytes)}, used {_age(entry)}\ncomponents")
    typer.echo(table(("name", "value"), sorted(entry.components.items())))
    if entry.meta:
        typer.echo("meta\n" + table(("name", "value"), [(k, json.dumps(v)) for k, v in sorted(entry.meta.items())]))


def _wanted_of_artifact(artifact: Path) -> list[tuple[str, dict[str, str]]]:
    listed = read_manifest(artifact).get("kernels")
    wanted = []
    try:
        for kernel in listed or []:
            components = kernel["components"]
            if not isinstance(components, dict):
                raise TypeError
            wanted.append((str(kernel["symbol"]), {str(k): str(v) for k, v in components.items()}))
    except (TypeError, KeyError):
        raise CacheError(
            f"{artifact / 'manifest.json'} has no valid list of kernels; compile the model again"
        ) from None
    return wanted


def _wanted_of_model(model: Path, cache: GraphCache) -> list[tuple[str, dict[str, str]]]:
    try:
        from llmc.compiler.config import CompileConfig
        from llmc.compiler.wanted import wanted_entries

        found = wanted_entries(CompileConfig(model=model, output=model), cache)
    except ModuleNotFoundError as error:
        raise CacheError(
            f"explaining a model needs the compiler ({error.name} is missing): pip install 'llmc[compiler]'"
        ) from None
    return [(w.name, w.components) for w in found]


def why_data(wanted: list[tuple[str, dict[str, str]]], cache: GraphCache) -> list[dict[str, Any]]:
    """For each (name, components): its key, whether it is cached, and else the nearest entry and what differs."""
    entries = cache.entries()
    keys = {e.key for e in entries}
    answers = []
    for name, components in wanted:
        key = cache.key_of(components)
        answer: dict[str, Any] = {"name": name, "key": key, "cached": key in keys, "nearest": None, "differences": []}
        nearest = None if key in keys else cache.why(components, entries)
        if nearest is not None:
            answer["nearest"] = nearest.entry.key
            answer["differences"] = [asdict(d) for d in nearest.differences]
        answers.append(answer)
    return answers


def _short(value: str | None) -> str:
    if value is None:
        return "(absent)"
    return value if len(value) <= 60 else f"{value[:57]}…"


def _difference(old: str | None, new: str | None) -> tuple[str, str]:
    """Both values, cut to where they begin to differ."""
    if old and new and max(len(old), len(new)) > 60:
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        start = max(0, same - 20)
        if start:
            return f"…{_short(old[start:])}", f"…{_short(new[start:])}"
    return _short(old), _short(new)


@cache_app.command("why")
def why(
    subject: Annotated[Path, typer.Argument(metavar="ARTIFACT_OR_MODEL", help="An artifact or a model directory.")],
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Say for everything that is not cached which component differs from the nearest entry.

    \b
    Examples:
      llmc cache why models/qwen2.5-0.5b
      llmc cache why qwen.llmc --json
    """
    cache = _open(cache_dir)
    if (subject / "manifest.json").is_file():
        wanted = _wanted_of_artifact(subject)
    elif (subject / "config.json").is_file():
        wanted = _wanted_of_model(subject, cache)
    else:
        raise CacheError(f"{subject} is neither an artifact (manifest.json) nor a model directory (config.json)")
    answers = why_data(wanted, cache)
    if as_json:
        _print_json(answers)
        return
    missing = [a for a in answers if not a["cached"]]
    typer.echo(f"{len(answers) - len(missing)} of {len(answers)} entries are in the cache {cache.root}")
    for answer in missing:
        if answer["nearest"] is None:
            typer.echo(f"{answer['name']}: not cached, and the cache is empty")
            continue
        typer.echo(f"{answer['name']}: not cached; nearest is {answer['nearest'][:16]}, which differs in")
        for d in (Difference(**d) for d in answer["differences"]):
            old, new = _difference(d.old, d.new)
            typer.echo(f"    {d.name}: {old} → {new}")


@cache_app.command("diff")
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="An artifact, or the key of an entry or its first digits.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with, of the same kind.")],
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Say in which components of their keys two artifacts or entries differ, from what to what.

    \b
    Examples:
      llmc cache diff old.llmc new.llmc
      llmc cache diff 7c351fac 91d0e2 --json
    """
    from llmc.cli.cache_diff import compare, lines

    data = compare(a, b, _open(cache_dir))
    if as_json:
        _print_json(data)
        return
    for line in lines(data, _difference):
        typer.echo(line)


@cache_app.command("verify")
def verify(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """Read every entry and drop the damaged ones; exit code 1 if there were any.

    \b
    Examples:
      llmc cache verify
    """
    report = _open(cache_dir).verify()
    if as_json:
        _print_json(asdict(report))
    else:
        typer.echo(f"{report.checked} entries checked, {len(report.damaged)} damaged and dropped")
        for key in report.damaged:
            typer.echo(f"  {key}")
    if report.damaged:
        raise typer.Exit(1)


@cache_app.command("gc")
def gc(
    max_size: Annotated[str | None, typer.Option(help="Keep at most this much, as in 500M.")] = None,
    older_than: Annotated[str | None, typer.Option(help="Remove what was not used for so long, as in 30d.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove the least recently used entries.

    \b
    Examples:
      llmc cache gc --max-size 2G
      llmc cache gc --older-than 30d --dry-run
    """
    if max_size is None and older_than is None:
        raise typer.BadParameter("say what to remove: --max-size, --older-than or both")
    report = _open(cache_dir).gc(
        parse_size(max_size) if max_size is not None else None,
        parse_age(older_than) if older_than is not None else None,
        dry_run,
    )
    if as_json:
        _print_json({**asdict(report), "dry_run": dry_run})
        return
    verb = "would remove" if dry_run else "removed"
    typer.echo(
        f"{verb} {len(report.removed)} entries, {human_bytes(report.freed_bytes)}; "
        f"{report.kept} left, {human_bytes(report.kept_bytes)}"
    )


@cache_app.command("export")
def export(
    archive: Annotated[Path, typer.Argument(help="Tar file to write.")],
    keys: Annotated[list[str] | None, typer.Argument(help="Keys or their first digits; default: all.")] = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Write entries to an archive for another machine.

    \b
    Examples:
      llmc cache export kernels.tar
      llmc cache export some.tar 7c351fac 91d0e2
    """
    cache = _open(cache_dir)
    count = cache.export([cache.resolve(k) for k in keys] if keys else None, archive)
    if as_json:
        _print_json({"archive": str(archive), "exported": count})
    else:
        typer.echo(f"{count} entries written to {archive}")


@cache_app.command("import")
def import_(
    archive: Annotated[Path, typer.Argument(help="Tar file made by llmc cache export.")],
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Add the entries of an archive.

    \b
    Examples:
      llmc cache import kernels.tar
    """
    report = _open(cache_dir).import_(archive)
    if as_json:
        _print_json(asdict(report))
    else:
        typer.echo(f"{len(report.added)} entries added, {len(report.present)} were there already")


def register(app: typer.Typer) -> None:
    """Add `cache` to the command line."""
    app.add_typer(cache_app, name="cache")
