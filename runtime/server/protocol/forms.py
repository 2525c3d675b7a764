"""Forms that answers may be constrained to: the shapes of response_format, structured_outputs and the like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from ..structural_tags import MAX_TAGS
from .shapes import NULL, Items, Rule, Text, one_of, shaped, type_of


def _kind_of_schema(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else None
    return "text" if isinstance(value, str) else "object" if isinstance(value, dict) else None


# Compiling a schema validates it; false allows no value.
GuidedJson = Annotated[
    str | dict[str, Any] | bool,
    shaped(
        one_of(
            "give a JSON schema that some value satisfies, or its JSON text",
            _kind_of_schema,
            {"object": dict[str, Any], "text": str, "true": Literal[True]},
        )
    ),
]
Choices = Annotated[Items[Text], Field(min_length=1)]


class TextForm(TypedDict):
    type: Literal["text"]


class ObjectForm(TypedDict):
    type: Literal["json_object"]


class NamedSchema(TypedDict):
    """Without a schema any object is meant."""

    name: NotRequired[str | None]
    schema: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class SchemaForm(TypedDict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class ResponseSchemaForm(NamedSchema):
    type: Literal["json_schema"]


class MessagesSchemaForm(TypedDict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


_Triggers = Annotated[Items[Text], Field(min_length=1, max_length=MAX_TAGS)]


class Structure(TypedDict):
    begin: str
    schema: dict[str, Any]
    end: str


class OlderTags(TypedDict):
    structures: Annotated[Items[Structure], Field(min_length=1, max_length=MAX_TAGS)]
    triggers: _Triggers
    format: NotRequired[None]


class TagContent(TypedDict):
    type: Literal["json_schema"]
    json_schema: dict[str, Any]


class Tagged(TypedDict):
    begin: str
    content: TagContent
    end: str


class TriggeredTags(TypedDict):
    type: Literal["triggered_tags"]
    tags: Annotated[Items[Tagged], Field(min_length=1, max_length=MAX_TAGS)]
    triggers: _Triggers
    stop_after_first: NotRequired[bool | None]
    at_least_one: NotRequired[bool | None]


class NewerTags(TypedDict):
    format: TriggeredTags


class OlderTagsForm(OlderTags):
    type: Literal["structural_tag"]


class NewerTagsForm(NewerTags):
    type: Literal["structural_tag"]


def _kind_of_tags(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, Mapping):
        return None
    return "older" if value.get("format") is None else "newer"


_TAGS = '{"triggers": ["<f="], "structures": [{"begin": "<f=x>", "schema": {…}, "end": "</f>"}]}'
StructuralTag = Annotated[
    str | dict[str, Any],
    shaped(one_of(f"give {_TAGS}", _kind_of_tags, {"text": str, "older": OlderTags, "newer": NewerTags})),
]


def _kind_of_form(value: Any) -> str | None:
    kind = type_of(value)
    return _kind_of_tags(value) if kind == "structural_tag" else kind


def _form(schema: Any) -> Any:
    return shaped(
        one_of(
            "use the type text, json_object, json_schema or structural_tag",
            _kind_of_form,
            {
                "text": TextForm,
                "json_object": ObjectForm,
                "json_schema": schema,
                "older": OlderTagsForm,
                "newer": NewerTagsForm,
            },
        )
    )


ResponseFormat = Annotated[dict[str, Any], _form(SchemaForm)]
ResponseTextFormat = Annotated[dict[str, Any], _form(ResponseSchemaForm)]

# Kinds of structured_outputs; a request may use one.
_KINDS = ("json", "regex", "choice", "grammar", "structural_tag", "json_object")
_QUIET = {**dict.fromkeys(_KINDS, NULL), "json_object": {"enum": [None, False]}}


class StructuredOutputs(TypedDict):
    json: NotRequired[GuidedJson | None]
    regex: NotRequired[Text | None]
    choice: NotRequired[Choices | None]
    grammar: NotRequired[Text | None]
    structural_tag: NotRequired[StructuralTag | None]
    json_object: NotRequired[bool | None]
    disable_additional_properties: NotRequired[bool | None]


def _only_what_is_known(given: dict[str, Any]) -> None:
    unknown = [name for name in given.keys() - StructuredOutputs.__annotations__.keys() if given[name] is not None]
    if unknown:
        raise ValueError(f"{min(unknown)!r} is not supported: use one of {', '.join(_KINDS)}")


Structured = Annotated[
    dict[str, Any],
    shaped(
        Annotated[
            StructuredOutputs,
            Rule(
                _only_what_is_known,
                {
                    "additionalProperties": NULL,
                    "anyOf": [
                        {"properties": {name: quiet for name, quiet in _QUIET.items() if name != kind}}
                        for kind in _KINDS
                    ],
                },
            ),
        ]
    ),
]
