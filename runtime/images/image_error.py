"""The error of an image that cannot be part of a prompt."""

from __future__ import annotations

from llmc.runtime.request_error import RequestError


class ImageError(RequestError):
    """An image is damaged, too large or of an unknown kind, or its place in the prompt is unclear; one sentence."""


class NoImages(RequestError):
    """A prompt has images, and nothing here sees them; the message is one sentence."""
