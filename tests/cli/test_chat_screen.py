"""What `llmc chat` prints of a reply that grows."""

from __future__ import annotations

import pytest

from llmc.cli.render.chat_screen import complete_blocks
from llmc.cli.render.terminal_text import printable

from support.scripted_server import MARKDOWN


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
