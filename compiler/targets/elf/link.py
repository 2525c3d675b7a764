"""Object files of kernels → one shared library, by a C compiler driver: the system's, or a cross compiler's."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llmc.compiler.targets.base import LinkError

# What a kernel may leave to the C library.
_ALLOWED_UNDEFINED = frozenset({"memcpy", "memset", "memmove"})


def link_shared(objects: Sequence[bytes], path: Path, machine: str | None = None) -> None:
    """Link kernels into one shared library for `machine`, as uname has it, or this one. Same objects, same bytes.

    Raises LinkError.
    """
    linker, symbols = _tools(machine or platform.machine())
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
        undefined = subprocess.run(
            [symbols, "-D", "--undefined-only", "kernels.so"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
        fields = [line.split() for line in undefined.splitlines()]
        bad = {f[-1] for f in fields if f[-2].upper() == "U"} - _ALLOWED_UNDEFINED
        bad = {name for name in bad if name.split("@")[0] not in _ALLOWED_UNDEFINED}
        if bad:
            raise LinkError(f"kernels need symbols outside the C library: {', '.join(sorted(bad))}")
        # Replaced, not rewritten: a process that has the old file mapped keeps it.
        new = path.with_name(f".{path.name}.{os.getpid()}")
        shutil.copyfile(Path(folder) / "kernels.so", new)
        new.replace(path)


def _tools(machine: str) -> tuple[str, str]:
    """The compiler driver and the lister of symbols for a machine: this one's, or those of Debian's cross compilers."""
    prefix = "" if machine == platform.machine() else f"{machine}-linux-gnu-"
    driver, symbols = shutil.which(f"{prefix}gcc" if prefix else "cc"), shutil.which(f"{prefix}nm")
    if driver is None or symbols is None:
        needed = f"install gcc-{machine}-linux-gnu" if prefix else "install gcc or clang, and binutils,"
        name = f"{prefix}gcc" if prefix else "cc"
        raise LinkError(f"no `{name}` and `{prefix}nm` on PATH; {needed} to link kernels for {machine}")
    return driver, symbols
