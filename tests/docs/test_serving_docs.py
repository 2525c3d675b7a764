"""docs/serving.md is true: its flags are the command's, its parameters are treated as it says, its examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.server.protocol.chat import ChatRequest
from llmc.runtime.server.protocol.completions import CompletionRequest

from support.live_server import LiveServer, serving
from support.paths import ROOT

GUIDE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000"
# Values that mean something, for parameters that are refused or ignored.
VALUES: dict[str, Any] = {
    "bad_words": ["a"],
    "allowed_token_ids": [5],
    "logits_processors": ["x"],
    "functions": [{"name": "f"}],
    "audio": {"voice": "alloy"},
    "modalities": ["text", "audio"],
    "metadata": {"a": "b"},
    "store": True,
    "prediction": {"type": "content", "content": "a"},
    "spaces_between_special_tokens": False,
    "detokenize": False,
}


def table(name: str) -> list[list[str]]:
    """The cells of a marked table, without its head."""
    marked = re.search(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", GUIDE, re.DOTALL)
    assert marked
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in marked[1].splitlines()]
    assert len(rows) > 10
    assert len({len(row) for row in rows}) == 1
    return rows[2:]


def parameters(treatment: str) -> list[str]:
    rows = table("parameters")
    names = [row[0].strip("`") for row in rows]
    assert len(set(names)) == len(names)
    assert all(row[1].startswith(("supported", "ignored", "refused")) for row in rows)
    return [row[0].strip("`") for row in rows if row[1].startswith(treatment)]


@pytest.fixture(scope="module")
def server(english_artifact: Path) -> Iterator[LiveServer]:
    flags: list[str | Path] = [
        "--served-model-name",
        "tiny",
        "--chat-template",
        ROOT / "examples" / "clients" / "story.jinja",
    ]
    with serving(english_artifact, *flags) as server:
        yield server


def test_the_flags_are_those_of_the_command() -> None:
    command = [sys.executable, "-P", "-m", "llmc.cli.main", "serve", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", shown.stdout)) - {"--help"}
    described = [flag for row in table("flags") for flag in re.findall(r"--[a-z][a-z0-9-]*", row[0])]
    assert len(set(described)) == len(described)
    # Flags that the text of another one or an example mentions are flags, too.
    assert sorted(described) == sorted(flags)


def test_every_declared_parameter_is_listed() -> None:
    declared = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert set(parameters("supported")) | set(parameters("ignored")) >= declared
    assert set(parameters("supported")) <= declared
    assert not set(parameters("refused")) & declared


@pytest.mark.parametrize("name", parameters("refused"))
def test_what_is_refused(server: LiveServer, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    refused = server.ask("POST", "/v1/chat/completions", {**body, name: VALUES.get(name, "x")})
    assert refused.status == 400, refused.content
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert server.ask("POST", "/v1/chat/completions", {**body, name: None}).status == 200


@pytest.mark.parametrize("name", parameters("ignored"))
def test_what_is_ignored(server: LiveServer, name: str) -> None:
    body = {"prompt": "The evening passed", "max_tokens": 8, "temperature": 1, "seed": 4}
    plain = server.ask("POST", "/v1/completions", body).json()
    with_it = server.ask("POST", "/v1/completions", {**body, name: VALUES.get(name, "x")})
    assert with_it.status == 200, with_it.content
    assert with_it.json()["choices"] == plain["choices"]


@pytest.mark.parametrize("language", ["sh", "python"])
def test_examples_run(server: LiveServer, language: str) -> None:
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        assert URL in block
        if language == "python":
            module = re.search(r"^from (\w+)", block)
            assert module
            pytest.importorskip(module[1], reason=f"{module[1]} belongs to the extra dev")
        program = ["sh", "-euc"] if language == "sh" else [sys.executable, "-P", "-c"]
        command = [*program, block.replace(URL, server.url)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip()
        assert '"error"' not in result.stdout


def test_links_lead_somewhere() -> None:
    for name in ("docs/serving.md", "SECURITY.md"):
        file = ROOT / name
        links = re.findall(r"\]\(([^)#:]+)\)", file.read_text(encoding="utf-8"))
        assert links
        assert [link for link in links if not (file.parent / link).exists()] == []


def test_tests_that_the_security_policy_names_exist() -> None:
    named = re.findall(r"`(tests/[\w.]+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []
