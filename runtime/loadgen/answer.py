"""The content of a reply to a streamed request: token times, usage, or the cause of failure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .http import HttpError, Reply
from .sse import DONE, TornStream, events
from .workload import Ask


@dataclass(frozen=True)
class Outcome:
    """One request as the client saw it; times in ns of time.monotonic_ns().

    due_ns: scheduled time of sending. token_ns: arrival of each event with tokens. output_tokens: from the server's
    usage, else the number of those events. failure: a short cause, with a sentence in `detail`; None on success. left:
    the client disconnected on purpose; such a request is neither finished nor failed.
    """

    index: int
    due_ns: int
    start_ns: int
    end_ns: int
    token_ns: tuple[int, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    has_usage: bool = False
    text: str = ""
    failure: str | None = None
    detail: str = ""
    left: bool = False

    @property
    def ok(self) -> bool:
        return self.failure is None and not self.left

    @property
    def ttft_ms(self) -> float | None:
        """Milliseconds from sending to the first token."""
        return (self.token_ns[0] - self.start_ns) / 1e6 if self.token_ns else None

    @property
    def tpot_ms(self) -> float | None:
        """Mean milliseconds per output token after the first; None below two tokens."""
        if self.output_tokens < 2 or len(self.token_ns) < 2:
            return None
        return (self.token_ns[-1] - self.token_ns[0]) / 1e6 / (self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float | None:
        """Milliseconds from sending to the last token."""
        return (self.token_ns[-1] - self.start_ns) / 1e6 if self.token_ns else None


def failed(index: int, due_ns: int, error: HttpError, now_ns: int) -> Outcome:
    """The outcome of a request without a complete answer."""
    start = error.reply.start_ns if error.reply else due_ns
    return Outcome(index, due_ns, start, now_ns, failure=error.cause, detail=str(error))


def read_answer(index: int, due_ns: int, reply: Reply, ask: Ask | None = None) -> Outcome:
    """Reads a reply. ask: if given, usage with other lengths counts as failure."""
    if reply.status != 200:
        detail = _error_message(reply.body)
        return Outcome(index, due_ns, reply.start_ns, reply.end_ns, failure=f"HTTP {reply.status}", detail=detail)
    times: list[int] = []
    texts: list[str] = []
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    failure, detail, done = None, "", False
    try:
        for time_ns, data in events(reply.pieces):
            if data == DONE:
                done = True
                continue
            event = json.loads(data)
            if done:
                raise ValueError("the stream goes on after [DONE]")
            if not isinstance(event, dict):
                raise ValueError(f"an event is not a JSON object: {data[:80]!r}")
            if event.get("error") is not None:
                failure, detail = "stream error", _error_message(data)
            text, carries, reason = _content(event)
            if carries:
                times.append(time_ns)
                texts.append(text)
            finish_reason = reason or finish_reason
            usage = event.get("usage") or usage
        if not done and not reply.left and failure is None:
            failure, detail = "torn stream", "the stream ends without [DONE]"
    except TornStream as error:
        if not reply.left:
            failure, detail = "torn stream", str(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        failure, detail = "bad event", str(error)
    counts = usage or {}
    output_tokens = counts.get("completion_tokens", len(times))
    prompt_tokens = counts.get("prompt_tokens", (ask.input_len or 0) if ask else 0)
    if failure is None and not reply.left:
        if not times:
            failure, detail = "no tokens", "the stream carries no token"
        elif ask is not None:
            detail = _wrong_lengths(ask, usage)
            failure = "wrong lengths" if detail else None
    return Outcome(
        index, due_ns, reply.start_ns, reply.end_ns, tuple(times), prompt_tokens, output_tokens,
        (counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0, finish_reason, usage is not None,
        "".join(texts), failure, detail, reply.left,
    )  # fmt: skip


def _content(event: dict[str, Any]) -> tuple[str, bool, str | None]:
    """(text, whether the event carries a token, finish reason). A token may have no text yet; an event with only a
    role, or only the end of a choice, carries none."""
    text, carries, reason = "", False, None
    for choice in event.get("choices") or ():
        delta = choice.get("delta") if "delta" in choice else choice
        part = (
            delta.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
        )
        text += part
        ends = choice.get("finish_reason")
        reason = ends or reason
        carries |= bool(part or delta.get("tool_calls")) or not (ends or delta.get("role"))
    return text, carries, reason


def _wrong_lengths(ask: Ask, usage: dict[str, Any] | None) -> str:
    if usage is None:
        return "the server reports no usage, so lengths cannot be verified"
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if ask.input_len is not None and prompt != ask.input_len:
        return f"{prompt} prompt tokens by the server's count, {ask.input_len} were sent"
    if output != ask.output_len:
        return f"{output} output tokens by the server's count, {ask.output_len} were asked for"
    return ""


def _error_message(body: bytes) -> str:
    try:
        error = json.loads(body)
        error = error.get("error", error)
        message = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        message = body[:200].decode(errors="replace")
    return " ".join(str(message).split())[:300] or "no message"
