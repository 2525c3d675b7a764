"""Where the command `llmc` begins. It imports little, so that Ctrl-C ends it quietly while the commands are loaded."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130
"""As EXIT_INTERRUPTED of main.py, which takes a while to load."""


def main() -> int:
    """Loads and runs the command line; returns its exit code."""
    with EndsAtOnce("llmc: error: interrupted\n"):
        from llmc.cli.main import entry
    try:
        return entry()
    except KeyboardInterrupt:
        # Outside of what `entry` guards, which has told of one inside.
        return _INTERRUPTED


class EndsAtOnce:
    """In the block, Ctrl-C ends the process with exit code 130 and `message` on stderr, from whatever is being loaded.

    Where the process ignores Ctrl-C, as behind nohup, it still does.
    """

    def __init__(self, message: str = "") -> None:
        self._message = message

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._end)

    def __exit__(self, *raised: object) -> None:
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._before)

    def _end(self, number: int, frame: FrameType | None) -> None:
        # An exception could be caught, or shown, by any module on its way.
        try:
            if sys.__stderr__ is not None:
                os.write(sys.__stderr__.fileno(), self._message.encode())
        except (OSError, ValueError):
            pass  # nobody reads it, or it is closed
        finally:
            os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
