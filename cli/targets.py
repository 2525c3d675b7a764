"""`llmc targets`: what models can be compiled for, and which ops, dtypes and schemes a target has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from llmc.compiler.targets.base import Target

_HELP = """List the targets of `llmc compile --target`, or what one of them has.

An op that a target has is computed for activations of some dtypes, by weights of some quantization schemes.

\b
Examples:
  llmc targets
  llmc targets native
  llmc targets cuda:sm_90 --json
"""


def register(app: typer.Typer) -> None:
    """Adds the command to the llmc application."""
    app.command("targets", help=_HELP)(targets)


def targets(
    name: str | None = typer.Argument(None, metavar="NAME", help="Target whose ops are listed; default: all targets."),
    as_json: bool = typer.Option(False, "--json", help="Print the targets as JSON on stdout."),
) -> None:
    from llmc.model_artifact import require_compiler

    require_compiler("llmc targets needs the compiler")
    from llmc.compiler.targets.base import TargetError
    from llmc.compiler.targets.registry import all_targets, resolve_target

    if name is None:
        found = [_described(target) for target in all_targets()]
        typer.echo(json.dumps(found, indent=2) if as_json else _listed(found))
        return
    try:
        target = resolve_target(name)
    except TargetError as error:
        raise typer.BadParameter(str(error)) from error
    from llmc.compiler.ops.abilities import abilities

    of_ops = abilities(target)
    if as_json:
        typer.echo(json.dumps({**_described(target), "ops": of_ops}, indent=2))
        return
    typer.echo(f"{_sentence(_described(target))}\n")
    typer.echo(_ops_text(of_ops))


def _described(target: Target) -> dict[str, Any]:
    return {
        "target": target.name,
        "kind": target.kind,
        "device": target.device,
        "level": target.level,
        "runs_here": target.runs_here(),
    }


def _sentence(one: dict[str, Any]) -> str:
    here = "this machine runs it" if one["runs_here"] else "this machine does not run it"
    return f"{one['target']}: for devices of kind {one['device']}, level {one['level']}; {here}"


def _listed(found: list[dict[str, Any]]) -> str:
    from llmc.cli.render.text_columns import table

    rows = [[one["target"], one["device"], one["level"], "yes" if one["runs_here"] else "no"] for one in found]
    return table(["target", "device", "level", "runs here"], rows)


def _ops_text(of_ops: dict[str, dict[str, list[str]]]) -> str:
    """A table of ops with equal answers for all their dtypes in one row, and what "all" means."""
    from llmc.cli.render.text_columns import table
    from llmc.quantize import SCHEMES

    rows = []
    for op, of_dtypes in of_ops.items():
        alike: dict[tuple[str, ...], list[str]] = {}
        for dtype, schemes in of_dtypes.items():
            alike.setdefault(tuple(schemes[1:]), []).append(dtype)
        for schemes_of, dtypes in alike.items():
            text = "all" if set(schemes_of) == set(SCHEMES) else ", ".join(schemes_of) or "–"
            rows.append([op, ", ".join(dtypes), text])
    return f"{table(['op', 'activations', 'quantized weights'], rows)}\n\nall: {', '.join(SCHEMES)}"
