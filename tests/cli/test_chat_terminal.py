"""`llmc chat` under a terminal: against a server of scripted answers and an artifact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chat_terminal import PATIENCE_S, Terminal, escapes_removed
from support.scripted_server import ScriptedServer, scripted_server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


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
    terminal.wait_for("well")
    terminal.wait_for("you said think")
    terminal.ask("next")
    terminal.wait_for("you said next")
    assert server.asked[-1]["messages"][1]["content"] == "you said think"


def test_reasoning_without_an_answer_is_not_blank(terminal: Terminal, server: ScriptedServer) -> None:
    terminal.ask("only think")
    terminal.wait_for("hmm")
    terminal.wait_for("the answer ended within its reasoning")
    terminal.ask("next")
    terminal.wait_for("you said next")
    assert [message["content"] for message in server.asked[-1]["messages"]] == ["next"]


@pytest.mark.parametrize("counts", [True, False])
def test_a_full_context_leaves_out_the_oldest_messages(server: ScriptedServer, counts: bool) -> None:
    server.counts, server.max_model_len = counts, 30
    terminal = Terminal(server.url, "--system", "S", *([] if counts else ["--max-tokens", "8"]))
    try:
        for question in ("one 2 3 4", "two 2 3 4", "three 2 3 4", "four 2 3 4"):
            terminal.ask(question)
            terminal.wait_for(f"you said {question}")
        assert "no longer sent" in terminal.shown
        terminal.ask("/save /dev/null")
        terminal.wait_for("exists")
        terminal.ask("w " * 40)
        terminal.wait_for("error: ")
        terminal.ask("five")
        terminal.wait_for("you said five")
        terminal.ask("/quit")
        assert terminal.wait_end() == 0
    finally:
        terminal.close()
    for body in server.asked:
        system, first, *_ = body["messages"]
        assert (system["role"], first["role"]) == ("system", "user")
    assert server.asked[0]["messages"][1]["content"] == "one 2 3 4"
    assert server.asked[-1]["messages"][1]["content"] != "one 2 3 4"
    if counts:
        assert all(body["max_tokens"] >= 30 // 4 for body in server.asked)


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
    assert history.read_text().splitlines()[:2] == ["# history of llmc chat", "hello"]
    assert history.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"a text of mine\n", b"\xff\xfe\x00"])
def test_a_file_that_is_no_history_is_not_overwritten(content: bytes, server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_bytes(content)
    terminal = Terminal(server.url, "--history", file)
    try:
        terminal.wait_for("is no history of llmc chat: name a new file as --history")
        assert terminal.wait_end() == 1
    finally:
        terminal.close()
    assert file.read_bytes() == content


def test_an_artifact_under_a_terminal(chat_artifact: Path) -> None:
    terminal = Terminal(chat_artifact, "--max-tokens", "8", "--temperature", "0", "--stats", "--plain")
    try:
        terminal.wait_for("artifact: /help")
        terminal.ask("Hi")
        terminal.wait_for(f"prompt {len('<user>Hi<assistant>')} tokens, answer ")
        terminal.ask("x" * 64)
        terminal.wait_for("error: the message makes a prompt of 81 tokens and the model takes 64: shorten it")
        terminal.ask("y" * 30)
        terminal.wait_for("the context of 64 tokens is full: the oldest 2 messages are no longer sent")
        terminal.wait_for(f"prompt {len('<user><assistant>') + 30} tokens")
        terminal.ask("/quit")
        assert terminal.wait_end() == 0
    finally:
        terminal.close()
