"""A router without a file or memory for one more connection, which says nothing of the replica that it would reach."""

from __future__ import annotations

import errno
import logging
import os
import socket

from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.seldom import Seldom

log = logging.getLogger("llmc.router")
_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class RouterExhausted(ApiError):
    """The router can open no connection now: the client gets a 503, and replicas stay as they are."""

    def __init__(self, why: str) -> None:
        message = f"the router can open no connection to a replica ({why}): try again later"
        super().__init__(message, status=503, code="router_exhausted", headers={"Retry-After": "5"})


class ExhaustionLog:
    """Warns that the router can open no connection, at most once a minute."""

    def __init__(self) -> None:
        self._warning = Seldom()

    def note(self, why: str) -> None:
        if self._warning.is_due():
            log.warning(
                "the router can open no connection to replicas (%s), and answers requests with 503: raise its limit "
                "of open files (ulimit -Hn, LimitNOFILE= of systemd), free memory, or limit connections in a proxy",
                why,
            )


EXHAUSTION = ExhaustionLog()


def why_exhausted(error: OSError) -> str | None:
    """What this process lacked for a connection; None if the error is about its other end."""
    if error.errno in _OWN:
        return os.strerror(error.errno)
    # Who looks up a name does not say that a file could not be opened for it.
    return _why_no_file() if isinstance(error, socket.gaierror) else None


def _why_no_file() -> str | None:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return why_exhausted(error)
    return None
