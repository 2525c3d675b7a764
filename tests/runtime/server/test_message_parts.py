"""Messages whose contents are lists of parts, over HTTP, with a template that reads parts as those of images do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.manifests import edit_manifest
from support.server_harness import Running, running_server

TEMPLATE = """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ part.text if part.type == 'text' }}{% endfor %}{% endif %}.{% endfor %}"""


@pytest.fixture(scope="module")
def running(english_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    artifact = tmp_path_factory.mktemp("parts") / "artifact"
    shutil.copytree(english_artifact, artifact)
    (artifact / "chat_template.jinja").write_text(TEMPLATE)
    edit_manifest(artifact, files={})  # files that it does not list are not checked
    with running_server(artifact) as running:
        yield running


def tokens(running: Running, content: Any, **more: Any) -> list[int]:
    messages = [{"role": "user", "content": content}]
    found: list[int] = running.post("/tokenize", messages=messages, add_generation_prompt=False, **more).json()[
        "tokens"
    ]
    return found


def test_parts_reach_the_template(running: Running) -> None:
    parts = [{"type": "text", "text": "The evening"}, {"type": "text", "text": " passed"}]
    assert tokens(running, parts) == tokens(running, "The evening passed")
    assert tokens(running, [{"type": "text", "text": "The evening passed"}]) == tokens(running, "The evening passed")


def test_a_last_message_that_is_continued_is_one_text(running: Running) -> None:
    parts = [{"type": "text", "text": "The evening"}, {"type": "text", "text": "passed"}]
    continued = tokens(running, parts, continue_final_message=True)
    assert continued == tokens(running, "The evening\npassed", continue_final_message=True)
    assert running.post("/detokenize", tokens=continued).json()["prompt"].endswith("The evening\npassed")
