"""Object files of kernels → one shared library, by the system's C compiler driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llmc.compiler.targets.base import LinkError

# What a kernel may leave to the C library.
_ALLOWED_UNDEFINED = frozenset({"memcpy", "memset", "memmove"})


def link_shared(objects: Sequence[bytes], path: Path) -> None:
    """Link kernels into one shared library. Same objects, same bytes. Raises LinkError."""
    linker = shutil.which("cc")
    if linker is None:
        raise LinkError("no C compiler driver `cc` on PATH; install gcc or clang to link kernels")
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
            ["nm", "-D", "--undefined-only", "kernels.so"], cwd=folder, capture_output=True, text=True, check=True
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
