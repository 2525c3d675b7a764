"""Images in the messages of a chat: takes them out, so that templates see only that there is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmc.runtime.images.image_error import ImageError
from llmc.runtime.images.sources import check_url
from llmc.runtime.text.chat_template import IMAGE

KINDS = frozenset({"image", "image_url", "input_image"})
"""Types of parts that are images, in the APIs of OpenAI and Anthropic, and in transformers."""
_URLS = ("url", "image_url", "source")
"""Keys of a part that may hold the URL of an image."""
_ANYTHING = ("image", "path")
"""Keys of a part of the type `image` that may hold whatever an image may be given as."""


def is_image(part: Any) -> bool:
    """Whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") in KINDS


def has_images(messages: Any) -> bool:
    """Whether a conversation has images; any other value has none."""
    return isinstance(messages, Sequence) and any(
        is_image(part)
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def without_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """The messages with `IMAGE` for each image, and what the parts hold, in order: a URL, or in Python whatever an
    image may be given as. Raises ImageError."""
    found: list[Any] = []
    plain: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            plain.append(message)
            continue
        found += [held(part) for part in content if is_image(part)]
        plain.append({**message, "content": [dict(IMAGE) if is_image(part) else part for part in content]})
    return plain, found


def held(part: Mapping[str, Any]) -> Any:
    """What a part's image is given as. Raises ImageError.

    Only a part of the type `image` names files, and never by a URL: programs pass on messages that others wrote.
    """
    kept = next((part[name] for name in _ANYTHING if part.get(name) is not None), None)
    if part["type"] == "image" and kept is not None and not isinstance(kept, Mapping):
        return kept
    value = next((part[name] for name in _URLS if part.get(name) is not None), kept)
    if isinstance(value, Mapping):
        value = value.get("url") or _of_source(value)
    if value is None:
        raise ImageError(f"a part of the type {part['type']} has no image: give it as a data: URL")
    check_url(value)
    return value


def _of_source(source: Mapping[str, Any]) -> str | None:
    """A data: URL of Anthropic's source."""
    data = source.get("data")
    return f"data:{source.get('media_type', '')};base64,{data}" if isinstance(data, str) else None


def check_texts(texts: Any, placeholder: str, name: str = "messages") -> None:
    """Raises ImageError if a text of a conversation has the placeholder of images, which only templates write."""
    for at, text in _texts(texts, name):
        if placeholder in text:
            raise ImageError(f"{at} has the text {placeholder}, which stands for an image: write it in another way")


def _texts(value: Any, at: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{at}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _texts(item, f"{at}.{index}")
