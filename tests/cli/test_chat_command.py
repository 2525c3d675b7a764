"""`llmc chat` through pipes: against a server of scripted answers and an artifact."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams

from support.chat_terminal import CHAT, PATIENCE_S
from support.scripted_server import MARKDOWN, ScriptedServer, scripted_server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


def chat(*arguments: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "LLMC_API_KEY"}
    command = [*CHAT, *map(str, arguments)]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=300, check=False, env=environment
    )


def test_lines_in_answers_out(server: ScriptedServer) -> None:
    result = chat(f"{server.url}/v1", "--stop", "x", "--system", "S", text="one\n\n/top-k 4\nmarkdown\nthink\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"you said one\n{MARKDOWN}\nyou said think\n"
    assert result.stderr == "top_k 4\n"
    assert [body.get("top_k") for body in server.asked] == [None, 4, 4]
    assert all(body["stop"] == ["x"] for body in server.asked)
    assert server.asked[0]["messages"][0] == {"role": "system", "content": "S"}


def test_a_raw_text_is_continued(server: ScriptedServer) -> None:
    result = chat(server.url, "--raw", text="\nOnce\n\nThen\n")
    assert result.returncode == 0, result.stderr
    said = "Onceyou said Once"
    longer = f"{said}you said {said}\nThen"
    assert [body["prompt"] for body in server.asked] == ["Once", said, longer]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("refuse\nnever\n", "answered 400: max_tokens 9 is too much"),
        ("/bad\nnever\n", "the command /bad is unknown: /help lists all; a message may start with //"),
        ("break\nnever\n", "the engine stopped"),
    ],
)
def test_without_a_terminal_the_first_error_ends_it(server: ScriptedServer, text: str, expected: str) -> None:
    result = chat(server.url, text=text)
    assert result.returncode == 1
    assert result.stderr.startswith("llmc: error: ")
    assert result.stderr.endswith(expected + "\n")
    assert len(server.asked) <= 1


def test_the_key_reaches_the_server(server: ScriptedServer) -> None:
    server.key = "secret"
    refused = chat(server.url, text="hi\n")
    assert refused.returncode == 1
    assert "answered 401: the API key is wrong (pass --api-key, or set LLMC_API_KEY)" in refused.stderr
    assert chat(server.url, "--api-key", "secret", text="hi\n").stdout == "you said hi\n"


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["ftp://x"], 1, "'ftp://x' is not the address of a server: write http://HOST:PORT"),
        (["http://user:pass@x"], 1, "is not the address of a server: write http://HOST:PORT"),
        (["http://x:port"], 1, "'http://x:port' is not the address of a server"),
        (["http://127.0.0.1:9", "--model", "m"], 1, "connection refused: start llmc serve there"),
        (["/nowhere"], 1, "/nowhere does not exist"),
        (["/nowhere", "--model", "m"], 2, "--model belongs to a server's URL"),
        (["--raw", "--system", "S"], 2, "--system and --raw exclude each other"),
        (["--temperature", "-1"], 2, "temperature -1.0 is out of range"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: list[str], code: int, expected: str) -> None:
    result = chat(*arguments, text="hi\n")
    assert (result.returncode, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    assert expected in line


@pytest.mark.parametrize("utf8", ["0", "1"])
def test_input_that_is_no_text_is_named(server: ScriptedServer, utf8: str) -> None:
    environment = {**os.environ, "PYTHONUTF8": utf8, "LC_ALL": "C.UTF-8" if utf8 == "0" else "C"}
    result = subprocess.run(
        [*CHAT, server.url], input=b"one\nab\xff\ntwo\n", capture_output=True, timeout=300, env=environment, check=False
    )
    assert result.returncode == 1
    (line,) = result.stderr.decode().splitlines()
    assert "is not UTF-8" in line
    assert "convert it first" in line


def test_an_artifact_answers_as_in_process(chat_artifact: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5)
    with LLM(chat_artifact) as llm:
        (output,) = llm.chat([{"role": "user", "content": "Hi"}], params)
    options = ["--max-tokens", "12", "--temperature", "0.8", "--seed", "5"]
    result = subprocess.run([*CHAT, str(chat_artifact), *options], input=b"Hi\n", capture_output=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.decode() == output.outputs[0].text + "\n"


def test_a_model_of_vectors_does_not_chat(embedder: tuple[Path, Path]) -> None:
    for more in ([], ["--raw"]):
        result = chat(embedder[1], *more, text="Hi\n")
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.endswith("gives vectors and does not chat: use llmc embed or llmc rank\n")


def test_an_artifact_imports_no_compiler(chat_artifact: Path) -> None:
    code = (
        "import sys; from llmc.cli.main import main; code = main(sys.argv[1:]);"
        "print('LOADED', code, sorted({'torch', 'tvm', 'fastapi', 'openai'} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-P", "-c", code, "chat", str(chat_artifact), "--max-tokens", "4"]
    result = subprocess.run(command, input=b"Hi\n", capture_output=True, timeout=300)
    assert result.stderr.decode().strip().endswith("LOADED 0 []")


def test_a_model_without_template_says_so(tiny_artifact: Any) -> None:
    refused = chat(tiny_artifact.artifact, text="Hi\n")
    assert refused.returncode == 1
    assert "tokenizer.json is missing" in refused.stderr


def test_a_model_without_template_names_the_ways_out(chat_artifact: Path, tmp_path: Path) -> None:
    artifact, template = tmp_path / "artifact", tmp_path / "own.jinja"
    shutil.copytree(chat_artifact, artifact)
    config = json.loads((artifact / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (artifact / "tokenizer_config.json").write_text(json.dumps(config))
    refused = chat(artifact, text="Hi\n")
    assert refused.returncode == 1
    assert refused.stderr == (
        "llmc: error: this model has no default chat template: pass one with --chat-template FILE, or --raw to let it "
        "continue plain text\n"
    )
    template.write_text("{{ messages[-1].content }}!")
    options = ["--max-tokens", "6", "--temperature", "0"]
    by_template = chat(artifact, "--chat-template", template, *options, text="Hi\n")
    by_hand = chat(artifact, "--raw", *options, text="Hi!\n")
    assert (by_template.returncode, by_hand.returncode) == (0, 0), by_template.stderr + by_hand.stderr
    assert by_template.stdout == by_hand.stdout
    missing = chat(artifact, "--chat-template", tmp_path / "none.jinja", text="Hi\n")
    assert missing.returncode == 1
    assert "cannot read the chat template" in missing.stderr


def test_a_server_without_template_names_the_ways_out(server: ScriptedServer) -> None:
    server.counts, server.template = True, False
    refused = chat(server.url, text="Hi\n")
    assert refused.returncode == 1
    assert refused.stderr.endswith(
        "this model has no default chat template: start llmc serve with --chat-template FILE, or pass --raw here\n"
    )
    assert server.asked == []
    assert chat(server.url, "--raw", text="Hi\n").stdout == "you said Hi\n"
    on_url = chat(server.url, "--chat-template", "x.jinja", text="Hi\n")
    assert on_url.returncode == 2
    assert "llmc serve" in on_url.stderr


def test_reasoning_goes_to_stderr_where_no_answer_follows(server: ScriptedServer) -> None:
    result = chat(server.url, text="think\nonly think\n")
    assert result.stdout == "you said think\n\n"
    assert result.stderr.startswith("hmm\nthe answer ended within its reasoning")


def test_interrupted_without_a_terminal(server: ScriptedServer) -> None:
    command = [*CHAT, server.url]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("endless\n")
    process.stdin.flush()
    assert process.stdout.read(6) == "on and"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert server.disconnected.wait(PATIENCE_S), "the server goes on generating"
