"""Location of llmc's cache: compiled graphs and measured costs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root(explicit: str | os.PathLike[str] | None = None) -> Path:
    """The cache directory: `explicit`, else $LLMC_CACHE_DIR, else $XDG_CACHE_HOME/llmc, else ~/.cache/llmc."""
    if explicit is not None:
        return Path(explicit)
    if own := os.environ.get("LLMC_CACHE_DIR"):
        return Path(own)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    if os.path.isabs(xdg):
        return Path(xdg) / "llmc"
    return Path(os.path.expanduser("~")) / ".cache" / "llmc"


def cost_folder(explicit: Path | None = None) -> Path:
    """Directory of cost tables: `explicit`, or `costs` in the cache directory."""
    return cache_root() / "costs" if explicit is None else explicit
