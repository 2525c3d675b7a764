"""Options and helpers shared by the subcommands of `llmc cache`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from llmc.cache_root import cache_root
from llmc.compiler.store.cache import GraphCache
from llmc.units import AGE_SECONDS

CacheDir = Annotated[
    Path | None, typer.Option("--cache-dir", metavar="DIR", help="Default: $LLMC_CACHE_DIR or ~/.cache/llmc.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def open_cache(cache_dir: Path | None) -> GraphCache:
    """The cache in `cache_dir`; None: at the default place."""
    return GraphCache(cache_root(cache_dir))


def print_json(data: object) -> None:
    """Prints indented JSON on stdout."""
    typer.echo(json.dumps(data, indent=2))


def age(last_used: float) -> str:
    """Time since `last_used` (seconds since the epoch), as in `3h ago`."""
    seconds = max(0.0, time.time() - last_used)
    for unit in ("w", "d", "h", "m"):
        if seconds >= AGE_SECONDS[unit]:
            return f"{seconds / AGE_SECONDS[unit]:.0f}{unit} ago"
    return f"{seconds:.0f}s ago"
