"""Virtual environments of peers, made once, and their size on disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

Say = Callable[[str], None]


class Skip(Exception):
    """Raised with one sentence: why an engine or one of its precisions cannot take part here."""


@dataclass(frozen=True)
class Workspace:
    """Folders below `root`, which git ignores: models, converted models, environments, logs."""

    root: Path
    threads: int
    say: Say = print

    def model(self, name: str) -> Path:
        """Folder of the checkpoint that all engines get."""
        return self.root / "models" / name

    def converted(self, model: str, engine: str, variant: str) -> Path:
        return self.root / "converted" / model / f"{engine}-{variant}"

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"

    def environment(self, name: str) -> Environment:
        return Environment(self.root / "env" / name, self.log(f"install-{name}"), self.say)


def run(argv: Sequence[str | Path], log: Path, **options: object) -> None:
    """Runs a command and appends its output to `log`. Raises Skip with the last line of output if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in argv]
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(words)}\n".encode())
        output.flush()
        start = output.tell()
        try:
            status = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, check=False, **options).returncode  # type: ignore[call-overload]
        except OSError as error:
            raise Skip(f"{words[0]} does not start: {error.strerror}") from error
    if status:
        with log.open("rb") as written:
            written.seek(start)
            said = [line.strip() for line in written.read().decode(errors="replace").splitlines() if line.strip()]
        telling = [line for line in said if "rror" in line] or said or ["it said nothing"]
        raise Skip(f"{Path(words[0]).name} {' '.join(words[1:4])} … failed: {telling[-1][:300]} (see {log})")


@dataclass(frozen=True)
class Environment:
    """A virtual environment; `pip` is configured by its own settings (index, find-links), not here."""

    path: Path
    log: Path
    say: Say

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def ensure(self, requirements: Sequence[str], unless_broken: Sequence[str] = ()) -> None:
        """Makes the environment and installs `requirements`, unless just that was done before. Raises Skip.

        unless_broken: packages that others require but text models do not need. They are uninstalled if they cannot be
        imported: one built for another torch would break the import of the engine.
        """
        stamp = self.path / "requirements.txt"
        wanted = "\n".join(requirements) + "\n"
        if stamp.exists() and stamp.read_text() == wanted:
            return
        self.say(f"install {self.path.name}: {' '.join(requirements)}")
        if not self.python.exists():
            run([sys.executable, "-m", "venv", self.path], self.log)
        self.pip("install", "--upgrade", "pip")
        self.pip("install", *requirements)
        for name in unless_broken:
            try:
                run([self.python, "-c", f"import {name}"], self.log)
            except Skip:
                self.pip("uninstall", "--yes", name)
        stamp.write_text(wanted)

    def pip(self, command: str, *arguments: str | Path, **options: object) -> None:
        """Runs a pip command in the environment. Raises Skip."""
        run([self.python, "-m", "pip", "--no-input", command, "--quiet", *arguments], self.log, **options)

    def bytes(self) -> int:
        """Bytes on disk, without pip, which the engine does not need."""
        return tree_bytes(self.path, skip={"pip"})


def tree_bytes(path: Path, skip: Iterable[str] = ()) -> int:
    """Bytes that the files below `path` take on disk, links not followed; folders named in `skip` left out."""
    total, skipped = 0, set(skip)
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if name not in skipped]
        total += sum(os.lstat(os.path.join(folder, name)).st_blocks * 512 for name in files)
    return total


def free_bytes(path: Path) -> int:
    """Free bytes of the file system that `path` is on."""
    path.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(path).free


def written_whole(target: Path, write: Callable[[Path], None]) -> Path:
    """Writes `target` unless it exists, and returns it. `write` gets a path beside it, which is renamed at the end."""
    if not target.exists():
        partial = target.with_name(target.name + ".partial")
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        partial.rename(target)
    return target
