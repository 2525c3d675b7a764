"""A conversation that outgrows the context: which messages `llmc chat` still sends."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from llmc.runtime.chat.context import fit
from llmc.runtime.chat.session import ChatError, Session

LIMIT = 100


def conversation(num_exchanges: int, words: int = 10, **settings: int) -> Session:
    """Exchanges of `words` words a message, and a last question."""
    session = Session(sampling=dict(settings))
    for _ in range(num_exchanges):
        session.ask("q " * words)
        session.answer("a " * words)
    session.ask("q " * words)
    return session


def words(session: Session) -> Callable[[int], int]:
    return lambda first: sum(len(message["content"].split()) for message in session.request_messages(first))


def test_what_fits_is_sent_whole() -> None:
    session = conversation(3)
    fitting = fit(session, words(session), LIMIT)
    assert (fitting.room, fitting.note, session.first) == (30, "", 0)


def test_a_full_context_keeps_the_newest_half_and_the_system_message() -> None:
    session = conversation(4)
    session.system = "be brief"
    fitting = fit(session, words(session), LIMIT)
    assert session.first == 6
    assert fitting.note == "the context of 100 tokens is full: the oldest 6 messages are no longer sent"
    assert fitting.room == 100 - 2 - 30
    assert [message["role"] for message in session.request_messages()] == ["system", "user", "assistant", "user"]
    assert len(session.messages) == 9, "what is not sent stays in the conversation"


def test_a_set_length_of_the_answer_is_kept_free() -> None:
    session = conversation(3, max_tokens=25)
    assert (fit(session, words(session), LIMIT).room, session.first) == (30, 0)
    session = conversation(3, max_tokens=75)
    assert (fit(session, words(session), LIMIT).room, session.first) == (90, 6)


@pytest.mark.parametrize(
    ("last", "settings", "message"),
    [
        (100, {}, r"the message makes a prompt of 100 tokens and the model takes 100: shorten it"),
        (20, {"max_tokens": 90}, r"max_tokens 90 and a prompt of 20 tokens exceed the model's 100: ask for at most 80"),
    ],
)
def test_what_cannot_fit_is_an_error_and_nothing_is_forgotten(
    last: int, settings: dict[str, int], message: str
) -> None:
    session = conversation(3, **settings)
    session.messages[-1]["content"] = "q " * last
    with pytest.raises(ChatError, match=message):
        fit(session, words(session), LIMIT)
    assert session.first == 0


def test_a_long_last_question_is_sent_alone_with_what_room_is_left() -> None:
    session = conversation(3)
    session.messages[-1]["content"] = "q " * 95
    assert (fit(session, words(session), LIMIT).room, session.first) == (5, 6)


def test_a_conversation_never_ends_in_an_error() -> None:
    """However long its messages are, as long as each of them fits."""
    choose = random.Random(5)
    session = Session(system="s " * 5)
    num_notes = 0
    for _ in range(200):
        session.ask("q " * choose.randint(1, 40))
        fitting = fit(session, words(session), LIMIT)
        assert words(session)(session.first) + fitting.room == LIMIT
        assert session.messages[session.first]["role"] == "user"
        num_notes += bool(fitting.note)
        session.answer("a " * min(fitting.room, choose.randint(1, 60)))
    assert 20 < num_notes < 150


def test_taking_back_and_starting_over_send_everything_again() -> None:
    session = conversation(4)
    fit(session, words(session), LIMIT)
    session.undo()
    session.undo()
    assert (session.first, len(session.messages)) == (4, 6)
    session.undo()
    assert (session.first, len(session.messages)) == (0, 4)
    session.first = 4
    session.reset()
    assert (session.first, session.messages) == (0, [])
