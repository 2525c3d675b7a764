"""What a request wants its output to look like: response_format, structured_outputs and the guided_ fields."""

from __future__ import annotations

from llmc.runtime.guides import Guided

from .errors import ApiError
from .protocol.common import SamplingFields

_FIELDS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def guided_of(request: SamplingFields) -> Guided | None:
    """The constraint of a request, None for none. Raises ApiError and RequestError."""
    name = next((name for name in _FIELDS if getattr(request, name) is not None), None)
    if request.response_format not in (None, {"type": "text"}):
        name = "response_format"
    if name is not None:
        raise ApiError(f"{name} is not supported yet: leave it out", param=name, code="unsupported_parameter")
    return None
