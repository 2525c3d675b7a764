"""The output items of one answer of /v1/responses, and the events that stream them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .chat_output import ChatDelta
from .protocol.response_items import answer_item_id

# Type of item → name of its text's events, type of its part.
_TEXTS: Mapping[str, tuple[str, str]] = {
    "message": ("output_text", "output_text"),
    "reasoning": ("reasoning_text", "reasoning_text"),
}


class ResponseOutput:
    """Takes the pieces of an assistant's message. `items` is complete once `finish` has been read to its end.

    Events are as OpenAI's, except for sequence_number. An item ends where the next one begins. answer_id: from which
    items get their ids.
    """

    def __init__(self, answer_id: str) -> None:
        self._answer_id = answer_id
        self.items: list[dict[str, Any]] = []
        self._growing = False
        self._texts: list[str] = []  # pieces of the last item's text or arguments so far
        self._waiting: list[dict[str, Any]] = []  # logprobs of tokens whose text has not come yet
        self._logprobs: list[dict[str, Any]] = []

    def wait(self, logprobs: Sequence[dict[str, Any]]) -> None:
        """Keeps logprobs of tokens for the next piece of text. Those of reasoning and calls are not sent."""
        self._waiting += logprobs

    def push(self, delta: ChatDelta) -> Iterator[dict[str, Any]]:
        """Events of one more piece."""
        if delta.reasoning_content:
            yield from self._text("reasoning", delta.reasoning_content)
        if delta.content:
            yield from self._text("message", delta.content)
        for part in delta.tool_calls:
            yield from self._call(part)

    def finish(self, status: str) -> Iterator[dict[str, Any]]:
        """The events that end the answer. status: of the last item, completed or incomplete."""
        if not self.items:
            yield from self._open("message", {"role": "assistant"})
        yield from self._close(status)

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._growing or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind, {"role": "assistant"} if kind == "message" else {"summary": []})
        self._texts.append(text)
        event = {"type": f"response.{_TEXTS[kind][0]}.delta", **self._place(), "content_index": 0, "delta": text}
        told, self._waiting = self._waiting, []
        if kind == "message":
            self._logprobs += told
            event["logprobs"] = told
        yield event

    def _call(self, part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        self._waiting = []
        function = part["function"]
        if "id" in part:
            yield from self._close("completed")
            yield from self._open("function_call", {"call_id": part["id"], "name": function["name"], "arguments": ""})
        if function.get("arguments"):
            self._texts.append(function["arguments"])
            kind = "response.function_call_arguments.delta"
            yield {"type": kind, **self._place(), "delta": function["arguments"]}

    def _open(self, kind: str, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        content: dict[str, Any] = {} if kind == "function_call" else {"content": []}
        item_id = answer_item_id(kind, self._answer_id, len(self.items))
        item = {"type": kind, "id": item_id, "status": "in_progress", **fields, **content}
        self.items.append(item)
        self._growing, self._texts, self._logprobs = True, [], []
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": item}
        if kind in _TEXTS:
            yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": self._part("")}

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        if not self._growing:
            return
        self._growing = False
        text, kind = "".join(self._texts), self.items[-1]["type"]
        done: dict[str, Any]
        if kind == "function_call":
            # An event that was sent keeps the item as it was.
            self.items[-1] = {**self.items[-1], "status": status, "arguments": text}
            done = {"type": "response.function_call_arguments.done", "name": self.items[-1]["name"], "arguments": text}
            yield {**done, **self._place()}
        else:
            self._logprobs += self._waiting if kind == "message" else ()
            part = self._part(text)
            self.items[-1] = {**self.items[-1], "status": status, "content": [part]}
            done = {"type": f"response.{_TEXTS[kind][0]}.done", **self._place(), "content_index": 0, "text": text}
            if kind == "message":
                done["logprobs"] = self._logprobs
            yield done
            yield {"type": "response.content_part.done", **self._place(), "content_index": 0, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": self.items[-1]}

    def _part(self, text: str) -> dict[str, Any]:
        kind = self.items[-1]["type"]
        part: dict[str, Any] = {"type": _TEXTS[kind][1], "text": text}
        if kind == "message":
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
