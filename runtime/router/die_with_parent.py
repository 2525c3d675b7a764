"""Runs a command that gets SIGTERM when its parent dies: python die_with_parent.py PARENT COMMAND…

A file of its own that imports nothing of llmc: it is run before the command, in the process that becomes it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks Linux for the signal, which outlasts exec, and becomes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before it was asked for
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
