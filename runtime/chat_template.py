"""Chat templates: the Jinja text that turns a conversation into a prompt, run in a sandbox as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .params import RequestError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

# Every name of a special token that tokenizer_config.json may define for templates.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What a message's reasoning is called, by age; templates read the first, some the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(RuntimeError):
    """A model without a chat template, or with a damaged one; the message is one sentence."""


class ChatTemplates:
    """The templates of a model: chat_template.jinja, or `chat_template` of tokenizer_config.json (one, or named ones).

    path: directory of the files. config: tokenizer_config.json. source: a template instead of the model's own. Raises
    ChatTemplateError for a file that cannot be read; a template's syntax is checked at its first use.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], source: str | None = None) -> None:
        self._sources = _read_templates(path, config) if source is None else {"default": source}
        self._compiled: dict[str, Template] = {}
        self._special = {name: text for name in _SPECIAL_TOKENS if (text := token_text(config.get(name))) is not None}

    def __bool__(self) -> bool:
        """Whether the model has any."""
        return bool(self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation; `tools` are JSON schemas, `variables` whatever else the template reads.

        With tools the template named tool_use is taken when there is one, else the default one. Raises RequestError
        for messages that are malformed or that the template refuses, ChatTemplateError when there is no valid template.
        """
        template = self._template(tools is not None)
        conversation = _check_messages(messages)
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise RequestError("tools must be a list of JSON objects, each the schema of a function")
        try:
            # In one dictionary: a variable may be called as an argument of the library's function is.
            return template.render(
                {
                    **self._special,
                    **_plain(variables),
                    "messages": conversation,
                    "tools": None if tools is None else _plain(tools),
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except RequestError:
            raise
        except Exception as error:  # whatever the template's own code raises
            raise RequestError(f"the chat template refuses these messages: {_one_line(error)}") from error

    def _template(self, with_tools: bool) -> Template:
        from jinja2 import TemplateError

        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            named = f", only {', '.join(sorted(self._sources))}" if self._sources else ""
            raise ChatTemplateError(f"this model has no default chat template{named}: use plain prompts, without chat")
        if name not in self._compiled:
            try:
                self._compiled[name] = _environment().from_string(self._sources[name])
            except TemplateError as error:
                raise ChatTemplateError(f"the chat template {name} is not valid: {_one_line(error)}") from error
        return self._compiled[name]


def token_text(value: Any) -> str | None:
    """Text of a special token of tokenizer_config.json, which is a string or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name → source; the file wins over the configuration, as in transformers."""
    configured = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        for item in configured:
            name, text = (item.get("name"), item.get("template")) if isinstance(item, Mapping) else (None, None)
            if not isinstance(name, str) or not isinstance(text, str):
                where = path / "tokenizer_config.json"
                raise ChatTemplateError(f"chat_template of {where} has an entry without name and template: {item!r}")
            templates[name] = text
    elif configured is not None:
        raise ChatTemplateError(f"chat_template of {path / 'tokenizer_config.json'} is neither a text nor a list")
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            templates["default"] = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ChatTemplateError(f"cannot read {file}: {_one_line(error)}") from error
    return templates


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Plain copies of the messages, their reasoning under every name that templates read."""
    if not messages:
        raise RequestError("the list of messages is empty: give at least one message")
    conversation = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {index} is {message!r}: give an object with role and content")
        content = message.get("content")
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise RequestError(f"message {index} has the content {content!r}: give a text or a list of parts")
        # Templates handle a missing key better than null, which some would print.
        copy = _plain({key: value for key, value in message.items() if value is not None})
        reasoning = next((copy[name] for name in _REASONING if name in copy), None)
        if reasoning is not None:
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        conversation.append(copy)
    return conversation


def _plain(value: Any) -> Any:
    """`value` rebuilt from JSON types, so that a template, which is foreign code, meets no other object's methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise RequestError(f"a message or template variable holds a {type(value).__name__}: use JSON types")


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that templates are written for: that of transformers' apply_chat_template."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks the assistant's tokens for training; here its body is just text."""

        tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class PublicNamespace(Namespace):
        """A namespace whose names cannot reach Python's internals."""

        def __init__(*args: Any, **values: Any) -> None:
            # self is positional only, so that a template may store a value of that name.
            namespace, *rest = args
            fields = dict(*rest, **values)
            for name in fields:
                check_name(name)
            Namespace.__init__(namespace, fields)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    def check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r} starts with an underscore")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        from datetime import datetime

        return datetime.now().strftime(form)

    class Dict:
        """`dict` without the rest of Python's type."""

        def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
            return dict(*args, **values)

        def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
            return dict.fromkeys(keys, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, namespace=PublicNamespace, dict=Dict()
    )
    return environment


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
