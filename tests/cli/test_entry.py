"""Ctrl-C while the command is loaded: exit code 130, and no traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmc.cli.serve import COMPILES

COMMAND = "import sys; from llmc.cli.entry import main; sys.exit(main())"
INTERRUPTED = """import os, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
"""
"""A process that gets the signal when it begins to import the library of commands."""


def run(code: str, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("program", "told"), [(COMMAND, "llmc: error: interrupted\n"), (COMPILES, "")])
def test_it_ends_quietly_and_only_the_command_tells(program: str, told: str) -> None:
    assert run(INTERRUPTED + program, "targets") == (130, "", told)


def test_who_ignores_it_still_does() -> None:
    code, text, errors = run(f"{INTERRUPTED}signal.signal(signal.SIGINT, signal.SIG_IGN)\n{COMMAND}", "targets")
    assert (code, errors) == (0, "")
    assert "x86-64-v3" in text
