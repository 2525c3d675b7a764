"""What tests of /v1/responses and of /v1/messages share."""

from __future__ import annotations

import json
from typing import Any

from support.server_harness import Running

PATH = "/v1/responses"


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bath", "York"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def events_of(running: Running, path: str = PATH, /, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; each is named by its type."""
    with running.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        text = "".join(response.iter_text())
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events
