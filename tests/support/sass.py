"""NVIDIA's machine code as instructions, by nvdisasm: on PATH, in the toolkit, or as PyPI installs it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path

_USUAL = Path("/usr/local/cuda/bin/nvdisasm")


@cache
def find_nvdisasm() -> str | None:
    """Its path; None where it is not installed."""
    wheels = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin/nvdisasm"))
    usual = next((str(path) for path in (*wheels, _USUAL) if path.is_file()), None)
    return usual or shutil.which("nvdisasm")


def instructions(cubin: bytes, folder: Path) -> dict[str, Counter[str]]:
    """By kernel, how often each instruction stands in its code, with its modifiers: `LDG.E.128`. Files go to folder."""
    return {name: Counter(found) for name, found in listings(cubin, folder).items()}


def listings(cubin: bytes, folder: Path) -> dict[str, list[str]]:
    """By kernel, the instructions of its code, in order."""
    program = find_nvdisasm()
    assert program is not None
    (folder / "code.cubin").write_bytes(cubin)
    said = subprocess.run([program, "-c", folder / "code.cubin"], capture_output=True, text=True, check=True).stdout
    found = {}
    for kernel in re.split(r"^//-+ \.text\.", said, flags=re.MULTILINE)[1:]:
        # An address, a predicate where there is one, and the instruction.
        names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9x_.]*)", kernel, re.MULTILINE)
        found[kernel.split()[0]] = names
    return found
