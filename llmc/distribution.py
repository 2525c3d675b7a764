"""The name of this project's distribution. Package and command are `llmc`, a name that on PyPI belongs to another
project.

It imports nothing heavy and only looks at file names: it runs at every start of the command.
"""

from __future__ import annotations

import os
import sys

NAME = "llmc-aot"
_OTHER = "llmc"
_CPU_TORCH = "https://download.pytorch.org/whl/cpu"


def install_compiler() -> str:
    """Command that installs the compiler. It installs torch without CUDA, which takes gigabytes and is not used."""
    return f"pip install '{NAME}[compiler]' --extra-index-url {_CPU_TORCH}"


def install_extra(name: str) -> str:
    """Command that installs an optional part."""
    return f"pip install '{NAME}[{name}]'"


def name_clash() -> str | None:
    """One sentence if PyPI's distribution `llmc`, another project with the same import name, is also installed."""
    for folder in sys.path:
        if folder.endswith("-packages") and _has_other(folder):
            return (
                f"PyPI's {_OTHER} is another project and overwrites files of {NAME} in {folder}: pip uninstall "
                f"{_OTHER}, then pip install --force-reinstall --no-deps {NAME}"
            )
    return None


def _has_other(folder: str) -> bool:
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    for name in names:
        if name.startswith(f"{_OTHER}-") and name.endswith(".dist-info"):
            try:
                with open(os.path.join(folder, name, "RECORD"), encoding="utf-8") as record:
                    # Only the owner of that file conflicts; an editable install does not own it.
                    if any(line.startswith(f"{_OTHER}/__init__.py,") for line in record):
                        return True
            except (OSError, UnicodeDecodeError):
                continue
    return False
