"""Converts text and conversations to token ids for the engine, and bounds the length of answers."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmc.runtime.images.image_prompt import ImagePrompt, chat_prompt
from llmc.runtime.images.sources import from_url
from llmc.runtime.request_error import RequestError
from llmc.runtime.text.chat_template import IMAGE as IMAGE_PART
from llmc.runtime.text.template_sandbox import OutOfTime, limited
from llmc.runtime.text.tokenizer import TooManyTokens

from .async_engine import AsyncEngine
from .context import ServerContext
from .errors import ApiError
from .lanes import SMALL
from .protocol.as_chat import text_of
from .refusals import CONTEXT, EMPTY, IMAGE, TEMPLATE

_CHARS_A_MESSAGE = 32
_MANY_CHARS = SMALL + 1
# Time limit of a template on the event loop; most take a tenth of it.
_AT_ONCE_S = 0.005
_MAX_CHARS, _MAX_CHARS_A_TOKEN = 1 << 20, 16
# A list of that many ids is made in about 20 ms.
MAX_TEXT_TOKENS = 1 << 18
_EXCEEDED = f" ({CONTEXT})"  # clients that read no code look for it in the text


async def encode_prompts(
    server: ServerContext,
    prompts: Sequence[str | Sequence[int]],
    *,
    add_special_tokens: bool = True,
    truncate: int | None = None,
) -> list[list[int]]:
    """Token ids of texts or of token ids; with `truncate` the last that many of each. Raises ApiError and
    RequestError."""
    tokenizer = server.tokenizer if any(isinstance(prompt, str) for prompt in prompts) else None
    most = _most(server, truncate)

    def ids_of(prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        assert tokenizer is not None
        return tokenizer.encode_prompt(prompt, add_special_tokens=add_special_tokens, most=most)

    for prompt in prompts:
        if isinstance(prompt, str):
            check_chars(server, prompt)
    with _too_long(server):
        found = await server.lanes.run(lambda: [ids_of(prompt) for prompt in prompts], sum(map(len, prompts)))
    return [check_prompt(server, ids if truncate is None else ids[-truncate:]) for ids in found]


async def encode_chat(
    server: ServerContext, messages: Sequence[Mapping[str, Any]], *, truncate: int | None = None, **options: Any
) -> tuple[list[int], ImagePrompt]:
    """`encode_chat_ids`, reduced to the last `truncate` ids. Raises ApiError if the engine cannot take them."""
    with _too_long(server):
        ids, images = await encode_chat_ids(server, messages, most=_most(server, truncate), **options)
    if truncate is not None and images.pictures:
        why = "truncate_prompt_tokens would cut images: leave it out, or send fewer of them"
        raise ApiError(why, param="truncate_prompt_tokens", code=IMAGE)
    return check_prompt(server, ids if truncate is None else ids[-truncate:]), images


def _most(server: ServerContext, truncate: int | None) -> int:
    """Number of tokens up to which ids are wanted; beyond it tokens are only counted."""
    return MAX_TEXT_TOKENS if truncate is not None else min(MAX_TEXT_TOKENS, server.engine.max_model_len)


@contextlib.contextmanager
def _too_long(server: ServerContext) -> Iterator[None]:
    try:
        yield
    except TooManyTokens as error:
        raise _exceeded(server, error.num_tokens) from error


async def encode_chat_ids(
    server: ServerContext,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    most: int = MAX_TEXT_TOKENS,
) -> tuple[list[int], ImagePrompt]:
    """Token ids of a conversation, rendered with the model's chat template, and its images, which are not encoded yet.
    Raises ApiError and RequestError."""
    tokenizer = server.tokenizer

    def render(messages: Sequence[Mapping[str, Any]], placeholder: str | None) -> str:
        conversation = [_for_template(message) for message in messages]
        if continue_final_message and isinstance(messages[-1].get("content"), list):
            if IMAGE_PART in messages[-1]["content"]:
                _found(-1)
            conversation[-1]["content"] = text_of(messages[-1]["content"])
        mark = None
        if continue_final_message and not conversation[-1].get("tool_calls"):
            mark = _mark_if_empty(conversation[-1])
        try:
            text = tokenizer.apply_chat_template(
                conversation,
                placeholder,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                **(variables or {}),
            )
        except OutOfTime:
            raise
        except RequestError as error:
            raise ApiError(str(error), param="messages", code=TEMPLATE) from error
        if continue_final_message:
            text = _cut_after(text, conversation[-1]) if mark is None else _cut_before(text, mark)
        return text

    def work() -> tuple[list[int], ImagePrompt]:
        others = {"tools": tools, "chat_template_kwargs": variables}
        prompt = chat_prompt(server.images.tower, messages, others, render, from_url)
        check_chars(server, prompt.text)
        # The template writes the special tokens itself.
        ids = tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens, most=most)
        prompt.check(ids)
        return ids, prompt

    size = _num_chars(messages) + (_MANY_CHARS if tools or variables else 0)
    if size <= SMALL:
        # The template decides what it accepts, not the messages alone.
        with contextlib.suppress(OutOfTime), limited(_AT_ONCE_S):
            return work()
    return await server.lanes.run(work, max(size, SMALL + 1))


def _num_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Approximate number of characters of the rendered conversation."""
    contents = [message.get("content") for message in messages]
    return sum(_CHARS_A_MESSAGE + (len(text) if isinstance(text, str) else _MANY_CHARS) for text in contents)


def check_chars(server: ServerContext, text: str) -> None:
    """Raises ApiError for a text too long to look at: tokenizing takes about 150 bytes per token."""
    most = max(_MAX_CHARS, _MAX_CHARS_A_TOKEN * server.engine.max_model_len)
    if len(text) > most:
        found = f"the prompt has {len(text)} characters: at most {most} are read"
        why = f"{context_of(server.engine)}, and {found}{_EXCEEDED}"
        raise ApiError(why, param="prompt", code=CONTEXT)


def check_prompt(server: ServerContext, ids: list[int]) -> list[int]:
    """`ids` if the engine can take them. Raises ApiError."""
    if not ids:
        raise ApiError("the prompt has no tokens: give at least one", param="prompt", code=EMPTY)
    if len(ids) >= server.engine.max_model_len:
        raise _exceeded(server, len(ids))
    return ids


def _exceeded(server: ServerContext, num_tokens: int) -> ApiError:
    limit = server.engine.max_model_len
    return ApiError(
        f"{context_of(server.engine)}, and the prompt has {num_tokens}: shorten it to at most {limit - 1}{_EXCEEDED}",
        param="prompt",
        code=CONTEXT,
    )


def context_of(engine: AsyncEngine) -> str:
    """The beginning of an error message in OpenAI's words, which clients look for."""
    limit = engine.limit
    where = f" here, where the KV pool holds fewer than its {limit.model_tokens}" if limit.by_pool else ""
    return f"This model's maximum context length is {limit.tokens} tokens{where}"


def checked_max_tokens(server: ServerContext, asked: int, num_prompt_tokens: int, param: str) -> int:
    """`asked` if prompt and answer fit the context. Raises ApiError."""
    limit = server.engine.max_model_len
    if num_prompt_tokens + asked > limit:
        raise ApiError(
            f"{context_of(server.engine)}, but {num_prompt_tokens + asked} were requested "
            f"({num_prompt_tokens} of the prompt, {asked} of {param}): ask for at most "
            f"{limit - num_prompt_tokens}{_EXCEEDED}",
            param=param,
            code=CONTEXT,
        )
    return asked


def rest_of_context(server: ServerContext, num_prompt_tokens: int) -> int:
    """Length limit of an answer if its request names none."""
    rest = server.engine.max_model_len - num_prompt_tokens
    limit = server.engine.generation_config.get("max_new_tokens")
    if server.config.generation_config == "none" or not isinstance(limit, int) or limit < 1:
        return rest
    return min(rest, limit)


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: parts are text parts, arguments of tool calls objects, developer is system."""
    plain = dict(message)
    if plain["role"] == "developer":
        plain["role"] = "system"
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = [
            part if part == IMAGE_PART else {"type": "text", "text": text_of([part])} for part in content
        ]
    elif content is None:
        plain["content"] = ""
    if plain.get("tool_calls") is not None:
        plain["tool_calls"] = [_call_for_template(call) for call in plain["tool_calls"]]
    return plain


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        # A model's own text need not be JSON; then it is passed on unchanged.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _mark_if_empty(message: dict[str, Any]) -> str | None:
    """Gives a message without text a marker that shows where its text would be. None if it has text."""
    if str(message.get("content") or "").strip():
        return None
    message["content"] = mark = f"begin-{uuid.uuid4().hex}"
    return mark


def _cut_before(text: str, mark: str) -> str:
    return text[: _found(text.rfind(mark))]


def _cut_after(text: str, message: Mapping[str, Any]) -> str:
    """`text` up to the end of the last message's content."""
    final = str(message.get("content") or "").strip()
    return text[: _found(text.rfind(final) if final else -1) + len(final)]


def _found(position: int) -> int:
    if position < 0:
        reason = "the chat template does not show the last message as it is"
        raise ApiError(f"continue_final_message: {reason}", param="continue_final_message", code=TEMPLATE)
    return position
