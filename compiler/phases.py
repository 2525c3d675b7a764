"""A compilation as a list of named phases over one state, run in order; each can show its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from llmc.compiler.config import CompileError, Progress

OnStep = Callable[[int, int], None]
"""Called with (done, total)."""
State = TypeVar("State")


class PhaseClock:
    """Measures seconds per phase, and forwards the caller's progress."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def phase(self, name: str) -> Iterator[OnStep]:
        start, extent = time.perf_counter(), 1

        def advance(done: int, total: int) -> None:
            nonlocal extent
            extent = max(1, total)
            self._progress(name, done, total)

        self._progress(name, 0, 0)
        yield advance
        self._progress(name, extent, extent)
        self.seconds[name] = round(time.perf_counter() - start, 3)


def _always(state: object) -> bool:
    return True


def _never(state: object) -> bool:
    return False


@dataclass(frozen=True)
class Phase(Generic[State]):
    """A step of a compilation.

    name: in progress and reports. wanted: whether it has anything to do. verify: raises VerifyError if the result is
    not what it claims to be. dump: writes its result to a directory, for reading.
    """

    name: str
    run: Callable[[State, OnStep], None]
    wanted: Callable[[State], bool] = _always
    verify: Callable[[State], None] | None = None
    dump: Callable[[State, Path], None] | None = None


def chosen(
    phases: Sequence[Phase[State]], names: Collection[str], **variants: Callable[[State, OnStep], None]
) -> tuple[Phase[State], ...]:
    """The phases named in `names`. variants: replacements for some of them, by name."""
    unknown = {*names, *variants} - {phase.name for phase in phases}
    assert not unknown, unknown
    return tuple(
        replace(phase, run=variants.get(phase.name, phase.run), wanted=phase.wanted if phase.name in names else _never)
        for phase in phases
    )


def drive(phases: Sequence[Phase[State]], state: State, clock: PhaseClock, dump: Path | None = None) -> None:
    """Runs the wanted phases. dump: an empty or missing directory, which gets a folder per phase."""
    for number, phase in enumerate(phases, 1):
        if not phase.wanted(state):
            continue
        with clock.phase(phase.name) as on_step:
            phase.run(state, on_step)
            if phase.verify is not None:
                phase.verify(state)
        if dump is not None and phase.dump is not None:
            folder = dump / f"{number}-{phase.name}"
            folder.mkdir(parents=True)
            phase.dump(state, folder)


def check_dump(folder: Path | None, output: Path) -> None:
    """Raises CompileError unless a dump may be written there: it must replace nothing, and lie outside the artifact."""
    if folder is None:
        return
    if folder.resolve().is_relative_to(output.resolve()):
        raise CompileError(f"{folder} is in {output}, which holds the artifact alone: give --dump one beside it")
    if not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise CompileError(f"{folder} is there already, and a dump replaces nothing: give --dump a new directory")
