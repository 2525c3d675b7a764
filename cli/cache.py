"""`llmc cache`: the cache of compiled kernels, graphs and artifacts."""

from __future__ import annotations

from collections.abc import Callable

import typer

from llmc.cli import cache_list, cache_share, cache_trim, cache_why

_HELP = """List, explain, check and trim the cache of compiled kernels, graphs and artifacts.

\b
Examples:
  llmc cache ls
  llmc cache why models/qwen2.5-0.5b
  llmc cache diff old.llmc new.llmc
  llmc cache gc --max-size 2G
"""


def register(app: typer.Typer) -> None:
    """Add `cache` to the command line."""
    cache_app = typer.Typer(no_args_is_help=True, help=_HELP)
    commands: dict[str, Callable[..., None]] = {
        "ls": cache_list.ls,
        "show": cache_list.show,
        "why": cache_why.why,
        "diff": cache_why.diff,
        "verify": cache_trim.verify,
        "gc": cache_trim.gc,
        "export": cache_share.export,
        "import": cache_share.import_,
    }
    for name, command in commands.items():
        cache_app.command(name)(command)
    app.add_typer(cache_app, name="cache")
