"""Links kernel objects into one shared library with a C compiler driver: the system's or a cross compiler's."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llmc.compiler.targets.base import LinkError
from llmc.compiler.targets.elf.symbols import undefined_symbols

# Symbols that a kernel may take from the C library.
_ALLOWED_UNDEFINED = frozenset({"memcpy", "memset", "memmove"})


def link_shared(objects: Sequence[bytes], path: Path, machine: str | None = None) -> None:
    """Links kernels into one shared library for `machine` (uname's name; None: this machine). Deterministic.

    Raises LinkError.
    """
    linker = _driver(machine or platform.machine())
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for index, data in enumerate(objects):
            name = f"k{index:05d}.o"
            (Path(folder) / name).write_bytes(data)
            names.append(name)
        (Path(folder) / "objects.txt").write_text("\n".join(names))
        flags = ["-shared", "-nostartfiles", "-Wl,--build-id=none", "-Wl,-soname,kernels.so", "-Wl,-z,noexecstack"]
        command = [linker, *flags, "-o", "kernels.so", "@objects.txt"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LinkError(f"linking {len(names)} kernels failed: {done.stderr.strip()}")
        linked = (Path(folder) / "kernels.so").read_bytes()
        bad = undefined_symbols(linked) - _ALLOWED_UNDEFINED
        if bad:
            raise LinkError(f"kernels need symbols outside the C library: {', '.join(sorted(bad))}")
        # Replace the file, never rewrite it: a process that has mapped the old one keeps it.
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_bytes(linked)
        new.replace(path)


def _driver(machine: str) -> str:
    """The compiler driver for a machine: this one's, or Debian's cross compiler."""
    prefix = "" if machine == platform.machine() else f"{machine}-linux-gnu-"
    name = f"{prefix}gcc" if prefix else "cc"
    driver = shutil.which(name)
    if driver is None:
        needed = f"install gcc-{machine}-linux-gnu" if prefix else "install gcc or clang"
        raise LinkError(f"no `{name}` on PATH; {needed} to link kernels for {machine}")
    return driver
