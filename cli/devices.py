"""`llmc devices`: devices on which this machine can run artifacts."""

from __future__ import annotations

import json
from typing import Any

import typer

_HELP = """List the devices that run artifacts here, and what they can do.

Each artifact needs a device of one kind, with a minimal level: see `llmc inspect`.

\b
Examples:
  llmc devices
  llmc devices --json
"""


def register(app: typer.Typer) -> None:
    """Adds the command to the llmc application."""
    app.command("devices", help=_HELP)(devices)


def devices(as_json: bool = typer.Option(False, "--json", help="Print the devices as JSON on stdout.")) -> None:
    from llmc.cli.render.this_device import lacks
    from llmc.runtime.binding.devices import Device, device_kinds
    from llmc.runtime.binding.handle import LlmcError

    found: list[dict[str, Any]] = []
    for kind in device_kinds():
        about = {"kind": kind.name, "summary": kind.summary}
        try:
            with Device(kind.name) as device:
                found.append({**about, "facts": device.facts, "error": None})
        except LlmcError as error:
            found.append({**about, "facts": {}, "error": str(error)})
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for number, one in enumerate(found):
        if number:
            typer.echo()
        typer.echo(f"{one['kind']}: {one['summary']}")
        facts = one["facts"] if one["error"] is None else {"cannot be opened": one["error"]}
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            typer.echo(f"  {name:{width}}  {value}")
        for said in lacks(facts):
            typer.echo(f"  {said}")
