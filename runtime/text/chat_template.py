"""Chat templates: Jinja text that turns a conversation into a prompt, run in a sandbox as in transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.manifest import ManifestError, read_listed
from llmc.regular_file import decoded
from llmc.runtime.request_error import RequestError
from llmc.shown import shown

if TYPE_CHECKING:
    from jinja2 import Template

# No conversation that fits a context takes that long; templates with endless loops do.
MAX_CPU_S = 5.0
# All special token names that tokenizer_config.json may define for templates.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Keys of a message's reasoning, by age: templates read the first, some the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# A template that reads contents as lists of parts looks at their types.
_LOOKS_AT_TYPES = re.compile(r"""\.type\b|['"]type['"]""")
IMAGE = {"type": "image"}
"""A part that is an image, as templates see it."""
_PROBE = "llmc-probe"
_QUOTED = re.compile(rf"""text['"]:\s*['"]{_PROBE}""")
# tokenizer_class of tokenizers whose own code sorts the keys of tools before it renders them: Kimi's.
_SORTS_TOOLS = frozenset({"TikTokenTokenizer"})


class ChatTemplateError(RuntimeError):
    """The model has no chat template, or a damaged one; the message is one sentence."""


class ChatTemplates:
    """The templates of a model: chat_template.jinja, or `chat_template` of tokenizer_config.json (one, or named ones).

    path: directory of the files. config: tokenizer_config.json. source: a template instead of the model's own, or the
    name of one of the model's. Raises ChatTemplateError for a file that cannot be read; a template's syntax is checked
    at its first use.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], source: str | None = None) -> None:
        self._sources = _read_templates(path, config) if source is None else _given(path, config, source)
        self._compiled: dict[str, Template] = {}
        self._readable: dict[tuple[str, str, bool, bool], bool] = {}
        self._special = {name: text for name in _SPECIAL_TOKENS if (text := token_text(config.get(name))) is not None}
        self._sorts_tools = config.get("tokenizer_class") in _SORTS_TOOLS

    def __bool__(self) -> bool:
        """Whether the model has any."""
        return bool(self._sources)

    @property
    def text(self) -> str:
        """The source of all templates, which shows how the model writes calls and reasoning."""
        return "\n".join(self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        placeholder: str | None = None,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation. `tools` are JSON schemas, `variables` any further variables of the template.

        placeholder: what stands for an image in a text, for a template that reads no parts; None: messages may have no
        images.

        With tools, the template named tool_use is preferred to the default one. A text becomes a list of one part for a
        template that would leave it out otherwise, as those of models with images may. Parts of a text stay parts for a
        template that reads them, and become lines of one text for others. Raises RequestError for messages that are
        malformed or that the template refuses, and its subclass OutOfTime when rendering takes more than MAX_CPU_S.
        Raises ChatTemplateError when there is no valid template.
        """
        from llmc.runtime.text.template_sandbox import OutOfTime, limited

        name = self._name(tools is not None)
        template = self._template(name)
        conversation = _check_messages(messages, images=placeholder is not None)
        begun = conversation[0]["role"] == "system"
        for message in conversation:
            if "content" in message:
                message["content"] = self._as_read(message["content"], name, message["role"], begun, placeholder)
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise RequestError("tools must be a list of JSON objects, each the schema of a function")
        shown = None if tools is None else _plain(tools)
        # Passed in one dictionary, because a variable may have the name of an argument of the library's function.
        given = {
            **self._special,
            "documents": None,
            **_plain(variables),
            "messages": conversation,
            "tools": _sorted(shown) if self._sorts_tools else shown,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with limited(MAX_CPU_S):
                return template.render(given)
        except OutOfTime:
            raise
        except Exception as error:  # any exception that the template's code raises
            raise RequestError(f"the chat template refuses these messages: {_one_line(error)}") from error

    def _name(self, with_tools: bool) -> str:
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            named = f", only {', '.join(sorted(self._sources))}" if self._sources else ""
            raise ChatTemplateError(f"this model has no default chat template{named}: use plain prompts, without chat")
        return name

    def _template(self, name: str) -> Template:
        from jinja2 import TemplateError

        from llmc.runtime.text.template_sandbox import environment

        if name not in self._compiled:
            try:
                self._compiled[name] = environment().from_string(self._sources[name])
            except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:
                # Python's own parser has limits, too, and deep nesting in a template may reach them.
                raise ChatTemplateError(f"the chat template {name} is not valid: {_one_line(error)}") from error
        return self._compiled[name]

    def _as_read(
        self, content: str | list[dict[str, str]], name: str, role: str, begun: bool, placeholder: str | None
    ) -> Any:
        """A content as the template reads it. begun: a system message begins the conversation."""
        if isinstance(content, str):
            is_lost = self._reads(name, role, begun, parts=True) and not self._reads(name, role, begun, parts=False)
            return _as_parts(content) if is_lost else content
        if self._reads(name, role, begun, parts=True):
            return content
        return "\n".join(part["text"] if part["type"] == "text" else placeholder or "" for part in content)

    def _reads(self, name: str, role: str, begun: bool, *, parts: bool) -> bool:
        """Whether a message of that role shows its text if its content is a list of parts, or a text."""
        if parts and not _LOOKS_AT_TYPES.search(self._sources[name]):
            return False
        key = (name, role, begun, parts)
        if key not in self._readable:
            self._readable[key] = self._shows(name, role, begun, _as_parts(_PROBE) if parts else _PROBE)
        return self._readable[key]

    def _shows(self, name: str, role: str, begun: bool, content: Any) -> bool:
        """Whether a prompt has the text of a message with that content. Raises OutOfTime."""
        from llmc.runtime.text.template_sandbox import OutOfTime, limited

        message, user = {"role": role, "content": content}, {"role": "user", "content": _as_parts("-")}
        conversation = {"system": [message, user], "assistant": [user, message]}.get(role, [message])
        if begun and role != "system":
            conversation = [{"role": "system", "content": "-"}, *conversation]
        given = {**self._special, "messages": conversation, "tools": None, "documents": None}
        try:
            with limited(MAX_CPU_S):
                prompt = self._template(name).render({**given, "add_generation_prompt": False})
                # In quotes it is a part that is printed as a whole.
                return _PROBE in prompt and not _QUOTED.search(prompt)
        except OutOfTime:
            raise
        except Exception:  # any exception that the template's code raises
            return False


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def token_text(value: Any) -> str | None:
    """Text of a special token of tokenizer_config.json, which is a string or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _given(path: Path, config: Mapping[str, Any], source: str) -> dict[str, str]:
    """The template that takes the place of the model's, whose own may be damaged. A name is one of the model's, as in
    transformers."""
    try:
        return {"default": _read_templates(path, config).get(source, source)}
    except ChatTemplateError:
        return {"default": source}


def _read_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name → source; the file takes the place of all templates in the configuration, as in transformers."""
    alone = "chat_template.jinja"
    try:
        content = read_listed(path, alone)
        if content is not None:
            return {"default": decoded(content)}
    except ManifestError as error:
        raise ChatTemplateError(str(error)) from None
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"cannot read {path / alone}: {_one_line(error)}") from error
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
    return templates


def _check_messages(messages: Sequence[Mapping[str, Any]], *, images: bool) -> list[dict[str, Any]]:
    """Plain copies of the messages, with the reasoning under every key that templates read. images: parts may be images
    that were taken out."""
    if not messages:
        raise RequestError("the list of messages is empty: give at least one message")
    conversation = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {index} is {message!r}: give an object with role and content")
        content = message.get("content")
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise RequestError(f"message {index} has the content {content!r}: give a text or a list of parts")
        for part in content if isinstance(content, list) else ():
            if images and part == IMAGE:
                continue
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise RequestError(
                    f'message {index} has the part {shown(part)}: models here read text: give {{"type": "text", '
                    '"text": …}'
                )
        # Templates handle a missing key better than null, which some would print.
        copy = _plain({key: value for key, value in message.items() if value is not None})
        reasoning = next((copy[name] for name in _REASONING if name in copy), None)
        if reasoning is not None:
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        conversation.append(copy)
    return conversation


def _plain(value: Any) -> Any:
    """`value` rebuilt from JSON types, so that a template, which is foreign code, cannot call methods of other
    objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise RequestError(f"a message or template variable holds a {type(value).__name__}: use JSON types")


def _sorted(value: Any) -> Any:
    """JSON types with the keys of all objects in order."""
    if isinstance(value, dict):
        return {key: _sorted(item) for key, item in sorted(value.items())}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
