"""`llmc cache why` and `diff`: which component of a key has changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.options.cache import AsJson, CacheDir, open_cache, print_json
from llmc.cli.options.compile import CompileOptions, given_options
from llmc.cli.options.group import takes_option_groups
from llmc.cli.render.cache_reasons import missing_lines, shortened, why_data
from llmc.compiler.store.cache import CacheError, GraphCache
from llmc.manifest import read_manifest
from llmc.model_path import is_model

if TYPE_CHECKING:
    from llmc.compiler.config import CompileConfig


def _wanted_of_artifact(artifact: Path) -> list[tuple[str, dict[str, str]]]:
    return [(kernel["symbol"], kernel["components"]) for kernel in read_manifest(artifact).get("kernels") or []]


def _wanted_of_model(config: CompileConfig, cache: GraphCache) -> list[tuple[str, dict[str, str]]]:
    from llmc.compiler.wanted import wanted_entries

    return [(w.name, w.components) for w in wanted_entries(config, cache)]


@takes_option_groups
def why(
    context: typer.Context,
    subject: Annotated[Path, typer.Argument(metavar="ARTIFACT|MODEL", help="Artifact or model directory.")],
    options: CompileOptions,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """For everything that is not cached, show which component differs from the nearest entry.

    For a model directory, these are the entries that llmc compile with the same options would need.

    \b
    Examples:
      llmc cache why models/qwen2.5-0.5b
      llmc cache why models/qwen2.5-0.5b --quant w4a8 --buckets "prefill=[1]x[128],decode=[1,8]x[512]"
      llmc cache why models/qwen2.5-0.5b --target x86-64-v3
      llmc cache why qwen.llmc --json
    """
    cache = open_cache(cache_dir)
    if (subject / "manifest.json").is_file():
        for flag in given_options(context, ("subject", "cache_dir", "as_json")):
            raise typer.BadParameter(f"{flag} is fixed by the artifact {subject}: give its model directory to vary it")
        wanted, target = _wanted_of_artifact(subject), ""
    elif is_model(subject):
        config = options.config(subject, subject, needs="explaining a model needs the compiler")
        from llmc.compiler.targets.registry import resolve_target

        wanted, target = _wanted_of_model(config, cache), resolve_target(config.target).name
    else:
        raise CacheError(
            f"{subject} is neither an artifact (manifest.json) nor a model (config.json, or a .gguf or .onnx file)"
        )
    answers = why_data(wanted, cache, target)
    if as_json:
        print_json(answers)
        return
    cached = sum(answer["cached"] for answer in answers)
    typer.echo(f"{cached} of {len(answers)} entries are in the cache {cache.root}")
    for line in missing_lines(answers):
        typer.echo(line)


def diff(
    a: Annotated[str, typer.Argument(metavar="OLD", help="Artifact, or an entry by its key or first digits.")],
    b: Annotated[str, typer.Argument(metavar="NEW", help="Artifact or entry to compare with, of the same kind.")],
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

    data = compare(a, b, open_cache(cache_dir))
    if as_json:
        print_json(data)
        return
    for line in lines(data, shortened):
        typer.echo(line)
