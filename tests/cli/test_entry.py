"""Ctrl-C while the command is loaded: exit code 130, and no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from llmc.cli.serve import COMPILES
from llmc.runtime.die_with_parent import dying_with_this_process

COMMAND = "import sys; from llmc.cli.entry import main; sys.exit(main())"
INTERRUPTS = """import os, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
"""
"""A process that gets the signal when it begins to import a module."""
INTERRUPTED = INTERRUPTS.format(module="typer")
"""One that gets it at the library of commands."""


def run(code: str, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("program", "told"), [(COMMAND, "llmc: error: interrupted\n"), (COMPILES, "")])
def test_it_ends_quietly_and_only_the_command_tells(program: str, told: str) -> None:
    assert run(INTERRUPTED + program, "targets") == (130, "", told)


@pytest.mark.parametrize("closed", ["os.close(2)", "sys.__stderr__.close()", "sys.__stderr__ = None; os.close(2)"])
def test_it_ends_without_an_error_stream(closed: str) -> None:
    assert run(f"{INTERRUPTED}{closed}\n{COMMAND}", "targets") == (130, "", "")


def test_what_runs_before_the_compilation_ends_quietly() -> None:
    command = dying_with_this_process([sys.executable, "-c", "print('not run')"])
    program = f"import runpy; sys.argv[1:] = {command[4:]}; runpy.run_path({command[3]!r}, run_name='__main__')"
    assert run(INTERRUPTS.format(module="ctypes") + program) == (-signal.SIGINT, "", "")


def test_who_ignores_it_still_does() -> None:
    code, text, errors = run(f"{INTERRUPTED}signal.signal(signal.SIGINT, signal.SIG_IGN)\n{COMMAND}", "targets")
    assert (code, errors) == (0, "")
    assert "x86-64-v3" in text
