"""Images in requests over HTTP: the same tokens as in Python, errors that say what to do, and clients that leave."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams

from support.image_forms import encoded, picture
from support.seeing_chat import Seeing, compile_seeing_chat
from support.server_harness import Running, error_of, running_server, until

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SETTINGS: dict[str, Any] = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def seeing(kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return compile_seeing_chat(tmp_path_factory.mktemp("seeing"), "smolvlm", kernel_cache)


@pytest.fixture(scope="module")
def running(seeing: Seeing) -> Iterator[Running]:
    with running_server(seeing.text, images=seeing.tower, max_images=3) as server:
        yield server


def _data(image: Any) -> str:
    return base64.b64encode(encoded(image)).decode()


def _url(image: Any) -> str:
    return f"data:image/png;base64,{_data(image)}"


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def _asked(*urls: str, text: str = "What is it?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(_part, urls), {"type": "text", "text": text}]}]


def test_an_answer_is_that_of_the_python_api(running: Running, seeing: Seeing) -> None:
    url = _url(picture(150, 70))
    with LLM(seeing.text, images=seeing.tower, num_threads=1) as llm:
        (expected,) = llm.chat(_asked(url), SamplingParams(temperature=0.0, max_tokens=6))
    answer = running.post(CHAT, messages=_asked(url), return_token_ids=True, **SETTINGS).json()
    assert answer["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert answer["choices"][0]["token_ids"] == list(expected.outputs[0].token_ids)
    assert answer["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    events = running.events(CHAT, messages=_asked(url), **SETTINGS)
    streamed = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert streamed == expected.outputs[0].text
    tokens = running.post("/tokenize", messages=_asked(url)).json()["tokens"]
    assert tokens == list(expected.prompt_token_ids)


def test_all_apis_show_the_model_the_same(running: Running) -> None:
    image = picture(60, 90)
    text = running.post(CHAT, messages=_asked(_url(image)), **SETTINGS).json()
    parts = [{"type": "input_image", "image_url": _url(image)}, {"type": "input_text", "text": "What is it?"}]
    body: dict[str, Any] = {"input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 6}
    response = running.post(RESPONSES, **body).json()
    assert response["output"][0]["content"][0]["text"] == text["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == text["usage"]["prompt_tokens"]
    source = {"type": "base64", "media_type": "image/png", "data": _data(image)}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": blocks}], **SETTINGS}
    message = running.post(MESSAGES, **body).json()
    assert message["content"][0]["text"] == text["choices"][0]["message"]["content"]
    counted = running.post(f"{MESSAGES}/count_tokens", messages=body["messages"]).json()
    assert counted["input_tokens"] == text["usage"]["prompt_tokens"]
    more = {"input": "And now?", "previous_response_id": response["id"], "max_output_tokens": 6}
    assert running.post(RESPONSES, **more).json()["usage"]["input_tokens"] > response["usage"]["input_tokens"]


def test_variables_of_templates_may_have_any_name(running: Running) -> None:
    asked = {"messages": _asked(_url(picture(60, 90))), **SETTINGS}
    expected = running.post(CHAT, **asked).json()["choices"][0]["message"]
    answer = running.post(CHAT, chat_template_kwargs={"placeholder": "mine"}, **asked)
    assert answer.json()["choices"][0]["message"] == expected


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64,AAAA", "an image is of no known format, or damaged: give JPEG"),
        ("data:image/png;base64,A", "an image is not valid base64"),
        (_url(picture(40, 40))[:-400], "an image cannot be decoded"),
    ],
)
def test_damaged_images_are_refused(running: Running, url: str, why: str) -> None:
    error = error_of(running.post(CHAT, messages=_asked(url)), 400)
    assert (error["code"], error["param"]) == ("invalid_image", "messages")
    assert error["message"].startswith(why)


def test_nothing_is_fetched(running: Running) -> None:
    error = error_of(running.post(CHAT, messages=_asked("http://169.254.169.254/latest/meta-data")), 400)
    assert error["param"] == "messages.0.content.0.image_url.url"
    assert "is not fetched: send its bytes, as data:image/png;base64," in error["message"]
    source = {"type": "url", "url": "https://example.com/cat.png"}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    answer = running.post(MESSAGES, messages=messages, max_tokens=5)
    assert answer.status_code == 400
    assert "is not fetched" in answer.json()["error"]["message"]


def test_limits(running: Running) -> None:
    small = _url(picture(10, 10))
    error = error_of(running.post(CHAT, messages=_asked(*[small] * 4)), 400)
    assert error["message"] == "the request has 4 images: give at most 3"
    text = {"messages": _asked(small, text="Is <image> here?")}
    error = error_of(running.post(CHAT, **text), 400)
    assert "messages.0.content.1.text has the text <image>, which stands for an image" in error["message"]
    # Beside no image it is what it always was: a token.
    assert running.post(CHAT, messages=_asked(text="Is <image> here?"), **SETTINGS).status_code == 200
    error = error_of(running.post(CHAT, messages=_asked(small), truncate_prompt_tokens=5), 400)
    assert error["param"] == "truncate_prompt_tokens"


def test_a_prompt_beyond_the_context_is_refused_before_anything_is_encoded(running: Running) -> None:
    tower = running.server.images.tower
    assert tower is not None
    before = tower.stats.images
    text = "x" * 500
    error = error_of(running.post(CHAT, messages=_asked(_url(picture(91, 33)), text=text)), 400)
    assert error["code"] == "context_length_exceeded"
    assert tower.stats.images == before


def test_a_server_without_images_says_so(seeing: Seeing) -> None:
    with running_server(seeing.text) as blind:
        error = error_of(blind.post(CHAT, messages=_asked(_url(picture(10, 10)))), 400)
        assert error["code"] == "images_not_supported"
        assert error["message"].startswith("this server sees no images: start it with --images")
        assert "input_modalities" not in blind.client.get("/v1/models").json()["data"][0]
        assert "llmc_images" not in blind.client.get("/metrics").text


def test_what_it_sees_is_told(running: Running) -> None:
    assert running.client.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]
    url = _url(picture(77, 55))
    for _ in range(2):
        assert running.post(CHAT, messages=_asked(url), **SETTINGS).status_code == 200
    tower = running.server.images.tower
    assert tower is not None
    told = running.client.get("/metrics").text
    assert f"llmc_images_encoded_total {float(tower.stats.images)}" in told
    assert f"llmc_images_reused_total {float(tower.stats.reused)}" in told
    assert tower.stats.reused > 0
    assert "llmc_image_encode_seconds_total" in told


@contextmanager
def image_held(running: Running, monkeypatch: pytest.MonkeyPatch, side: int) -> Iterator[list[tuple[int, int]]]:
    """While the image of one request is being encoded; then that request is answered. Yields sizes of images that were
    begun."""
    work, answers = running.server.images, list[httpx.Response]()
    assert work.tower is not None
    go_on, begun, sizes = threading.Event(), threading.Event(), list[tuple[int, int]]()
    rows = work.tower.rows

    def slow(seen: Any) -> Any:
        sizes.append(seen.picture.size)
        begun.set()
        assert go_on.wait(60)
        return rows(seen)

    monkeypatch.setattr(work.tower, "rows", slow)
    url = _url(picture(side, side))
    first = threading.Thread(target=lambda: answers.append(running.post(CHAT, messages=_asked(url), **SETTINGS)))
    first.start()
    try:
        assert begun.wait(60)
        yield sizes
        until(lambda: work.num_waiting == 1)
    finally:
        go_on.set()
        first.join()
    assert answers[0].status_code == 200


def test_nothing_is_encoded_for_a_client_that_left(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with image_held(running, monkeypatch, 31) as sizes, pytest.raises(httpx.TimeoutException):
        running.client.post(CHAT, json={"messages": _asked(_url(picture(32, 32)))}, timeout=0.5)
    assert sizes == [(31, 31)]
    assert running.server.images.num_waiting == 0


def test_a_time_limit_counts_the_wait_for_images(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": _asked(_url(picture(42, 42))), **SETTINGS}
    with image_held(running, monkeypatch, 41) as sizes:
        error = error_of(running.client.post(CHAT, json=body, headers={"X-Request-Timeout": "0.3"}), 408)
    assert error["code"] == "request_timeout"
    assert "give fewer or smaller images" in error["message"]
    assert running.client.post(CHAT, json=body, headers={"X-Request-Timeout": "x"}).status_code == 400
    assert sizes == [(41, 41)]


def test_the_answer_has_the_time_that_images_leave(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = running.server.images.tower
    assert tower is not None
    rows, limits = tower.rows, list[float | None]()

    def slow(seen: Any) -> Any:
        time.sleep(0.2)
        return rows(seen)

    monkeypatch.setattr(tower, "rows", slow)
    monkeypatch.setattr(running.engine, "on_submit", [lambda request: limits.append(request.deadline_s)])
    body = {"messages": _asked(_url(picture(43, 43))), **SETTINGS}
    assert running.client.post(CHAT, json=body, headers={"X-Request-Timeout": "1000"}).status_code == 200
    assert running.client.post(CHAT, json=body).status_code == 200
    (left, none) = limits
    assert left is not None
    assert 0 < left <= 1000 - 0.2
    assert none is None
