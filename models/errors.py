"""The one exception of this package."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be read or built; the message is one sentence that names the offending value."""
