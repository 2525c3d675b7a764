"""The limit of open files, of which each connection is one."""

from __future__ import annotations

import contextlib
import logging

from .seldom import Seldom

log = logging.getLogger("llmc.server")
_MAX_FILES = 65536
_NEARLY = 8


def raise_file_limit() -> None:
    """Raises the limit of open files: many systems allow 1024 unless a process asks for more."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class FileWatch:
    """Warns when the process has nearly as many files open as it may, at most once a minute.

    Without it nobody is told: event loops close the connections beyond without a word.
    """

    def __init__(self) -> None:
        self._warning = Seldom()

    def note(self, descriptor: int) -> None:
        """Takes the descriptor of a new connection: systems give the lowest one that is free."""
        try:
            import resource
        except ImportError:
            return
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY or descriptor < limit - _NEARLY:
            return
        if self._warning.is_due():
            log.warning(
                "nearly %d files are open, as many as this process may have, and more connections are reset: raise "
                "the hard limit (ulimit -Hn, LimitNOFILE= of systemd), or limit connections in a proxy",
                limit,
            )
