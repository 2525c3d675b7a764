"""`llmc doctor`: describes this machine, and what would make it serve faster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from llmc.runtime.doctor.check import Check

_HELP = """Show what llmc finds on this machine, and what would make llmc faster here.

The command checks the CPU and its limits (measured for 2 seconds), memory, installed packages, and a server's port. It
changes nothing.

\b
Examples:
  llmc doctor
  llmc doctor --no-measure --json
  llmc doctor --port 9000
"""


def register(app: typer.Typer) -> None:
    """Adds the command to the llmc application."""
    app.command("doctor", help=_HELP)(doctor)


def doctor(
    port: int = typer.Option(8000, "--port", metavar="N", min=1, max=65535, help="Port to check for a server."),
    measure: bool = typer.Option(
        True, "--measure/--no-measure", help="Measure the machine's limits, which takes 2 seconds."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON on stdout."),
) -> None:
    if as_json:
        found = [{"name": c.name, "value": c.value, "advice": c.advice} for c in _checks(port, measure)]
        typer.echo(json.dumps(found, indent=2))
        return
    advice = []
    for check in _checks(port, measure):
        typer.echo(f"{check.name:20}{check.value}")
        if check.advice is not None:
            advice.append(f"{check.name}: {check.advice}")
    typer.echo()
    if not advice:
        typer.echo("Nothing to change.")
        return
    typer.echo("To change:")
    for number, text in enumerate(advice, 1):
        typer.echo(f"  {number}. {text}")


def _checks(port: int, measure: bool) -> Iterator[Check]:
    from llmc.runtime.doctor.installed import installed_checks
    from llmc.runtime.doctor.measured_limits import measured_limits
    from llmc.runtime.doctor.processor import processor_checks
    from llmc.runtime.doctor.system import system_checks

    yield from processor_checks()
    yield from system_checks()
    if measure:
        yield from measured_limits()
    yield from installed_checks(port)
