"""The name that this project is distributed under; the package and the command are `llmc`, which PyPI gave to another.

Imports nothing heavy and looks at names of files only: it runs at every start of the command.
"""

from __future__ import annotations

import os
import sys

NAME = "llmc-aot"
_OTHER = "llmc"
_CPU_TORCH = "https://download.pytorch.org/whl/cpu"


def install_compiler() -> str:
    """The command that adds the compiler; torch comes without CUDA, which takes gigabytes and is not used."""
    return f"pip install '{NAME}[compiler]' --extra-index-url {_CPU_TORCH}"


def name_clash() -> str | None:
    """One sentence when PyPI's distribution `llmc`, another project with the same import name, is installed too."""
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
                    # Only who owns that file is in the way: an editable install does not.
                    if any(line.startswith(f"{_OTHER}/__init__.py,") for line in record):
                        return True
            except (OSError, UnicodeDecodeError):
                continue
    return False
