"""Shapes of nested dictionaries in requests, and rules that OpenAPI documents contain as well."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import Discriminator, FailFast, Field, GetJsonSchemaHandler, GetPydanticSchema, Tag
from pydantic.annotated_handlers import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

NULL = {"type": "null"}
# Values of a field that mean "off"; an unsupported field may have them.
OFF: tuple[Any, ...] = (None, False, "", [], {})
_Item = TypeVar("_Item")


def is_off(value: Any) -> bool:
    """Whether an unsupported field may have this value; 0 is a number, not False."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


class _FailFast(FailFast):
    """Pydantic's own has no hash, so its type could not be part of a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


# Only the first error is reported: an object for each would take seconds.
Items = Annotated[list[_Item], _FailFast()]
Objects = Items[dict[str, Any]]
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class Rule:
    """A rule for a value of any type. check: raises ValueError. said: the rule in JSON Schema."""

    check: Callable[[Any], None]
    said: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash(self.check)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        handler.resolve_ref_schema(schema).update(self.said)
        return schema

    def _checked(self, value: Any) -> Any:
        self.check(value)
        return value


def shaped(shape: Any) -> GetPydanticSchema:
    """Annotates a plain dictionary in the code so that it is checked against a shape."""
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(shape))


def one_of(
    hint: str, kind_of: Callable[[Any], str | None], shapes: Mapping[str, Any], code: str = "invalid_value"
) -> Any:
    """A union. kind_of: the entry of `shapes` that a value is meant to have. hint: advice if it has none."""
    # Names of branches must not look like field names, which errors report.
    tagged = tuple(Annotated[shape, Tag(f"<{kind}>")] for kind, shape in shapes.items())
    choose = Discriminator(lambda value: f"<{kind_of(value)}>", custom_error_type=code, custom_error_message=hint)
    return Annotated[functools.reduce(operator.or_, tagged), choose]


def type_of(value: Any, default: str | None = None) -> str | None:
    """The field `type` of an object, `default` if missing. None: unknown."""
    if not isinstance(value, Mapping):
        return None
    kind = value.get("type")
    return default if kind is None else kind if isinstance(kind, str) else None


class TextPart(TypedDict):
    type: Literal["text", "input_text"]
    text: str


class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


def text_part(said: Any = TextPart, *, refusals: bool = False, image: Any = None) -> Any:
    """A text part. said: a TypedDict like TextPart. refusals: whether OpenAI's refusals also count as text. image: a
    TypedDict of parts that are images instead; None: there are none."""
    kinds = get_args(get_type_hints(said)["type"])
    shapes = {"text": said, "refusal": RefusalPart} if refusals else {"text": said}
    others = ""
    if image is not None:
        (other,) = get_args(get_type_hints(image)["type"])
        shapes[other] = image
        others = f", or the type {other}"

    def kind_of(value: Any) -> str | None:
        kind = type_of(value)
        return "text" if kind in kinds else kind

    return one_of(f'models here read text: give {{"type": "{kinds[0]}", "text": …}}{others}', kind_of, shapes)


def text_content(said: Any = TextPart, *, refusals: bool = False, image: Any = None) -> Any:
    """A string, or a list of text parts, or of images."""
    kind = get_args(get_type_hints(said)["type"])[0]
    parts = list_of(text_part(said, refusals=refusals, image=image))
    return one_of(f"give a string, or a list of parts of the type {kind}", text_or_list, {"text": str, "list": parts})


def list_of(item: Any, *, min_length: int | None = None, max_length: int | None = None) -> Any:
    """A list whose items have a shape."""
    return Annotated[Items[item], Field(min_length=min_length, max_length=max_length)]


def text_or_list(value: Any) -> str | None:
    """Kind of a value for `one_of`."""
    return "text" if isinstance(value, str) else "list" if isinstance(value, list) else None
