"""The OpenAPI document and the server agree on what a request may be: each allows and refuses the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from llmc.runtime.server.bounds import digits_below
from llmc.runtime.server.refusals import BEYOND_SCHEMA

from support.live_server import LiveServer, serving
from support.paths import ROOT
from support.server_harness import Running, running_server

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT, TOKENIZE, DETOKENIZE = "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"
TEMPLATE = """\
{%- for message in messages %}
{%- if message.role not in ("system", "user", "assistant", "tool") %}{{ raise_exception("no such role") }}{% endif %}
{{- "<" ~ message.role ~ ">" ~ message.content }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
SAID = [{"role": "user", "content": "a"}]
LEAST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    CHAT: {"messages": SAID, "max_tokens": 1},
    RESPONSES: {"input": "a", "max_output_tokens": 1},
    MESSAGES: {"messages": SAID, "max_tokens": 1},
    COUNT: {"messages": SAID},
    TOKENIZE: {"prompt": "a"},
    DETOKENIZE: {"tokens": [1]},
}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
TOOL = {"type": "function", "function": FUNCTION}
TAGS = {"triggers": ["<"], "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}]}
NEWER_TAGS = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<"],
        "tags": [
            {"begin": "<a>", "content": {"type": "json_schema", "json_schema": {"type": "object"}}, "end": "</a>"}
        ],
    }
}


@pytest.fixture(scope="module")
def artifact(english_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2048 tokens in the vocabulary, 512 in the context, a chat template that knows its roles."""
    path = tmp_path_factory.mktemp("openapi") / "artifact"
    shutil.copytree(english_artifact, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def running(artifact: Path) -> Iterator[Running]:
    with running_server(artifact) as running:
        yield running


@pytest.fixture(scope="module")
def document(running: Running) -> dict[str, Any]:
    document: dict[str, Any] = running.client.get("/openapi.json").json()
    return document


def allows(document: dict[str, Any], path: str, body: Any) -> bool:
    """Whether the document allows a request."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": document["components"]}
    return jsonschema_rs.Draft202012Validator(whole).is_valid(body)


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def forced(*tools: Any, choice: Any = "required") -> dict[str, Any]:
    return {"tools": list(tools), "tool_choice": choice}


def called(call: Any) -> dict[str, Any]:
    return {"messages": [*SAID, {"role": "assistant", "tool_calls": [call]}, *SAID]}


def function(**changed: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**FUNCTION, **changed}}


def items(*given: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "a"}, *given]}


def blocks(role: str, *given: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": role, "content": list(given)}]}


TAKEN: list[tuple[str, dict[str, Any]]] = [
    *((path, {}) for path in LEAST),
    *((path, {"model": name}) for path in LEAST for name in ("tiny", "", None)),
    (COMPLETIONS, {"prompt": [[1.0, 2], [3]]}),
    (COMPLETIONS, {"max_tokens": 0, "echo": True}),
    (COMPLETIONS, {"suffix": None, "logits_processors": [], "use_beam_search": False}),
    (COMPLETIONS, {"best_of": 2, "n": 2}),
    (COMPLETIONS, {"best_of": 3, "use_beam_search": True, "early_stopping": "never", "length_penalty": 0}),
    (CHAT, {"best_of": 2, "length_penalty": 2.0}),
    (COMPLETIONS, {"top_p": 5e-324}),
    (COMPLETIONS, {"seed": 18446744073709551998}),
    (COMPLETIONS, {"stream": True, "stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"logit_bias": {"0": -100, "0000000009": 100, "2047": 0.5}, "stop_token_ids": [0, 2047]}),
    (COMPLETIONS, {"response_format": {"type": "text"}, "guided_regex": "a"}),
    (COMPLETIONS, {"response_format": {"type": "json_object"}}),
    (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}}),
    (COMPLETIONS, {"response_format": {"type": "structural_tag", **TAGS}}),
    (COMPLETIONS, {"response_format": {"type": "structural_tag", **NEWER_TAGS}}),
    (COMPLETIONS, {"structured_outputs": {"json": {}, "json_object": False, "later": None}}),
    (COMPLETIONS, {"structured_outputs": {"structural_tag": TAGS}}),
    (COMPLETIONS, {"guided_json": True}),
    (COMPLETIONS, {"guided_json": '{"type": "object"}'}),
    (CHAT, user([{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}])),
    (CHAT, called({"function": {"name": "f", "arguments": "{"}})),
    (CHAT, {"tools": [], "tool_choice": "auto"}),
    (CHAT, {"tool_choice": "none"}),
    (CHAT, forced(TOOL, {"type": None, "function": {"name": "g", "parameters": None, "strict": None}})),
    (CHAT, forced(TOOL, choice={"type": "function", "function": {"name": "f"}})),
    (CHAT, forced(TOOL, choice="none")),
    (
        CHAT,
        forced(TOOL, choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}),
    ),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"top_logprobs": 0}),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": False}),
    (CHAT, {"modalities": ["text"], "truncation_side": "left", "echo": False}),
    (RESPONSES, items({"type": None, "role": "assistant", "content": [{"type": "output_text", "text": "b"}]})),
    (RESPONSES, items({"type": "reasoning", "summary": []}, {"type": "reasoning", "content": "b"})),
    (RESPONSES, items({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"})),
    (RESPONSES, items({"type": "function_call_output", "call_id": "c", "output": [{"type": "text", "text": "b"}]})),
    (RESPONSES, forced({"type": "function", **FUNCTION}, choice={"type": "function", "name": "f"})),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}, "truncation": "disabled"}),
    (RESPONSES, {"n": 1, "prompt_logprobs": None, "return_token_ids": False, "reasoning": {"effort": None}}),
    (MESSAGES, blocks("user", {"type": "text", "text": "b"}, {"type": "tool_result", "tool_use_id": "t"})),
    (
        MESSAGES,
        blocks(
            "assistant",
            {"type": "thinking", "thinking": "b"},
            {"type": "redacted_thinking"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {}},
        ),
    ),
    (MESSAGES, {"system": [{"type": "text", "text": "b"}], "thinking": {"type": "adaptive"}}),
    (MESSAGES, forced({"name": "f", "input_schema": {}}, choice={"type": "tool", "name": "f"})),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}, "effort": "low"}}),
    (TOKENIZE, {"prompt": None, "messages": SAID, "tools": [{"any": 1}]}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *((path, {"max_tokens": 512}) for path in (COMPLETIONS, CHAT, MESSAGES, COUNT)),
    (CHAT, {"max_tokens": 512, "max_completion_tokens": 1}),
    (RESPONSES, {"max_output_tokens": 512}),
    (COMPLETIONS, {"prompt": [[1], [2048]], "truncate_prompt_tokens": 1}),
    (COMPLETIONS, {"prompt": [2048, 1], "truncate_prompt_tokens": 1}),
    (DETOKENIZE, {"tokens": [2048]}),
    (COMPLETIONS, {"stop_token_ids": [2048]}),
    (COMPLETIONS, {"logit_bias": {"2048": 1}}),
    (COMPLETIONS, {"logit_bias": {"٣": 1}}),
    (COMPLETIONS, {"logit_bias": {"1": 100.5}}),
    (COMPLETIONS, {"max_tokens": 0}),
    (COMPLETIONS, {"suffix": 0}),
    (COMPLETIONS, {"best_of": True}),
    (COMPLETIONS, {"best_of": 65}),
    (COMPLETIONS, {"use_beam_search": 1}),
    (COMPLETIONS, {"early_stopping": "ever"}),
    (RESPONSES, {"best_of": 2}),
    (MESSAGES, {"use_beam_search": True}),
    (COMPLETIONS, {"stream_options": {}}),
    (COMPLETIONS, {"guided_regex": ""}),
    (COMPLETIONS, {"guided_choice": [""]}),
    (COMPLETIONS, {"guided_json": False}),
    (COMPLETIONS, {"guided_json": 5}),
    (COMPLETIONS, {"response_format": {}}),
    (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": {"strict": "yes"}}}),
    (COMPLETIONS, {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}}),
    (COMPLETIONS, {"response_format": {"type": "structural_tag", "format": {"type": "tags"}}}),
    (COMPLETIONS, {"structured_outputs": {"xml": 1}}),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
    (CHAT, {"messages": []}),
    (CHAT, user([{"type": "image_url", "image_url": {"url": "x"}}])),
    (CHAT, user([{"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}])),
    (CHAT, user([{"type": "text"}])),
    (CHAT, user(None)),
    (CHAT, called({"function": {}})),
    (CHAT, called({"type": "function"})),
    (CHAT, {"tools": [TOOL]}),
    (CHAT, forced(TOOL, choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}})),
    (CHAT, forced(TOOL, choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}})),
    (CHAT, forced(TOOL, choice={"type": "function", "function": {}})),
    (CHAT, forced(function(name="a b"))),
    (CHAT, forced(function(name="a" * 65))),
    (CHAT, forced(function(parameters={"type": "string"}))),
    (CHAT, forced(function(strict="yes"))),
    (CHAT, forced({"type": "custom", "custom": {"name": "f"}})),
    (CHAT, forced(*(function(name=f"f{index}") for index in range(129)))),
    (CHAT, {"tool_choice": "any"}),
    (CHAT, {"top_logprobs": 1}),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}),
    (CHAT, {"modalities": ["audio"]}),
    (CHAT, {"truncation_side": "right"}),
    (CHAT, {"echo": True}),
    (CHAT, {"chat_template_kwargs": {"documents": []}}),
    (RESPONSES, {"input": ""}),
    (RESPONSES, {"input": []}),
    (RESPONSES, items({})),
    (RESPONSES, items({"role": "tool", "content": "a"})),
    (RESPONSES, items({"role": "user"})),
    (RESPONSES, items({"role": "user", "content": [{"type": "input_image"}]})),
    (RESPONSES, items({"type": "item_reference", "id": "x"})),
    (RESPONSES, items({"type": "function_call", "name": "f", "arguments": "{}"})),
    (RESPONSES, items({"type": "function_call_output", "call_id": "c"})),
    (RESPONSES, items({"type": "reasoning", "content": [{"type": "summary_text", "text": "b"}]})),
    (RESPONSES, items({"type": "reasoning", "id": 5})),
    (RESPONSES, forced({"type": "web_search"})),
    (RESPONSES, forced(TOOL)),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}),
    (RESPONSES, {"truncation": "auto"}),
    (RESPONSES, {"n": 2}),
    (RESPONSES, {"background": True}),
    (RESPONSES, {"prompt_logprobs": 1}),
    (MESSAGES, {"messages": []}),
    (MESSAGES, {"messages": [{"role": "tool", "content": "a"}]}),
    (MESSAGES, blocks("user")),
    (MESSAGES, blocks("user", {"type": "image"})),
    (MESSAGES, blocks("user", {"type": "tool_use", "id": "t", "name": "f", "input": {}})),
    (MESSAGES, blocks("user", {"type": "tool_result"})),
    (MESSAGES, blocks("assistant", {"type": "tool_use", "id": "t", "name": "f", "input": "{}"})),
    (MESSAGES, blocks("assistant", {"type": "thinking"})),
    (MESSAGES, {"system": [{"type": "image"}]}),
    (MESSAGES, forced({"type": "bash_20250124", "name": "bash"}, choice={"type": "any"})),
    (MESSAGES, {"tool_choice": {"type": "tool"}}),
    (MESSAGES, {"thinking": {"type": "deep"}}),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}),
    (MESSAGES, {"mcp_servers": [{"url": "x"}]}),
    (TOKENIZE, {"messages": SAID}),
    (TOKENIZE, {"prompt": None}),
    (TOKENIZE, {"prompt": None, "messages": []}),
]
IMAGE = "data:image/png;base64,AAAA"
# What the document cannot say, and the code that tells it.
BEYOND: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "a " * 600}, "context_length_exceeded"),
    (COMPLETIONS, {"max_tokens": 511, "prompt": "a b c"}, "context_length_exceeded"),
    (COMPLETIONS, {"min_tokens": 2}, "conflicting_values"),
    (COMPLETIONS, {"best_of": 2, "n": 3}, "conflicting_values"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "conflicting_values"),
    (COMPLETIONS, {"use_beam_search": True, "stop": "a"}, "conflicting_values"),
    (COMPLETIONS, {"use_beam_search": True, "repetition_penalty": 1.1}, "conflicting_values"),
    (COMPLETIONS, {"use_beam_search": True, "n": 2, "guided_regex": "a"}, "conflicting_values"),
    (CHAT, {"best_of": 2, "response_format": {"type": "json_object"}}, "conflicting_values"),
    (COMPLETIONS, {"guided_regex": "a", "guided_choice": ["b"]}, "conflicting_values"),
    (COMPLETIONS, {"guided_regex": "("}, "invalid_constraint"),
    (COMPLETIONS, {"guided_grammar": " "}, "invalid_constraint"),
    (COMPLETIONS, {"guided_json": {"type": 5}}, "invalid_constraint"),
    (COMPLETIONS, {"guided_json": "{"}, "invalid_constraint"),
    (COMPLETIONS, {"structured_outputs": {"structural_tag": {**TAGS, "triggers": ["["]}}}, "invalid_constraint"),
    (CHAT, {"tool_choice": "required"}, "conflicting_values"),
    (CHAT, {"tools": [], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "conflicting_values"),
    (RESPONSES, {"tool_choice": "required"}, "conflicting_values"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "conflicting_values"),
    (CHAT, forced(TOOL, TOOL), "conflicting_values"),
    (CHAT, forced(TOOL, choice={"type": "function", "function": {"name": "g"}}), "conflicting_values"),
    (CHAT, forced(function(parameters={"const": 10**30})), "invalid_constraint"),
    (CHAT, {"messages": [{"role": "nobody", "content": "a"}]}, "chat_template"),
    (CHAT, {"chat_template_kwargs": {"messages_": 1}, "messages": [{"role": "", "content": "a"}]}, "chat_template"),
    (MESSAGES, forced({"name": "f"}, choice={"type": "tool", "name": "g"}), "conflicting_values"),
    (RESPONSES, {"previous_response_id": "resp_0"}, "previous_response_not_found"),
    (CHAT, user([{"type": "image_url", "image_url": {"url": IMAGE}}]), "images_not_supported"),
    (RESPONSES, items(*user([{"type": "input_image", "image_url": IMAGE}])["messages"]), "images_not_supported"),
    (MESSAGES, blocks("user", {"type": "image", "source": {"type": "url", "url": IMAGE}}), "images_not_supported"),
]


@pytest.mark.parametrize(("path", "changed"), TAKEN)
def test_what_is_allowed_is_taken(
    document: dict[str, Any], running: Running, path: str, changed: dict[str, Any]
) -> None:
    body = {**LEAST[path], **changed}
    answer = running.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert allows(document, path, body)


@pytest.mark.parametrize(("path", "changed"), REFUSED)
def test_what_is_forbidden_is_refused(
    document: dict[str, Any], running: Running, path: str, changed: dict[str, Any]
) -> None:
    body = {**LEAST[path], **changed}
    answer = running.post(path, **body)
    assert answer.status_code == 400, answer.text
    assert not allows(document, path, body)


@pytest.mark.parametrize(("path", "changed", "code"), BEYOND)
def test_what_no_schema_says_has_a_code(
    document: dict[str, Any], running: Running, path: str, changed: dict[str, Any], code: str
) -> None:
    body = {**LEAST[path], **changed}
    assert allows(document, path, body)
    answer = running.post(path, **body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert code in BEYOND_SCHEMA
    assert f"{code}: " in document["paths"][path]["post"]["responses"]["400"]["description"]


def test_another_model_is_no_model(document: dict[str, Any], running: Running) -> None:
    for path, body in LEAST.items():
        assert not allows(document, path, {**body, "model": "gpt"})
        assert running.post(path, **body, model="gpt").status_code == 404


def test_errors_name_the_paths_and_methods_of_the_document(document: dict[str, Any], running: Running) -> None:
    error = running.client.get("/none").json()["error"]["message"]
    assert set(error.partition(": use one of ")[2].split(", ")) == set(document["paths"])
    for path, methods in document["paths"].items():
        answer = running.client.request("PATCH", re.sub(r"{\w+}", "x", path))
        known = {method.upper() for method in methods}
        assert answer.status_code == 405, path
        assert set(answer.headers["Allow"].split(", ")) == known | ({"HEAD"} if "GET" in known else set()), path


@pytest.mark.parametrize("limit", [1, 2, 10, 11, 100, 257, 512, 1000, 32_003])
def test_digits_below(limit: int) -> None:
    pattern = re.compile(digits_below(limit))
    numbers = [*range(min(limit + 20, 2000)), limit - 1, limit, limit * 10]
    assert [bool(pattern.match(str(number))) for number in numbers] == [number < limit for number in numbers]
    assert pattern.match(f"{0:010}")
    assert not pattern.match(f"{0:011}")


@pytest.mark.slow
def test_schemathesis_finds_nothing(artifact: Path, tmp_path: Path) -> None:
    """All of its checks in all phases; of refusals, those pass that say by their code why no schema can forbid it."""
    pytest.importorskip("schemathesis", reason="schemathesis belongs to the extra dev")
    with serving(artifact, "--served-model-name", "tiny") as server:
        output = _schemathesis(server, tmp_path)
    found = re.search(r"(\d+) generated, (\d+) passed", output)
    assert found is not None, output
    assert found[1] == found[2], output
    assert int(found[1]) > 1000, output


def _schemathesis(server: LiveServer, folder: Path) -> str:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", "all"),
        *("--exclude-checks", "positive_data_acceptance", "--seed", "1", "--max-examples", "10", "--no-shrink"),
        *("--generation-database", "none", "--suppress-health-check", "all"),
    ]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "openapi_checks", "PYTHONPATH": str(ROOT / "tests" / "support")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
