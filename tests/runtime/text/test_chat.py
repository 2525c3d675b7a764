"""Chat templates: the same text and token ids as transformers, selection of templates, and what is refused."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from llmc.runtime.request_error import RequestError
from llmc.runtime.text import chat_template
from llmc.runtime.text.chat_template import ChatTemplateError, ChatTemplates
from llmc.runtime.text.template_sandbox import OutOfTime
from llmc.runtime.text.tokenizer import Tokenizer

from support.paths import SHARED

SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}

# The styles of three families, each with what sets it apart.
LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{% endif %}
{{- "Today: " + (date_string or strftime_now("%d %b %Y")) + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("only one call at once") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages %}
    {%- if loop.index0 == ns.last %}{% set ns.found = true %}{% endif %}
    {%- if message.role == "system" and not loop.first %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.reasoning_content %}
        {{- '\\n<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {%- if message.content %}
        {{- '\\n' + message.content }}
    {%- endif %}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + (tool_call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {% generation %}{{ '<|im_end|>' }}{% endgeneration %}

{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}
{%- for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {%- if tools is not none and loop.last %}
        [AVAILABLE_TOOLS] {{ tools | tojson(separators=(',', ':'), sort_keys=true) }}[/AVAILABLE_TOOLS]
    {%- endif %}
    {% if message['role'] == 'user' %}
[INST] {{ message['content'] }} [/INST]
    {% else %}
 {{ message['content'] }}{{ eos_token }}
    {% endif %}
{% endfor %}
{{ dict(a=1) | tojson }} {{ dict.fromkeys(['b']) | tojson }}
"""
TEMPLATES = {"llama3": LLAMA3, "qwen2.5": QWEN25, "mistral": MISTRAL}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a <city> & 'more' – ünïcode",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2.5, None]}}}]
USER = {"role": "user", "content": " How warm is it in Zürich? <b>&\"'</b> "}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "turns": [USER, {"role": "assistant", "content": "21 °C\n"}, {"role": "user", "content": "And at night?"}],
    "system": [{"role": "system", "content": "Be short.\n"}, USER],
    "calls": [USER, {"role": "assistant", "content": None, "tool_calls": CALL}, {"role": "tool", "content": "21 °C"}],
    "reasoning": [USER, {"role": "assistant", "thinking": "hm", "content": "21"}, {"role": "user", "content": "?"}],
    "system and turns": [
        {"role": "system", "content": "Be short.\n"},
        USER,
        {"role": "assistant", "content": "  21 °C"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "It cools."},
    ],
    "called twice": [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [{**CALL[0], "id": "abcdefghi"}] * 2},
        {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "21 °C"},
        {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": '{"t": 20}'},
        {"role": "assistant", "content": "21 °C"},
        {"role": "user", "content": "Sure?"},
    ],
}

ROLES = "Conversation roles must alternate user/assistant/user/assistant/..."
REFUSED = {
    "mistral": dict.fromkeys(("system", "system and turns", "calls", "called twice"), ROLES),
    "llama3": {"called twice": "only one call at once"},
}
"""What a template objects to in a conversation."""


def folder(path: Path, config: dict[str, Any], template_file: str | None = None) -> Path:
    """A tokenizer's files: a few words, `config`, and a template file if there is one."""
    backend = Backend(WordLevel({"<unk>": 0, **{t: i for i, t in enumerate(SPECIAL.values(), 1)}}, unk_token="<unk>"))
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template_file is not None:
        (path / "chat_template.jinja").write_text(template_file)
    return path


def outcome(render: Any, errors: type[Exception] | tuple[type[Exception], ...]) -> tuple[bool, str]:
    """(True, text), or (False, what the template objected to)."""
    try:
        return True, render()
    except errors as error:
        return False, str(error).removeprefix("the chat template refuses these messages: ")


def assert_as_transformers(template: str, special: dict[str, str], **arguments: Any) -> tuple[bool, str]:
    backend = Backend(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    reference = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)
    messages = arguments.pop("messages")
    ours = ChatTemplates(Path(), {"chat_template": template, **special})
    expected = outcome(lambda: reference.apply_chat_template(messages, tokenize=False, **arguments), Exception)
    found = outcome(lambda: ours.render(messages, **arguments), RequestError)
    assert found == expected
    return found


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_that_of_transformers(name: str, conversation: str, tools: list[Any] | None) -> None:
    for more in ({}, {"enable_thinking": False, "date_string": "26 Jul 2024"}):
        for add in (True, False):
            fine, text = assert_as_transformers(
                TEMPLATES[name],
                SPECIAL,
                messages=CONVERSATIONS[conversation],
                tools=tools,
                add_generation_prompt=add,
                **more,
            )
            refused = REFUSED.get(name, {}).get(conversation)
            assert fine is (refused is None)
            assert text == (refused or text)


def test_kimis_tools_have_their_keys_in_order() -> None:
    """As its tokenizer's own apply_chat_template passes them on; other models see them as they came."""
    template = "{{ tools | tojson }} {% for tool in tools %}{{ tool.function | join }}{% endfor %}"
    of_kimi = ChatTemplates(Path(), {"chat_template": template, "tokenizer_class": "TikTokenTokenizer"})
    ordered = json.loads(json.dumps(TOOLS, sort_keys=True))
    assert [*ordered[0]] != [*TOOLS[0]]
    arguments: dict[str, Any] = {"messages": [USER], "add_generation_prompt": False}
    _, expected = assert_as_transformers(template, {}, tools=ordered, **arguments)
    _, given = assert_as_transformers(template, {}, tools=TOOLS, **arguments)
    assert of_kimi.render([USER], tools=TOOLS) == expected != given


def test_the_date_is_todays() -> None:
    text = ChatTemplates(Path(), {"chat_template": LLAMA3, **SPECIAL}).render([USER])
    assert f"Today: {datetime.now():%d %b %Y}\n" in text


def shared_configs() -> list[Path]:
    files = sorted((SHARED / "tokenizers").glob("*/tokenizer_config.json"))
    return [file for file in files if "chat_template" in json.loads(file.read_text())]


@pytest.mark.skipif(not shared_configs(), reason=f"no tokenizers at {SHARED / 'tokenizers'}")
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("file", shared_configs(), ids=lambda file: file.parent.name)
def test_published_templates_render_as_in_transformers(file: Path, tools: list[Any] | None) -> None:
    config = json.loads(file.read_text())
    special = {key: config[key] for key in ("bos_token", "eos_token", "unk_token", "pad_token") if config.get(key)}
    special = {key: token if isinstance(token, str) else token["content"] for key, token in special.items()}
    rendered = [
        assert_as_transformers(config["chat_template"], special, messages=messages, tools=tools, **add)[0]
        for messages in CONVERSATIONS.values()
        for add in ({"add_generation_prompt": True}, {"add_generation_prompt": False})
    ]
    assert any(rendered)


SHARED_TEMPLATES = SHARED / "templates" / "chat_templates"


@pytest.mark.skipif(not SHARED_TEMPLATES.is_dir(), reason=f"no templates at {SHARED_TEMPLATES}")
@pytest.mark.parametrize("file", sorted(SHARED_TEMPLATES.glob("*.jinja")), ids=lambda file: file.stem)
def test_common_templates_render_as_in_transformers(file: Path) -> None:
    template = file.read_text()
    rendered = [
        assert_as_transformers(template, SPECIAL, messages=messages, tools=tools, add_generation_prompt=add)[0]
        for messages in CONVERSATIONS.values()
        for tools in (None, TOOLS)
        for add in (True, False)
    ]
    assert any(rendered)


def shared_tokenizers() -> list[Path]:
    return [file.parent for file in shared_configs() if (file.parent / "tokenizer.json").is_file()]


@pytest.mark.skipif(not shared_tokenizers(), reason=f"no tokenizers at {SHARED / 'tokenizers'}")
@pytest.mark.parametrize("path", shared_tokenizers(), ids=lambda path: path.name)
def test_token_ids_are_those_of_transformers(path: Path) -> None:
    # The generic class, which takes tokenizer.json at its word; AutoTokenizer's may replace the normalizer.
    reference, ours = PreTrainedTokenizerFast.from_pretrained(path), Tokenizer(path)
    for name in ("user", "turns"):
        messages = CONVERSATIONS[name]
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode(ours.apply_chat_template(messages), add_special_tokens=False) == expected


# ---- which template ----------------------------------------------------------------------------------------------

NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]


def test_named_templates_are_chosen_by_tools(tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder(tmp_path, {"chat_template": NAMED}))
    assert tokenizer.apply_chat_template([USER]) == "plain"
    assert tokenizer.apply_chat_template([USER], tools=TOOLS) == "with 1"
    only = Tokenizer(folder(tmp_path / "only", {"chat_template": NAMED[1:]}))
    with pytest.raises(ChatTemplateError, match="no default chat template, only tool_use"):
        only.apply_chat_template([USER])


# As of models that read images: contents are parts, or texts or parts, or parts behind a first message that is a text.
PARTS = """{% for message in messages %}{{ message.role | upper }}: {% for part in message['content'] |
selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}{% endfor %}{{ 'A:' if add_generation_prompt }}"""
EITHER = """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ part.text if part.type == 'text' }}{% endfor %}{% endif %}{% endfor %}"""
SYSTEM_AS_TEXT = "{{ messages[0]['content'] }}|{% set messages = messages[1:] %}" + PARTS
SYSTEM = {"role": "system", "content": "Be short."}


@pytest.mark.parametrize(
    ("template", "of_parts"), [(PARTS, (0, 1)), (EITHER, ()), (SYSTEM_AS_TEXT, (1,)), ("{{ messages[0].content }}", ())]
)
def test_texts_become_parts_where_a_template_reads_nothing_else(template: str, of_parts: tuple[int, ...]) -> None:
    """As transformers renders lists of parts."""
    conversation = [SYSTEM, USER]
    reference = PreTrainedTokenizerFast(
        tokenizer_object=Backend(WordLevel({"<unk>": 0}, unk_token="<unk>")), chat_template=template
    )
    given: list[Any] = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if i in of_parts else message
        for i, message in enumerate(conversation)
    ]
    ours = ChatTemplates(Path(), {"chat_template": template})
    for add in (True, False):
        text = ours.render(conversation, add_generation_prompt=add)
        assert text == reference.apply_chat_template(given, tokenize=False, add_generation_prompt=add)
        assert SYSTEM["content"] in text
    assert ours.render(given) == ours.render(conversation)


TEXT = "{{ messages[-1]['content'] }}{% if tools %}{{ tools[0].type }}{% endif %}"
AS_JSON = "{{ messages[-1]['content'] | tojson }}{% if tools %}{{ tools[0].type }}{% endif %}"


@pytest.mark.parametrize("template", [PARTS, EITHER, SYSTEM_AS_TEXT])
def test_parts_of_a_text_stay_parts_where_a_template_reads_them(template: str) -> None:
    parts = [{"type": "text", "text": text} for text in ("One, ", "two")]
    conversation: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": parts}]
    reference = PreTrainedTokenizerFast(
        tokenizer_object=Backend(WordLevel({"<unk>": 0}, unk_token="<unk>")), chat_template=template
    )
    given = list(conversation)
    if template == PARTS:
        given[0] = {**SYSTEM, "content": [{"type": "text", "text": SYSTEM["content"]}]}
    found = ChatTemplates(Path(), {"chat_template": template}).render(conversation, add_generation_prompt=False)
    assert found == reference.apply_chat_template(given, tokenize=False)
    assert "One, two" in found


@pytest.mark.parametrize(("template", "text"), [(TEXT, "One, \ntwo"), (AS_JSON, r'"One, \ntwo"')])
def test_parts_of_a_text_become_one_text_for_other_templates(template: str, text: str) -> None:
    """They would be printed as lists."""
    parts = [{"type": "text", "text": text} for text in ("One, ", "two")]
    ours = ChatTemplates(Path(), {"chat_template": template})
    assert ours.render([{"role": "user", "content": parts}]) == text


@pytest.mark.parametrize("placeholder", [None, "<image>"])
def test_a_variable_may_have_the_name_of_an_argument(placeholder: str | None) -> None:
    ours = ChatTemplates(Path(), {"chat_template": "{{ placeholder }} {{ messages[0].content }}"})
    parts = [{"type": "text", "text": "Hi"}, *([] if placeholder is None else [{"type": "image"}])]
    text = ours.render([{"role": "user", "content": parts}], placeholder, placeholder="mine")
    assert text == "mine Hi" + ("" if placeholder is None else "\n<image>")


@pytest.mark.parametrize(
    "part",
    [{"type": "image"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "a text", {"text": "a"}],
    ids=str,
)
def test_parts_that_are_no_text_are_refused(part: object) -> None:
    ours = ChatTemplates(Path(), {"chat_template": EITHER})
    with pytest.raises(
        RequestError, match=r'message 1 has the part .*: models here read text: give \{"type": "text", "t'
    ):
        ours.render([SYSTEM, {"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}])


def test_the_file_wins_over_the_configuration(tmp_path: Path) -> None:
    """All of it, as in transformers."""
    for own in ("config", NAMED):
        path = folder(tmp_path, {"chat_template": own}, "{{ bos_token }}file {{ messages | length }}")
        reference = PreTrainedTokenizerFast.from_pretrained(path, bos_token="")
        for tools in (None, TOOLS):
            text = Tokenizer(path).apply_chat_template([USER], tools=tools)
            assert text == reference.apply_chat_template([USER], tools=tools, tokenize=False) == "file 1"


def test_special_tokens_come_from_config_or_map(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}", "pad_token": None}
    path = folder(tmp_path, config | {"bos_token": {"content": "<|begin|>", "lstrip": False}})
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>", "bos_token": "old"}))
    assert Tokenizer(path).apply_chat_template([USER]) == "<|begin|>|<|end|>|False"


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no default chat template: use plain prompts"):
        Tokenizer(folder(tmp_path, {})).apply_chat_template([USER])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": 3}, "neither a text nor a list"),
        ({"chat_template": [{"name": "default"}]}, "without name and template"),
        ({"chat_template": "{% if %}"}, "default is not valid: "),
        ({"chat_template": "{% generation %}"}, "default is not valid: "),
        ({"chat_template": "{% if true %}" * 3000 + "{% endif %}" * 3000}, "default is not valid: "),
        ({"chat_template": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"}, "default is not valid: "),
    ],
)
def test_damaged_templates_are_one_sentence(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as caught:
        Tokenizer(folder(tmp_path, config)).apply_chat_template([USER])
    assert "\n" not in str(caught.value)


def test_a_template_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path, {})
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match=r"cannot read .*chat_template\.jinja"):
        Tokenizer(path)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        (["hello"], "message 0 is 'hello'"),
        ([USER, {"content": "x"}], "message 1 is "),
        ([{"role": "user"}], "message 0 has the content None"),
        ([{"role": "user", "content": 3}], "message 0 has the content 3"),
        ([{"role": "user", "content": "x", "at": datetime(2024, 1, 1)}], "holds a datetime"),
    ],
)
def test_malformed_messages_are_one_sentence(messages: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplates(Path(), {"chat_template": "x"}).render(messages)


def test_tools_must_be_schemas() -> None:
    with pytest.raises(RequestError, match="tools must be"):
        ChatTemplates(Path(), {"chat_template": "x"}).render([USER], tools=["weather"])  # type: ignore[list-item]


LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}BODY{% endfor %}{% endfor %}"
GROWING = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = GROW %}{% endfor %}{{ ns.s }}"


@pytest.mark.parametrize(
    "template",
    [
        LOOP.replace("BODY", ""),
        LOOP.replace("BODY", "x"),
        "{% set many = range(100000) %}{% for a in many %}{% for b in many if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(9) recursive %}{% if loop.depth < 40 %}{{ loop(range(9)) }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_without_end_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.1)
    with pytest.raises(OutOfTime, match=r"takes more than 0\.1 s of CPU time"):
        ChatTemplates(Path(), {"chat_template": template}).render([USER])


@pytest.mark.parametrize(
    "template",
    [
        *(GROWING.replace("GROW", how) for how in ("ns.s ~ ns.s", "ns.s + ns.s", "ns.s * 2", "[ns.s, ns.s] | join")),
        GROWING.replace("GROW", "ns.s.replace('ab', 'abab')"),
        GROWING.replace("GROW", "ns.s | replace('ab', 'abab')"),
        GROWING.replace("GROW", "''.join([ns.s, ns.s])"),
        "{{ 'x' * 10000000000 }}",
        "{{ ([0] * 100000000) | length }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '{:10000000000d}'.format(1) }}",
        "{{ '{:{}d}'.format(1, 10000000000) }}",
        "{{ 10 ** (10 ** 9) }}",
        "{% set long = 'x' * 1000000 %}{% for i in range(1000) %}{{ long }}{% endfor %}",
    ],
)
def test_a_template_cannot_take_gigabytes(template: str) -> None:
    with pytest.raises(RequestError, match=r"refuses these messages: .*too (long|large|wide)"):
        ChatTemplates(Path(), {"chat_template": template}).render([USER])


def test_within_their_bounds_templates_do_as_jinja_does() -> None:
    template = (
        "{{ 'a' ~ 1 ~ none }}|{{ 'ab' * 3 }}|{{ 2 ** 10 }}|{{ '%05.1f' % 2.25 }}|{{ [1, 2] + [3] }}|"
        "{{ '{:>4}'.format(5) }}|{{ [1, 'b'] | join('-') }}|{{ messages | join(',', attribute='role') }}|"
        "{{ 'aXbX'.replace('X', 'yy') }}|{{ 'ab' | center(6) }}|"
        "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% break %}{% endfor %}"
    )
    theirs = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).from_string(template)
    ours = ChatTemplates(Path(), {"chat_template": template}).render([USER, USER])
    assert ours == theirs.render(messages=[USER, USER])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set ns = namespace(__init__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ raise_exception.__globals__.json }}",
        "{{ namespace.__init__.__globals__.json }}",
        "{{ range(10000000) | list }}",
        "{{ messages[0].content.nothing.more }}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
    ],
)
def test_templates_stay_in_their_sandbox(template: str) -> None:
    messages = [dict(USER)]
    with pytest.raises(RequestError, match="refuses these messages") as caught:
        ChatTemplates(Path(), {"chat_template": template}).render(messages)
    assert "\n" not in str(caught.value)
    assert messages == [USER]
