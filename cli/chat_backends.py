"""Where a chat's answers come from: an engine in this process, or a server that speaks the OpenAI API."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from .chat_session import ChatError, Piece, Reply, Session

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM

_MAX_LINE_BYTES = 1 << 24


class Backend(Protocol):
    """Answers conversations; name is what it shows as."""

    name: str

    def check(self, raw: bool) -> None:
        """Raises ChatError when a conversation cannot be answered at all."""

    def reply(self, session: Session) -> Reply:
        """Starts an answer. Raises ChatError, also while the reply is read."""

    def close(self) -> None: ...


class EngineBackend:
    """An opened artifact, which it closes."""

    def __init__(self, llm: LLM) -> None:
        self.name = llm.path.name
        self._llm = llm

    def check(self, raw: bool) -> None:
        from llmc.runtime.chat_template import ChatTemplateError
        from llmc.runtime.params import RequestError

        if raw:
            return
        try:
            self._llm.encode_chat([{"role": "user", "content": "Hi"}])
        except ChatTemplateError as error:
            reason = str(error).partition(":")[0]
            raise ChatError(f"{reason}: pass --raw to let it continue plain text") from error
        except RequestError:
            # A template may want more than one plain message; it will say so of the real ones.
            pass

    def reply(self, session: Session) -> Reply:
        from llmc.runtime.params import RequestError

        llm = self._llm
        try:
            if session.raw:
                token_ids = llm.tokenizer.encode(session.request_text())
            else:
                token_ids = llm.encode_chat(session.request_messages())
            room = llm.max_model_len - len(token_ids)
            if room < 1:
                raise ChatError(
                    f"the conversation has {len(token_ids)} tokens and the model takes {llm.max_model_len}: shorten it "
                    "with /undo or start over with /reset"
                )
            params = llm.default_params(**{"max_tokens": room, **session.sampling})
        except RequestError as error:
            raise ChatError(str(error)) from error
        reply = Reply(iter(()), prompt_tokens=len(token_ids))
        reply.pieces = self._generate(token_ids, params, reply)
        return reply

    def _generate(self, token_ids: list[int], params: Any, reply: Reply) -> Iterator[Piece]:
        from llmc.runtime.detokenizer import OutputText
        from llmc.runtime.handle import LlmcError
        from llmc.runtime.outputs import failure_at

        engine = self._llm.engine
        text = OutputText(self._llm.tokenizer.decode, token_ids, params.stop, params.min_tokens)
        start = time.monotonic()
        try:
            request_id = engine.submit(token_ids, params)
        except LlmcError as error:
            raise ChatError(str(error)) from error
        running = True
        try:
            while running:
                engine.step()
                for event in engine.poll():
                    reply.cached_tokens = event.num_cached_tokens
                    if event.kind == "failed":
                        running = False
                        raise ChatError(failure_at(event, len(token_ids), reply.completion_tokens).message)
                    if event.kind == "finished":
                        running = False
                        reply.finish_reason = event.finish_reason
                        if rest := text.finish():
                            yield Piece(rest)
                        continue
                    reply.completion_tokens += 1
                    reply.total_s = time.monotonic() - start
                    reply.first_s = reply.first_s or reply.total_s
                    if piece := text.push(event.token_id):
                        yield Piece(piece)
                    if text.stop_reason is not None:
                        reply.finish_reason = "stop"
                        return
        finally:
            if running:
                self._cancel(request_id)

    def _cancel(self, request_id: int) -> None:
        from llmc.runtime.handle import LlmcError

        try:
            self._llm.engine.cancel(request_id)
        except LlmcError as error:
            # It may have finished in the very step that was interrupted.
            if error.name != "not_found":
                raise
        while self._llm.engine.step():
            self._llm.engine.poll()
        self._llm.engine.poll()

    def close(self) -> None:
        self._llm.close()


class ServerBackend:
    """A server at `url`, with or without its /v1. model None: the first one it lists.

    timeout_s bounds each wait for the server's next bytes. Raises ChatError for a URL that cannot be used.
    """

    def __init__(self, url: str, *, model: str | None, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ChatError(f"URL {url!r} is not valid: {error}") from error
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise ChatError(f"URL {url!r} cannot be used: write http://HOST:PORT or https://HOST/v1")
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else path + "/v1"
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.name = model or ""

    def check(self, raw: bool) -> None:
        if self.name:
            return
        connection, response = self._request("GET", "/models", None)
        try:
            models = _json(response.read(_MAX_LINE_BYTES), "the list of models")
            self.name = models["data"][0]["id"]
        except (LookupError, TypeError) as error:
            raise ChatError(f"{self.url} lists no model: name one with --model") from error
        finally:
            connection.close()

    def reply(self, session: Session) -> Reply:
        body: dict[str, Any] = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}}
        body |= {key: list(value) if isinstance(value, tuple) else value for key, value in session.sampling.items()}
        if session.raw:
            body["prompt"] = session.request_text()
        else:
            body["messages"] = session.request_messages()
        reply = Reply(iter(()))
        reply.pieces = self._stream("/completions" if session.raw else "/chat/completions", body, reply)
        return reply

    def _stream(self, path: str, body: Mapping[str, Any], reply: Reply) -> Iterator[Piece]:
        start = time.monotonic()
        connection, response = self._request("POST", path, body)
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
                    # The second is what newer servers call it.
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
                f"{self.url} answered with what is no completion: is it an OpenAI-compatible server?"
            ) from error
        finally:
            # Closing it is what tells the server to stop.
            connection.close()

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events, up to [DONE]."""
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
            connection.request(method, self._base + path, payload, self._headers)
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
            message = _message(json.loads(content), "")
        except ValueError:
            message = ""
        hint = " (pass --api-key, or set LLMC_API_KEY)" if response.status == 401 else ""
        raise ChatError(f"{self.url} answered {response.status}: {message or response.reason}{hint}")

    def close(self) -> None:
        """Nothing is kept open between answers."""


def _json(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ChatError(f"the server sent {what} that is not JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise ChatError(f"the server sent {what} that is not an object: {data[:80]!r}")
    return value


def _message(data: Any, otherwise: str) -> str:
    """The sentence of an error in OpenAI's shape."""
    error = data.get("error", data) if isinstance(data, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else otherwise


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split()).lower() if isinstance(error, OSError) else " ".join(text.split())
