"""The content blocks of one answer of /v1/messages, and the events that stream them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .chat_output import ChatDelta

# Type of block → the field with its text, the type of its deltas, the field with the text in a delta.
_TEXTS: Mapping[str, tuple[str, str, str]] = {
    "text": ("text", "text_delta", "text"),
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}


class MessageOutput:
    """Takes the pieces of an assistant's message. `blocks` is complete once `finish` has been read to its end."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._growing = False
        self._texts: list[str] = []  # pieces of the last block's text or input so far

    @property
    def called_tools(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def push(self, delta: ChatDelta) -> Iterator[dict[str, Any]]:
        """Events of one more piece."""
        if delta.reasoning_content:
            yield from self._text("thinking", delta.reasoning_content, {"thinking": "", "signature": ""})
        if delta.content:
            yield from self._text("text", delta.content, {"text": ""})
        for part in delta.tool_calls:
            function = part["function"]
            if "id" in part:
                yield from self._open("tool_use", {"id": part["id"], "name": function["name"], "input": {}})
            if function.get("arguments"):
                yield self._more(function["arguments"])

    def finish(self) -> Iterator[dict[str, Any]]:
        """The events that end the answer."""
        if not self.blocks:
            yield from self._open("text", {"text": ""})
        yield from self._close()

    def _text(self, kind: str, text: str, empty: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if not self._growing or self.blocks[-1]["type"] != kind:
            yield from self._open(kind, empty)
        yield self._more(text)

    def _more(self, text: str) -> dict[str, Any]:
        self._texts.append(text)
        _, kind, name = _TEXTS[self.blocks[-1]["type"]]
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, name: text}}

    def _open(self, kind: str, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self.blocks.append({"type": kind, **fields})
        self._growing, self._texts = True, []
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": self.blocks[-1]}

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._growing:
            return
        self._growing = False
        block, text = self.blocks[-1], "".join(self._texts)
        # An event that was sent keeps the block as it was.
        self.blocks[-1] = {**block, _TEXTS[block["type"]][0]: _input(text) if block["type"] == "tool_use" else text}
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}


def _input(text: str) -> dict[str, Any]:
    """Arguments of a call; empty if the model's text is not JSON, for example because its limit cut it off."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
