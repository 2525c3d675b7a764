"""`llmc chat`: against a server of scripted answers and an artifact, under a terminal and through pipes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeEngine, FakeLLM

from llmc.cli.chat_backends import EngineBackend
from llmc.cli.chat_commands import Commands, describe
from llmc.cli.chat_screen import complete_blocks, printable
from llmc.cli.chat_session import ChatError, Reply, Session
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams

CHAT = [sys.executable, "-P", "-m", "llmc.cli.main", "chat"]
PATIENCE_S = 60

MARKDOWN = (
    "# Title\n\nSome *slanted* text.\n\n1. one\n\n2. two\n\n```python\nprint('<b>')\n\n# no title\n```\n\nThe end."
)


# ---- a server of scripted answers --------------------------------------------------------------------------------


ANSWERS = {"markdown": MARKDOWN, "evil": "a\x1b]0;title\x07b\x9b2Jc\u202ed", "html": "see <div>this</div>"}


class ScriptedServer(ThreadingHTTPServer):
    """Speaks enough of the OpenAI API; keeps what it was asked.

    A question that is a key of ANSWERS gets that answer, two characters an event; "endless" one that never ends; any
    other is echoed.
    """

    daemon_threads = True

    def __init__(self, key: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key = key
        self.asked: list[dict[str, Any]] = []
        self.disconnected = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._json(200, {"object": "list", "data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if self.server.key is not None and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self._json(401, {"error": {"message": "the API key is wrong", "type": "x", "param": None, "code": None}})
            return
        chat = "messages" in body
        question = body["messages"][-1]["content"] if chat else body["prompt"]
        if question == "refuse":
            self._json(
                400, {"error": {"message": "max_tokens 9 is too much", "type": "x", "param": None, "code": None}}
            )
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            if question == "think":
                self._event({"choices": [{"index": 0, "delta": {"reasoning_content": "hmm"}}]})
            if question == "break":
                self._piece("half an ans", chat)
                self._event({"error": {"message": "the engine stopped", "type": "x", "param": None, "code": None}})
                return
            if question == "endless":
                while True:
                    self._piece("on and ", chat)
                    time.sleep(0.01)
            answer = ANSWERS.get(question, f"you said {question}")
            for i in range(0, len(answer), 2):
                self._piece(answer[i : i + 2], chat)
            self._event({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}]})
            self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 41}})
            self._chunk(b": a comment\n\ndata: [DONE]\n\n")
            self._chunk(b"")
        except OSError:
            self.server.disconnected.set()

    def _piece(self, text: str, chat: bool) -> None:
        self._event({"choices": [{"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}]})

    def _event(self, data: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, data: dict[str, Any]) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


# ---- terminals ---------------------------------------------------------------------------------------------------


def escapes_removed(text: str) -> str:
    return re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[=>])", "", text)


class Terminal:
    """A chat under a terminal of 80 × 24."""

    def __init__(self, *arguments: str | Path) -> None:
        self._leader, follower = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        environment.pop("LLMC_API_KEY", None)

        def own_terminal() -> None:
            # Ctrl-C reaches the process only through a terminal that controls it.
            import fcntl
            import termios

            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [*CHAT, *map(str, arguments)],
            stdin=follower, stdout=follower, stderr=follower, env=environment, preexec_fn=own_terminal,
        )  # fmt: skip
        os.close(follower)
        self.shown = ""
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def wait_for(self, text: str) -> str:
        """Reads until `text` is shown after what was waited for before; returns everything up to it."""
        deadline = time.monotonic() + PATIENCE_S
        while (at := escapes_removed(self.shown).find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self.shown!r}"
            if not self._read():
                raise AssertionError(f"the chat ended before {text!r}: {self.shown!r}")
        start, self._seen = self._seen, at + len(text)
        return escapes_removed(self.shown)[start : self._seen]

    def press_until(self, key: str, text: str) -> None:
        """Presses a key until `text` is shown: Python forgets a signal that comes just before readline waits."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in escapes_removed(self.shown)[self._seen :]:
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self.shown!r}"
            self.type(key)
            while text not in escapes_removed(self.shown)[self._seen :]:
                if not select.select([self._leader], [], [], 1.0)[0]:
                    break
                assert self._read(), f"the chat ended before {text!r}: {self.shown!r}"
        self.wait_for(text)

    def ask(self, text: str) -> None:
        """Types a line at the prompt."""
        self.wait_for("> ")
        self.type(text + "\r")

    def wait_end(self) -> int:
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._leader)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._leader], [], [], PATIENCE_S)
        assert ready, f"nothing more after {self.shown!r}"
        try:
            chunk = os.read(self._leader, 65536)
        except OSError:  # Linux ends a terminal that nobody holds open any more with an error
            return False
        self.shown += chunk.decode("utf-8", "replace")
        return bool(chunk)


@pytest.fixture
def terminal(server: ScriptedServer) -> Iterator[Terminal]:
    terminal = Terminal(server.url, "--seed", "3")
    yield terminal
    terminal.close()


def test_a_conversation(terminal: Terminal, server: ScriptedServer) -> None:
    terminal.wait_for("scripted: /help lists the commands")
    terminal.ask("hello")
    terminal.wait_for("you said hello")
    terminal.ask("/system Be brief.")
    terminal.wait_for("system message: Be brief.")
    terminal.ask("/temperature 0.25")
    terminal.wait_for("temperature 0.25")
    terminal.ask("/max-tokens many")
    terminal.wait_for("error: max_tokens 'many' is not a number")
    terminal.ask("again")
    terminal.wait_for("you said again")
    terminal.ask("/stats")
    terminal.wait_for("prompt 7 tokens, answer 41 tokens, first token ")
    terminal.wait_for(" tokens/s")
    terminal.wait_for("2 answers, 82 tokens in all")
    terminal.ask("/quit")
    assert terminal.wait_end() == 0
    first, second = server.asked
    assert first["messages"] == [{"role": "user", "content": "hello"}]
    assert (first["model"], first["seed"], first["stream"]) == ("scripted", 3, True)
    assert "temperature" not in first
    assert second["temperature"] == 0.25
    assert second["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "you said hello"},
        {"role": "user", "content": "again"},
    ]


def test_retry_undo_and_reset(terminal: Terminal, server: ScriptedServer) -> None:
    for question in ("one", "two", "/retry", "/undo", "three", "/reset", "four"):
        terminal.ask(question)
    terminal.ask("/undo")
    terminal.wait_for("took back: four")
    terminal.ask("/undo")
    terminal.wait_for("error: there is no question to take back")
    said = [[m["content"] for m in body["messages"] if m["role"] == "user"] for body in server.asked]
    assert said == [["one"], ["one", "two"], ["one", "two"], ["one", "three"], ["four"]]


def test_ctrl_c_stops_the_answer_not_the_program(terminal: Terminal, server: ScriptedServer) -> None:
    terminal.ask("endless")
    terminal.wait_for("on and on and")
    terminal.type("\x03")
    terminal.wait_for("stopped")
    assert server.disconnected.wait(PATIENCE_S), "the server goes on generating"
    terminal.ask("and then?")
    terminal.wait_for("you said and then?")
    (question, partial, _) = server.asked[-1]["messages"]
    assert question["content"] == "endless"
    assert partial["role"] == "assistant"
    assert partial["content"].startswith("on and on and")
    terminal.wait_for("> ")
    terminal.type("never sent")
    terminal.wait_for("never sent")
    terminal.press_until("\x03", "Ctrl-D or /quit leaves")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.wait_end() == 0
    assert len(server.asked) == 2


def test_errors_leave_the_conversation_as_it_was(terminal: Terminal, server: ScriptedServer) -> None:
    terminal.ask("fine")
    terminal.wait_for("you said fine")
    terminal.ask("refuse")
    terminal.wait_for("answered 400: max_tokens 9 is too much")
    terminal.ask("break")
    terminal.wait_for("half an ans")
    terminal.wait_for("error: the engine stopped")
    terminal.ask("/nonsense")
    terminal.wait_for("error: the command /nonsense is unknown")
    terminal.ask("//fine")
    terminal.wait_for("you said /fine")
    contents = [message["content"] for message in server.asked[-1]["messages"]]
    assert contents == ["fine", "you said fine", "break", "half an ans", "/fine"]


def test_markdown_is_rendered(terminal: Terminal) -> None:
    terminal.ask("markdown")
    terminal.wait_for("The end.")
    terminal.ask("html")
    terminal.wait_for("see <div>this</div>")
    terminal.ask("/quit")
    assert terminal.wait_end() == 0
    shown = terminal.shown
    assert "\x1b[3mslanted" in shown
    assert "*slanted*" not in escapes_removed(shown).split("\n\n")[-1]
    assert "```" not in escapes_removed(shown).rpartition("print('<b>')")[2], "a finished fence is not shown"
    final = escapes_removed(shown)
    for text in ("Title", " 1 one", " 2 two", "print('<b>')", "# no title"):
        assert text in final, text


def test_reasoning_is_shown_but_not_part_of_the_answer(terminal: Terminal, server: ScriptedServer) -> None:
    terminal.ask("think")
    terminal.wait_for("hmm")
    terminal.wait_for("you said think")
    terminal.ask("next")
    terminal.wait_for("you said next")
    assert server.asked[-1]["messages"][1]["content"] == "you said think"


def test_an_answer_cannot_command_the_terminal(terminal: Terminal) -> None:
    terminal.ask("evil")
    terminal.wait_for("a]0;titleb2Jcd")
    terminal.ask("/quit")
    assert terminal.wait_end() == 0
    assert "\x1b]0;" not in terminal.shown
    assert "\x9b" not in terminal.shown
    assert "\u202e" not in terminal.shown


def test_several_lines_and_save_and_load(terminal: Terminal, server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    for line in ('"""', "one", "two"):
        terminal.ask(line)
    terminal.ask('"""')
    terminal.wait_for("you said one")
    terminal.ask(f"/save {file}")
    terminal.wait_for(f"wrote {file}"[:40])
    terminal.ask("/reset")
    terminal.ask(f"/load {file}")
    terminal.wait_for("2 messages")
    terminal.ask(f"/save {tmp_path / 'no' / 'folder'}")
    terminal.wait_for("error: cannot write")
    terminal.ask("more")
    terminal.wait_for("you said more")
    assert server.asked[0]["messages"][0]["content"] == "one\ntwo"
    assert [m["content"] for m in server.asked[-1]["messages"]] == ["one\ntwo", "you said one\ntwo", "more"]
    saved = json.loads(file.read_text())
    assert saved["messages"] == server.asked[-1]["messages"][:2]
    assert saved["sampling"] == {"seed": 3}
    assert [entry.name for entry in tmp_path.iterdir()] == ["talk.json"]


def test_lines_can_be_edited_and_recalled(server: ScriptedServer, tmp_path: Path) -> None:
    history = tmp_path / "history"
    for expected in ("you said hello", "you said hello"):
        terminal = Terminal(server.url, "--history", history)
        try:
            terminal.wait_for("> ")
            # Backspace, or the arrow up that recalls the line of the chat before.
            terminal.type("helli\x7fo\r" if not history.exists() else "\x1b[A\r")
            terminal.wait_for(expected)
            terminal.ask("\x04")
            assert terminal.wait_end() == 0
        finally:
            terminal.close()
    assert history.read_text().splitlines()[0] == "hello"
    assert history.stat().st_mode & 0o077 == 0


def test_an_artifact_under_a_terminal(chat_artifact: Path) -> None:
    terminal = Terminal(chat_artifact, "--max-tokens", "8", "--temperature", "0", "--stats", "--plain")
    try:
        terminal.wait_for("artifact: /help")
        terminal.ask("Hi")
        terminal.wait_for(f"prompt {len('<user>Hi<assistant>')} tokens, answer ")
        terminal.ask("x" * 64)
        terminal.wait_for("error: the conversation has ")
        terminal.wait_for("/reset")
        terminal.ask("/quit")
        assert terminal.wait_end() == 0
    finally:
        terminal.close()


# ---- pipes -------------------------------------------------------------------------------------------------------


def chat(*arguments: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "LLMC_API_KEY"}
    command = [*CHAT, *map(str, arguments)]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=120, check=False, env=environment
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
        (["ftp://x"], 1, "URL 'ftp://x' cannot be used: write http://HOST:PORT or https://HOST/v1"),
        (["http://user:pass@x"], 1, "cannot be used: write http://HOST:PORT or https://HOST/v1"),
        (["http://x:port"], 1, "URL 'http://x:port' is not valid"),
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


def test_an_artifact_answers_as_in_process(chat_artifact: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5)
    with LLM(chat_artifact) as llm:
        (output,) = llm.chat([{"role": "user", "content": "Hi"}], params)
    options = ["--max-tokens", "12", "--temperature", "0.8", "--seed", "5"]
    result = subprocess.run([*CHAT, str(chat_artifact), *options], input=b"Hi\n", capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.decode() == output.outputs[0].text + "\n"


def test_an_artifact_imports_no_compiler(chat_artifact: Path) -> None:
    code = (
        "import sys; from llmc.cli.main import main; code = main(sys.argv[1:]);"
        "print('LOADED', code, sorted({'torch', 'tvm', 'fastapi', 'openai'} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-P", "-c", code, "chat", str(chat_artifact), "--max-tokens", "4"]
    result = subprocess.run(command, input=b"Hi\n", capture_output=True, timeout=120)
    assert result.stderr.decode().strip().endswith("LOADED 0 []")


def test_a_model_without_template_says_so(tiny_artifact: Any) -> None:
    refused = chat(tiny_artifact.artifact, text="Hi\n")
    assert refused.returncode == 1
    assert "no default chat template: pass --raw to let it continue plain text" in refused.stderr or (
        "tokenizer.json is missing" in refused.stderr
    )


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


# ---- the parts ---------------------------------------------------------------------------------------------------


def test_closing_a_reply_cancels_the_request(tmp_path: Path) -> None:
    engine = FakeEngine()
    backend = EngineBackend(FakeLLM(engine, tmp_path))
    session = Session(raw=True, messages=[{"role": "user", "content": "ab"}], sampling={"max_tokens": 50})
    reply = backend.reply(session)
    assert next(iter(reply)).text == "b"
    reply.close()
    assert engine.cancelled == [1]
    assert not engine.queue
    again = backend.reply(session)
    assert "".join(piece.text for piece in again) == "ba" * 25
    again.close()
    assert engine.cancelled == [1], "a finished request is not cancelled"
    assert (again.completion_tokens, again.prompt_tokens, again.finish_reason) == (50, 2, "length")


def test_a_stop_string_ends_the_request(tmp_path: Path) -> None:
    engine = FakeEngine()
    session = Session(raw=True, messages=[{"role": "user", "content": "abc"}], sampling={"stop": ("ba",)})
    reply = EngineBackend(FakeLLM(engine, tmp_path)).reply(session)
    assert "".join(piece.text for piece in reply) == "c"
    assert (reply.finish_reason, engine.cancelled) == ("stop", [1])


def test_a_failed_request_is_an_error(tmp_path: Path) -> None:
    engine = FakeEngine(failing={ord("a"): 11})
    session = Session(raw=True, messages=[{"role": "user", "content": "ab"}])
    reply = EngineBackend(FakeLLM(engine, tmp_path)).reply(session)
    with pytest.raises(ChatError, match="after 2 prompt and 2 output tokens"):
        list(reply)


@pytest.mark.parametrize(
    "text", [MARKDOWN, "a\n\n- b\n\n- c\n\n  d\n\ne\n\n~~~\n\n```\n\nx\n\n~~~\n\nf", "| a |\n|---|\n\nb"]
)
def test_blocks_are_cut_where_it_changes_nothing(text: str) -> None:
    """However the text grows, what was cut off as complete is a prefix of the cut of the whole."""
    whole = complete_blocks(text)
    assert 0 < whole < len(text)
    for length in range(len(text)):
        cut = complete_blocks(text[:length])
        assert cut <= whole
        assert cut == 0 or text[:cut].endswith("\n")
        fences = [line for line in text[:cut].splitlines() if line.startswith(("```", "~~~"))]
        assert len([fence for fence in fences if fence == fences[0] or fence[:3] == fences[0][:3]]) % 2 == 0


def test_control_characters_are_left_out() -> None:
    assert printable("a\tb\nc\x1b[2Jd\x07\x9b\u202e\u2067é") == "a\tb\nc[2Jdé"


def test_commands_of_the_help_exist() -> None:
    from llmc.cli.chat_commands import HELP

    names = set(Commands(Session()).names)
    mentioned = set(re.findall(r"/[a-z-]+", HELP))
    assert mentioned == names - {"/exit"}


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    session = Session(system="S", messages=[{"role": "user", "content": "x"}], sampling={"seed": 1})
    contents = ["{", "3", "{}", '[{"role": "tool", "content": "x"}]', '[{"role": "user", "content": 3}]', "[" * 100_000]
    contents += ['{"messages": [], "sampling": {"top_p": 7}}', '{"messages": [], "sampling": {"nonsense": 1}}']
    contents += [
        '{"messages": [], "raw": true}',
        '[{"role": "user", "content": ""}, {"role": "system", "content": ""}]',
    ]
    for content in contents:
        file.write_text(content)
        with pytest.raises(ChatError):
            session.load(file)
        assert session == Session(system="S", messages=[{"role": "user", "content": "x"}], sampling={"seed": 1})
    with pytest.raises(ChatError, match="exists: name a new file"):
        session.save(file)


def test_settings() -> None:
    session = Session()
    commands = Commands(session)
    assert commands.take("/top-p").say == "top_p is the model's own"
    assert commands.take("/top-p 0.5").say == "top_p 0.5"
    with pytest.raises(ChatError, match=r"top_p 1\.5 is out of range"):
        commands.take("/top-p 1.5")
    assert session.sampling == {"top_p": 0.5}
    assert commands.take("/top-p default").say == "top_p is the model's own"
    assert session.sampling == {}
    assert commands.take('/system ""').say == "no system message"


def test_figures_of_an_answer() -> None:
    reply = Reply(iter(()), completion_tokens=11, prompt_tokens=5, cached_tokens=2, first_s=0.5, total_s=2.5)
    assert describe(reply) == "prompt 5 tokens (2 cached), answer 11 tokens, first token 500 ms, 5.0 tokens/s"
    assert describe(Reply(iter(()), completion_tokens=1, first_s=0.5, total_s=0.5)) == (
        "answer 1 tokens, first token 500 ms"
    )
