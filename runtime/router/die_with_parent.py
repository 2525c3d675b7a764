"""Runs a command that gets SIGTERM when its parent dies: python die_with_parent.py PARENT COMMAND…

It is a separate file that imports nothing of llmc, because it runs before the command, in the same process.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks Linux for the signal, which survives exec, and then executes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before prctl was called
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
