"""`llmc cache why` and `diff`: which component of a key is another one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.compiler.cache import CacheError, Difference, GraphCache

from .cache_options import AsJson, CacheDir, open_cache, print_json
from .compile_options import CompileOptions, given_options
from .inspect import read_manifest
from .option_group import takes_option_groups

if TYPE_CHECKING:
    from llmc.compiler.config import CompileConfig


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


def _wanted_of_model(config: CompileConfig, cache: GraphCache) -> list[tuple[str, dict[str, str]]]:
    from llmc.compiler.wanted import wanted_entries

    return [(w.name, w.components) for w in wanted_entries(config, cache)]


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


@takes_option_groups
def why(
    context: typer.Context,
    subject: Annotated[Path, typer.Argument(metavar="ARTIFACT_OR_MODEL", help="An artifact or a model directory.")],
    options: CompileOptions,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Say for everything that is not cached which component differs from the nearest entry.

    Of a model directory: what llmc compile with the same options would look for.

    \b
    Examples:
      llmc cache why models/qwen2.5-0.5b
      llmc cache why models/qwen2.5-0.5b --quant w4a8 --buckets "prefill=[1]x[128],decode=[1,8]x[512]"
      llmc cache why qwen.llmc --json
    """
    cache = open_cache(cache_dir)
    if (subject / "manifest.json").is_file():
        for flag in given_options(context, ("subject", "cache_dir", "as_json")):
            raise typer.BadParameter(f"{flag} is fixed by the artifact {subject}: give its model directory to vary it")
        wanted = _wanted_of_artifact(subject)
    elif (subject / "config.json").is_file():
        config = options.config(subject, subject, needs="explaining a model needs the compiler")
        wanted = _wanted_of_model(config, cache)
    else:
        raise CacheError(f"{subject} is neither an artifact (manifest.json) nor a model directory (config.json)")
    answers = why_data(wanted, cache)
    if as_json:
        print_json(answers)
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
    from .cache_diff import compare, lines

    data = compare(a, b, open_cache(cache_dir))
    if as_json:
        print_json(data)
        return
    for line in lines(data, _difference):
        typer.echo(line)
