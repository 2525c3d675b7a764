"""A child process with a limit of time, behind which it is ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_LAST_WORDS_S = 5.0
"""For output that is still in the pipes, which a process that left the group may hold open."""


class HungError(Exception):
    """A child process has not ended in time; the message says which run it was."""


def run_limited(what: str, command: Sequence[str | Path], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a command without stdin, and returns its output. what: names the run in the error.

    Raises HungError after limit_s seconds.
    """
    # A session of its own: what it starts has its pipes, so ending it alone would not be enough.
    process = subprocess.Popen(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise HungError(f"{what} has not ended within {limit_s:g} seconds{_end(process)}") from None
    except BaseException:
        _end(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def _end(process: subprocess.Popen[str]) -> str:
    """Ends the process and its group; the end of what it said, behind a colon."""
    said = ""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        out, error = process.communicate(timeout=_LAST_WORDS_S)
        said = (error or out or "").strip()[-600:]
    process.wait()
    return f": {said}" if said else ""
