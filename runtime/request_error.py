"""The error of a request that cannot be run."""

from __future__ import annotations


class RequestError(ValueError):
    """A prompt or sampling parameter that cannot be served; the message is one sentence with the offending value."""
