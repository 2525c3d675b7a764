"""Code in processes of its own that need not import its libraries again: they are forked of one that has them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

# `anew` reads the environment when it is imported, so each process imports it for itself; what it is built on is there.
_PARENT = """
import json, os, signal, sys, traceback
first, anew = sys.argv[1:]
exec(first)
for name in [name for name in sys.modules if name.partition(".")[0] == anew]:
    del sys.modules[name]
for line in sys.stdin:
    told = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        os.environ.clear()
        os.environ.update(told["environment"])
        os.chdir(told["folder"])
        for stream, file in ((1, told["stdout"]), (2, told["stderr"])):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
        sys.argv, code = ["-c", *told["arguments"]], 1
        try:
            exec(told["code"], {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Parent:
    """Runs code in forks of itself, one at a time."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder

    def run(
        self, code: str, *arguments: str, folder: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """As `python -c code arguments` in that directory and environment."""
        files = {name: self.folder / name for name in ("stdout", "stderr")}
        told = {"code": code, "arguments": arguments, "folder": str(folder), "environment": dict(environment)}
        print(json.dumps(told | {name: str(file) for name, file in files.items()}), file=self._input, flush=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process that forks has ended"
        returned = int(line)
        return subprocess.CompletedProcess(code, returned, *(file.read_text() for file in files.values()))

    @property
    def _input(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin


@contextmanager
def forking(imports: str, anew: str, folder: Path, environment: Mapping[str, str]) -> Iterator[Parent]:
    """A process that has run the statements `imports`. anew: a package of them that each fork imports for itself."""
    command = [sys.executable, "-P", "-c", _PARENT, imports, anew]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=dict(environment), **pipes) as process:  # type: ignore[call-overload]
        yield Parent(process, folder)
        process.stdin.close()
        assert process.wait(300) == 0
