"""The error of a request that cannot be run."""

from __future__ import annotations


class RequestError(ValueError):
    """A prompt or sampling parameter is invalid; the message is one sentence with the offending value."""
