"""Finished layers stored beside the output, so that a killed request can resume."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.calibration.tensor_files import read_tensors, write_tensors
from llmc.compiler.config import CompileError
from llmc.quantize.checkpoints import StoredTensor

_SUFFIX = re.compile(r"\.quantize-[0-9a-f]{16}")


class Work:
    """The work folder of one request. Layer i is done once the input of layer i + 1 is stored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _layer(self, index: int) -> Path:
        return self._folder / f"layer-{index:05}.safetensors"

    def _stream(self, index: int) -> Path:
        return self._folder / f"stream-{index:05}.npy"

    def _note(self, index: int) -> Path:
        return self._folder / f"note-{index:05}.json"

    def done(self) -> int:
        """The number of finished layers."""
        index = 0
        while self._layer(index).is_file():
            index += 1
        while index and not self._stream(index).is_file():
            index -= 1
        return index

    def stream(self, index: int) -> NDArray[np.float32]:
        """The input of layer `index`."""
        found: NDArray[np.float32] = np.load(self._stream(index))
        return found

    def keep(self, index: int, tensors: Mapping[str, StoredTensor], stream: NDArray[np.float32]) -> None:
        """Marks layer `index` as done; `stream` is the next layer's input."""
        write_tensors(self._layer(index), tensors)
        path = self._stream(index + 1)
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("wb") as file:
            np.save(file, stream)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        self._stream(index).unlink(missing_ok=True)

    def note(self, index: int, numbers: list[int]) -> None:
        """Stores numbers to report about layer `index`, before it is kept."""
        self._note(index).write_text(json.dumps(numbers), encoding="utf-8")

    def noted(self, index: int) -> list[int]:
        found: list[int] = json.loads(self._note(index).read_text(encoding="utf-8"))
        return found

    def part(self, name: str) -> Work:
        """A work folder nested in this one."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return Work(folder)

    def layer(self, index: int) -> dict[str, StoredTensor]:
        return read_tensors(self._layer(index))


@contextmanager
def work_folder(output: Path, key: str) -> Iterator[Work]:
    """The work folder of request `key`. On success it is removed, with abandoned ones.

    Raises CompileError if another process holds it, or if it cannot be written.
    """
    folder = output.with_name(f"{output.name}.quantize-{key[:16]}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CompileError(f"cannot write {folder}: {error.strerror}; choose another -o") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CompileError(f"another process quantizes to {output} already; wait for it or stop it") from None
        except OSError:  # a file system without locks
            pass
        try:
            yield Work(folder)
        except OSError as error:
            raise CompileError(
                f"cannot write {folder}: {error.strerror or error}; free space and run the same command again"
            ) from None
        shutil.rmtree(folder, ignore_errors=True)
        _drop_abandoned(output)
    finally:
        os.close(lock)


def _drop_abandoned(output: Path) -> None:
    """Removes folders of other requests for `output`, which now exists."""
    for left in output.parent.glob(f"{glob.escape(output.name)}.quantize-*"):
        if not _SUFFIX.fullmatch(left.name[len(output.name) :]):
            continue
        with suppress(OSError):
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
