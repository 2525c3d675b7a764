"""Runs a command that gets a signal when its parent dies: python die_with_parent.py SIGNAL PARENT COMMAND…

It imports nothing of llmc, because as a program it runs before the command, in the same process.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C then ends this process without a traceback. The command decides for itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import ctypes
import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def dying_with_this_process(command: Sequence[str], signum: int = signal.SIGKILL) -> list[str]:
    """`command`, so that it gets a signal when the calling thread ends; command[0]: a path, or found in PATH."""
    return [sys.executable, "-I", "-S", __file__, str(int(signum)), str(os.getpid()), *command]


def signal_when_parent_dies(signum: int) -> None:
    """Has Linux send a signal to this process when its parent dies. It survives exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def main() -> None:
    """Asks for the signal, and then executes the command."""
    signum, parent, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    signal_when_parent_dies(signum)
    if os.getppid() != parent:  # the parent died before the signal was asked for
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
