"""Checks the installation: llmc, its library, the compiler, the cache's location, and whether a port is free."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmc.cache_root import cache_root
from llmc.distribution import install_compiler, name_clash
from llmc.runtime.binding.library import library_candidates
from llmc.runtime.doctor.check import Check
from llmc.version import __version__

COMPILER = {"torch": "torch", "TVM": "apache-tvm", "transformers": "transformers"}
"""Distributions that compile models, by common name."""


def installed_checks(port: int) -> Iterator[Check]:
    """Versions, compile cache, and server port. Imports nothing of the compiler."""
    yield Check("llmc", f"{__version__}, Python {platform.python_version()}", name_clash())
    yield Check("library", str(next((path for path in library_candidates() if path.is_file()), "not found")))
    yield _compiler()
    yield _cache(cache_root())
    yield _port(port)


def _compiler() -> Check:
    found, missing = [], []
    for name, distribution in COMPILER.items():
        try:
            found.append(f"{name} {version(distribution)}")
        except PackageNotFoundError:
            missing.append(name)
    if not missing:
        return Check("compiler", ", ".join(found))
    value = f"{', '.join(found)}; without {', '.join(missing)}" if found else "not installed"
    return Check("compiler", value, f"only artifacts can be run; to compile models: {install_compiler()}")


def _cache(folder: Path) -> Check:
    made = folder
    while not made.exists() and made != made.parent:
        made = made.parent
    advice = None
    if not os.access(made, os.W_OK):
        advice = f"{made} cannot be written, so compiled kernels are lost: set LLMC_CACHE_DIR to a directory that can"
    return Check("compile cache", str(folder), advice)


def _port(port: int) -> Check:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(
                "port", f"{port} is taken", f"{error.strerror}: serve on another with --port, or pass one here"
            )
    return Check("port", f"{port} is free")
