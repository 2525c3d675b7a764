"""Images in messages of requests, as parts of contents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from llmc.runtime.images.sources import URL_PATTERN, check_url

from .shapes import Rule, one_of, shaped, type_of

_URL = {"pattern": URL_PATTERN}
ImageData = Annotated[str, Rule(check_url, _URL)]
"""A data: URL."""


class ImageUrl(TypedDict):
    """detail: has no effect, since a model sees its images in one way."""

    url: ImageData
    detail: NotRequired[str | None]


class ChatImage(TypedDict):
    """Of /v1/chat/completions."""

    type: Literal["image_url"]
    image_url: Annotated[Any, shaped(ImageUrl)]


class ResponseImage(TypedDict):
    """Of /v1/responses."""

    type: Literal["input_image"]
    image_url: ImageData
    detail: NotRequired[str | None]


class GivenBytes(TypedDict):
    type: Literal["base64"]
    media_type: str
    data: str


class GivenUrl(TypedDict):
    type: Literal["url"]
    url: ImageData


class BlockImage(TypedDict):
    """Of /v1/messages."""

    type: Literal["image"]
    source: Annotated[
        Any,
        shaped(
            one_of(
                'give the bytes of the image: {"type": "base64", "media_type": "image/png", "data": …}',
                type_of,
                {"base64": GivenBytes, "url": GivenUrl},
            )
        ),
    ]


def as_chat_image(part: Mapping[str, Any]) -> dict[str, Any]:
    """The same image as a part of a chat's message."""
    source = part.get("source")
    if source is None:
        url = part["image_url"]
    elif source["type"] == "url":
        url = source["url"]
    else:
        url = f"data:{source['media_type']};base64,{source['data']}"
    return {"type": "image_url", "image_url": {"url": url}}
