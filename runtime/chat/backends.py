"""Sources of a chat's answers: an engine in this process, or an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from llmc.runtime.address import Address, UrlError, why_not_connected
from llmc.runtime.chat.context import Fit, fit, leave_out
from llmc.runtime.chat.session import ChatError, Piece, Reply, Session

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM
    from llmc.runtime.outputs import TokenDelta
    from llmc.runtime.server.chat_output import ChatDelta
    from llmc.runtime.server.text_machine import TextMachine

_MAX_LINE_BYTES = 1 << 24
_PROMPT_END = 16  # tokens that show whether the prompt opened the reasoning
_NO_TEMPLATE = "chat_template"
_CONTEXT_FULL = "context_length_exceeded"


class ServerError(ChatError):
    """A server's refusal. status: of HTTP. code: the server's machine-readable code."""

    def __init__(self, message: str, status: int, code: str | None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Backend(Protocol):
    """Answers conversations. name: for display."""

    name: str

    def check(self, raw: bool) -> None:
        """Raises ChatError if no conversation can be answered at all."""

    def reply(self, session: Session) -> Reply:
        """Starts an answer; drops the oldest messages if the context is full. Raises ChatError, also while the reply is
        read."""

    def close(self) -> None: ...


class EngineBackend:
    """An opened artifact, which the backend closes."""

    def __init__(self, llm: LLM) -> None:
        self.name = llm.path.name
        self._llm = llm

    def check(self, raw: bool) -> None:
        from llmc.runtime.request_error import RequestError
        from llmc.runtime.text.chat_template import ChatTemplateError

        if self._llm.task != "generate":
            raise ChatError(f"{self.name} gives vectors and does not chat: use llmc embed or llmc rank")
        if raw:
            return
        try:
            self._llm.encode_chat([{"role": "user", "content": "Hi"}])
        except ChatTemplateError as error:
            reason = str(error).partition(":")[0]
            raise ChatError(
                f"{reason}: pass one with --chat-template FILE, or --raw to let it continue plain text"
            ) from error
        except RequestError:
            # A template may require more than one plain message; real conversations will show that.
            pass

    def reply(self, session: Session) -> Reply:
        from llmc.runtime.request_error import RequestError
        from llmc.runtime.server.reasoning import reasoning_style, starts_in_reasoning

        llm = self._llm

        def encode(first: int) -> list[int]:
            if session.raw:
                return llm.tokenizer.encode(session.request_text(first))
            return llm.encode_chat(session.request_messages(first))

        try:
            fitting = fit(session, lambda first: len(encode(first)), llm.max_model_len)
            token_ids = encode(session.first)
            style = None if session.raw else reasoning_style(llm.tokenizer)
            shown = {} if style is None or not style.is_hidden(llm.tokenizer) else {"skip_special_tokens": False}
            params = llm.default_params(**{"max_tokens": fitting.room, **session.sampling, **shown})
            deltas = llm.stream(token_ids, params)
        except RequestError as error:
            raise ChatError(str(error)) from error
        reply = Reply(iter(()), note=fitting.note, prompt_tokens=len(token_ids))
        reply.pieces = self._generate(deltas, reply)
        if style is not None:
            end = llm.tokenizer.decode(token_ids[-_PROMPT_END:], skip_special_tokens=False)
            reply.pieces = _told_apart(reply.pieces, style.parser(starts_in_reasoning(style, end)))
        return reply

    def _generate(self, deltas: Generator[TokenDelta, None, None], reply: Reply) -> Iterator[Piece]:
        start = time.monotonic()
        with contextlib.closing(deltas):
            for delta in deltas:
                reply.cached_tokens = delta.num_cached_tokens
                reply.finish_reason = delta.finish_reason or reply.finish_reason
                if delta.token_ids:
                    reply.completion_tokens += len(delta.token_ids)
                    reply.total_s = time.monotonic() - start
                    reply.first_s = reply.first_s or reply.total_s
                if delta.text:
                    yield Piece(delta.text)
                if delta.error is not None:
                    raise ChatError(delta.error.message)

    def close(self) -> None:
        self._llm.close()


def _told_apart(pieces: Iterator[Piece], parser: TextMachine) -> Iterator[Piece]:
    """Splits plain text into reasoning and answer."""
    try:
        for piece in pieces:
            yield from _pieces_of(parser.push(piece.text))
        yield from _pieces_of(parser.finish())
    finally:
        # Closing the reply also stops the engine.
        if isinstance(pieces, Generator):
            pieces.close()


def _pieces_of(deltas: Iterable[ChatDelta]) -> Iterator[Piece]:
    for delta in deltas:
        if delta.reasoning_content:
            yield Piece(delta.reasoning_content, reasoning=True)
        if delta.content:
            yield Piece(delta.content)


class ServerBackend:
    """A server at `url`, with or without /v1. model: None for the first one that it lists.

    timeout_s bounds each wait for the server's next bytes. Raises ChatError for a URL that cannot be used.
    """

    def __init__(self, url: str, *, model: str | None, api_key: str | None, timeout_s: float) -> None:
        try:
            address = Address.parse(url)
        except UrlError as error:
            raise ChatError(str(error)) from error
        self._root = address.prefix
        self._connect = http.client.HTTPSConnection if address.tls else http.client.HTTPConnection
        self._host, self._port, self._timeout_s = address.host, address.port, timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.url = address.origin
        self.name = model or ""
        self._counts = True  # until the server turns out to lack /tokenize

    def check(self, raw: bool) -> None:
        if not self.name:
            models = self._ask("GET", "/v1/models", None, "the list of models")
            try:
                self.name = models["data"][0]["id"]
            except (LookupError, TypeError) as error:
                raise ChatError(f"{self.url} lists no model: name one with --model") from error
        if not raw:
            self._count(Session(messages=[{"role": "user", "content": "Hi"}]), 0)

    def reply(self, session: Session) -> Reply:
        body: dict[str, Any] = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}}
        body |= {key: list(value) if isinstance(value, tuple) else value for key, value in session.sampling.items()}
        fitting = self._fit(session)
        note = ""
        if fitting is not None:
            body["max_tokens"] = session.sampling.get("max_tokens", fitting.room)
            note = fitting.note
        path = "/v1/completions" if session.raw else "/v1/chat/completions"
        start = time.monotonic()
        while True:
            prompt = {"prompt": session.request_text()} if session.raw else {"messages": session.request_messages()}
            try:
                connection, response = self._request("POST", path, body | prompt)
                break
            except ServerError as error:
                starts = session.later_starts()
                if error.code != _CONTEXT_FULL or not starts:
                    raise
                # Without token counts: drop the older half.
                note = leave_out(session, starts[len(starts) // 2], "the context is full")
        reply = Reply(iter(()), note=note)
        reply.pieces = self._stream(connection, response, reply, start)
        return reply

    def _fit(self, session: Session) -> Fit | None:
        """The part that fits the model's context; None if the server does not count tokens."""
        told = self._count(session, session.first)
        if told is None:
            return None
        tokens = {session.first: told[0]}

        def count(first: int) -> int:
            if first not in tokens:
                again = self._count(session, first)
                # If a server stops counting, drop nothing.
                tokens[first] = told[0] if again is None else again[0]
            return tokens[first]

        return fit(session, count, told[1])

    def _count(self, session: Session, first: int) -> tuple[int, int] | None:
        """(tokens of the prompt starting at `first`, tokens of the context); None if the server does not say.

        Raises ChatError if the server cannot be used at all, as with a model without a chat template.
        """
        if not self._counts:
            return None
        if session.raw:
            body: dict[str, Any] = {"prompt": session.request_text(first)}
        else:
            body = {"messages": session.request_messages(first)}
        try:
            answer = self._ask("POST", "/tokenize", {"model": self.name, **body}, "a count of tokens")
        except ServerError as error:
            if error.status in (401, 403) or error.code == _NO_TEMPLATE:
                raise
            # Other errors will also occur for the request itself; some servers lack this path.
            self._counts = error.status == 400
            return None
        count, limit = answer.get("count"), answer.get("max_model_len")
        if isinstance(count, int) and isinstance(limit, int):
            return count, limit
        self._counts = False
        return None

    def _stream(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, reply: Reply, start: float
    ) -> Iterator[Piece]:
        try:
            for data in self._events(response):
                if "error" in data:
                    raise ChatError(_message(data, "the server broke the answer off"))
                if usage := data.get("usage"):
                    reply.prompt_tokens = usage.get("prompt_tokens")
                    reply.completion_tokens = usage.get("completion_tokens", reply.completion_tokens)
                    reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                for choice in data.get("choices", ()):
                    reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
                    delta = choice.get("delta") or {}
                    # The second name is that of newer servers.
                    thought = delta.get("reasoning_content") or delta.get("reasoning")
                    text = choice.get("text") or delta.get("content")
                    if not text and not thought:
                        continue
                    reply.completion_tokens += 1
                    reply.total_s = time.monotonic() - start
                    reply.first_s = reply.first_s or reply.total_s
                    if thought:
                        yield Piece(thought, reasoning=True)
                    if text:
                        yield Piece(text)
        except (AttributeError, TypeError) as error:
            raise ChatError(
                f"{self.url} sent something other than a completion: give the URL of an OpenAI server"
            ) from error
        finally:
            # Closing the connection tells the server to stop.
            connection.close()

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """The JSON objects of a server-sent event stream, up to [DONE]."""
        while True:
            try:
                line = response.readline(_MAX_LINE_BYTES)
            except TimeoutError as error:
                raise ChatError(f"{self.url} sent nothing for {self._timeout_s:g} s: raise --timeout") from error
            except (OSError, http.client.HTTPException) as error:
                raise ChatError(f"{self.url} broke the answer off: {_reason(error)}") from error
            if not line:
                raise ChatError(f"{self.url} ended the answer without [DONE]: it was cut off")
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield _json(data, "a part of the answer")

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connect(self._host, self._port, timeout=self._timeout_s)
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, self._root + path, payload, self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            content = response.read(_MAX_LINE_BYTES)
        except TimeoutError as error:
            connection.close()
            raise ChatError(f"{self.url} did not answer for {self._timeout_s:g} s: raise --timeout") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            connection.close()
            hint = ": start llmc serve there" if isinstance(error, ConnectionRefusedError) else ""
            raise ChatError(f"cannot talk to {self.url}, {_reason(error)}{hint}") from error
        except BaseException:
            connection.close()
            raise
        connection.close()
        try:
            data = json.loads(content)
        except (ValueError, RecursionError):
            data = None
        message, code = _message(data, "") or response.reason, _code(data)
        if code == _NO_TEMPLATE:
            message = f"{message.partition(':')[0]}: start llmc serve with --chat-template FILE, or pass --raw here"
        hint = " (pass --api-key, or set LLMC_API_KEY)" if response.status == 401 else ""
        raise ServerError(f"{self.url} answered {response.status}: {message}{hint}", response.status, code)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
        """A complete JSON answer."""
        connection, response = self._request(method, path, body)
        try:
            return _json(response.read(_MAX_LINE_BYTES), what)
        except TimeoutError as error:
            raise ChatError(f"{self.url} sent nothing for {self._timeout_s:g} s: raise --timeout") from error
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"{self.url} broke {what} off: {_reason(error)}") from error
        finally:
            connection.close()

    def close(self) -> None:
        """No connection is kept open between answers."""


def _json(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ChatError(f"the server sent {what} that is not JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise ChatError(f"the server sent {what} that is not an object: {data[:80]!r}")
    return value


def _message(data: Any, otherwise: str) -> str:
    """The message of an error in OpenAI's format."""
    error = data.get("error", data) if isinstance(data, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else otherwise


def _code(data: Any) -> str | None:
    """The code of an error in OpenAI's format."""
    error = data.get("error") if isinstance(data, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else None


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return why_not_connected(error)
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split()).lower() if isinstance(error, OSError) else " ".join(text.split())
