"""The parts of `llmc chat`: replies of an engine, commands and settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmc.runtime.chat.backends import EngineBackend
from llmc.runtime.chat.commands import Commands, describe
from llmc.runtime.chat.session import ChatError, Reply, Session

from support.fake_llm import FakeEngine, FakeLLM


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


def test_an_engine_tells_reasoning_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM(FakeEngine(), tmp_path)
    answer = "<think>\nhm</think>\n\nyes"
    monkeypatch.setattr(llm, "encode_chat", lambda messages: [ord(char) for char in reversed(answer)])
    session = Session(messages=[{"role": "user", "content": "?"}], sampling={"max_tokens": len(answer)})
    pieces = list(EngineBackend(llm).reply(session))
    assert "".join(piece.text for piece in pieces if piece.reasoning) == "hm"
    assert "".join(piece.text for piece in pieces if not piece.reasoning) == "yes"


def test_a_raw_text_that_fills_the_context_goes_on(tmp_path: Path) -> None:
    llm = FakeLLM(FakeEngine(), tmp_path)
    session = Session(raw=True, messages=[{"role": "user", "content": "ab cd"}])
    for _ in range(4):
        reply = EngineBackend(llm).reply(session)
        text = "".join(piece.text for piece in reply)
        assert len(session.request_text()) + len(text) == llm.max_model_len, "an answer takes what fits"
        session.answer(text)
        session.ask("")
    assert reply.note == "the context of 64 tokens is full: the oldest 32 characters are no longer sent"
    assert len(session.request_text(first=0)) > 2 * llm.max_model_len


def test_a_failed_request_is_an_error(tmp_path: Path) -> None:
    engine = FakeEngine(failing={ord("a"): 11})
    session = Session(raw=True, messages=[{"role": "user", "content": "ab"}])
    reply = EngineBackend(FakeLLM(engine, tmp_path)).reply(session)
    with pytest.raises(ChatError, match="after 2 prompt and 2 output tokens"):
        list(reply)


def test_commands_of_the_help_exist() -> None:
    from llmc.runtime.chat.commands import HELP

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
