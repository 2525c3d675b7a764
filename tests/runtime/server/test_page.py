"""The live page: its files and state over HTTP, and itself in a headless browser."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmc.runtime.server.page_files import PAGE_PATHS, read_page_files
from llmc.runtime.server.requests import RequestRecord

from support.browser import Browser, chromium
from support.paths import ROOT
from support.server_harness import Running, error_of, running_server, slow_down, until

PAGE = ROOT / "runtime" / "server" / "page"
SECRET = "the cat sat on the mat"
LONG = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact) as running:
        yield running


@pytest.fixture(scope="module")
def program() -> str:
    found = chromium()
    if found is None:
        pytest.skip("no chromium on this machine")
    return found


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def test_every_file_is_served_with_a_strict_policy(running: Running) -> None:
    names = {Path(path).name or "index.html" for path in PAGE_PATHS}
    assert {path.name for path in PAGE.iterdir()} | {"tokens.css"} == names
    for file in read_page_files():
        response = running.client.get(file.path)
        assert response.status_code == 200, file.path
        assert response.content == file.content
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        again = running.client.get(file.path, headers={"If-None-Match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/index.html", "/page/x.js"])
def test_no_other_file_can_be_had(running: Running, path: str) -> None:
    assert running.client.get(path).status_code == 404


def test_sources_use_no_markup_and_nothing_from_elsewhere() -> None:
    for file in PAGE.iterdir():
        text = file.read_text(encoding="utf-8")
        addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]+", text)) - {"http://www.w3.org"}
        assert not addresses, f"{file.name} names {addresses}"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert not re.search(r"sessionStorage|document\.cookie|indexedDB", text), file.name
        # What is kept is seen in one place; the key is not part of it.
        assert ("localStorage" in text) == (file.name in ("store.js", "early.js")), file.name
        assert not re.search(r"\son\w+=|\sstyle=|javascript:", text), file.name


def test_state_tells_lengths_and_no_text(running: Running) -> None:
    before = running.client.get("/v1/llmc/state").json()
    usage = running.complete(SECRET, max_tokens=6, ignore_eos=True)["usage"]
    after = running.client.get("/v1/llmc/state").json()
    gained = {key: after["engine"][key] - before["engine"][key] for key in ("prompt_tokens", "generation_tokens")}
    assert gained == {"prompt_tokens": usage["prompt_tokens"], "generation_tokens": 6}
    assert (after["model"], after["ready"], after["chat"]) == ("tiny", True, True)
    assert after["latency"]["ttft"]["p50"] <= after["latency"]["total"]["p99"]
    graphs = {(graph.phase, graph.batch, graph.seq) for graph in running.engine.graphs}
    assert {(bucket["phase"], bucket["batch"], bucket["seq"]) for bucket in after["buckets"]} == graphs
    assert sum(bucket["tokens"] for bucket in after["buckets"]) == after["engine"]["scheduled_tokens"]
    assert all(0 <= bucket["padding_s"] <= bucket["replay_s"] for bucket in after["buckets"])
    assert "cat" not in json.dumps(after)


def test_state_lists_running_requests(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(running.engine, monkeypatch)
    body = {"prompt": SECRET, "stream": True, "n": 2, **LONG}
    with running.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        state = running.client.get("/v1/llmc/state").json()
    (request,) = state["requests"]
    assert set(request) == {"id", "age_s", "prompt_tokens", "cached_tokens", "output_tokens", "max_tokens"}
    assert state["num_requests"] == 1
    assert 0 < request["output_tokens"] < request["max_tokens"] == 800
    assert state["engine"]["kv_blocks_used"] > 0
    until(lambda: running.client.get("/v1/llmc/state").json()["requests"] == [])


def test_with_keys_the_state_needs_one_and_the_page_does_not(english_artifact: Path) -> None:
    with running_server(english_artifact, api_keys=("hush",)) as running:
        error_of(running.client.get("/v1/llmc/state"), 401)
        assert running.client.get("/metrics").status_code == 401
        assert running.client.get("/").status_code == 200
        assert running.client.get("/v1/llmc/state", headers={"Authorization": "Bearer hush"}).status_code == 200


def test_page_and_metrics_can_be_left_out(english_artifact: Path) -> None:
    with running_server(english_artifact, enable_page=False, enable_metrics=False) as running:
        for path in ("/", "/page/page.js", "/v1/llmc/state", "/metrics"):
            assert running.client.get(path).status_code == 404, path


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture
def page(program: str, tmp_path: Path) -> Iterator[Browser]:
    with Browser(program, tmp_path / "profile") as page:
        yield page


def text(page: Browser, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))


def ask(page: Browser, message: str) -> None:
    page.evaluate(f"document.getElementById('input').value = {json.dumps(message)}")
    page.evaluate("document.getElementById('composer').requestSubmit()")


def answers(page: Browser) -> list[str]:
    """The texts of the model, before they were drawn as Markdown."""
    turns = page.evaluate("JSON.parse(localStorage.getItem('llmc.conversation')).turns")
    return [str(turn["content"]) for turn in turns if turn["role"] == "assistant"]


def answered(page: Browser) -> None:
    page.wait_for("document.querySelectorAll('.message.assistant:not(.live) .meta').length > 0")


@contextmanager
def traffic(running: Running) -> Iterator[None]:
    """Requests without a pause: the page looks once a second, and one request may be over by then."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            running.complete(SECRET, n=8, **LONG)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_dashboard_shows_what_the_server_does(running: Running, page: Browser) -> None:
    page.open(running.url)
    page.wait_for("document.getElementById('status').dataset.state === 'ok'")
    assert text(page, "#model") == "tiny"
    graphs = running.engine.graphs
    assert page.evaluate("document.querySelectorAll('.cell:not(.none)').length") == len(graphs)
    assert page.evaluate("[...document.querySelectorAll('.grid .name')].map((one) => one.textContent)") == [
        "Prefill",
        "Decode",
    ]
    with traffic(running):
        page.wait_for("document.querySelector('#requests td')?.textContent.startsWith('cmpl-')")
        page.wait_for("Number(document.getElementById('generation').textContent.replaceAll(',', '')) > 0")
        page.wait_for("document.querySelector('#generation-chart .curve')")
    page.wait_for("!document.getElementById('idle').hidden")
    assert "cat" not in page.evaluate("document.querySelector('.board').innerText")
    hot = "[...document.querySelectorAll('.cell')].find((one) => parseInt(one.style.getPropertyValue('--heat')) > 0)"
    page.evaluate(f"{hot}.dispatchEvent(new PointerEvent('pointerover', {{bubbles: true}}))")
    assert re.match(
        r"(prefill|decode) \d+ × \d+: [\d,]+ replays?, [\d,]+ tokens, [\d.]+ % padding", text(page, "#heat-detail")
    )
    assert page.errors == []
    assert page.requests
    assert all(address.startswith(f"{running.url}/") for address in page.requests)


def test_chat_streams_and_continues(running: Running, page: Browser) -> None:
    page.open(running.url)
    page.wait_for("document.getElementById('status').dataset.state === 'ok'")
    page.evaluate("document.getElementById('max-tokens').value = 12")
    page.evaluate("document.getElementById('temperature').value = 0")
    ask(page, SECRET)
    answered(page)
    expected = running.chat(SECRET, max_tokens=12, temperature=0)["choices"][0]["message"]["content"]
    assert answers(page) == [expected]
    assert re.match(r"\d+ tokens · ", text(page, ".message.assistant .meta"))
    ask(page, "and then")
    page.wait_for("document.querySelectorAll('.message.assistant:not(.live)').length === 2")
    messages = [
        {"role": "user", "content": SECRET},
        {"role": "assistant", "content": expected},
        {"role": "user", "content": "and then"},
    ]
    second = running.post("/v1/chat/completions", messages=messages, max_tokens=12, temperature=0).json()
    assert answers(page) == [expected, second["choices"][0]["message"]["content"]]
    page.evaluate("document.getElementById('clear').click()")
    assert page.evaluate("document.getElementById('messages').childElementCount") == 0
    assert page.errors == []


def test_stop_cancels_the_request(running: Running, page: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    page.open(running.url)
    page.wait_for("document.getElementById('status').dataset.state === 'ok'")
    # An answer that takes long enough to be stopped: the page itself has no setting for that.
    slow_down(running.engine, monkeypatch)
    page.evaluate(
        "window.fetch = ((send) => (path, options) => send(path, options.body ? {...options, "
        "body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true})} : options))(window.fetch); 0"
    )
    page.evaluate("document.getElementById('max-tokens').value = 450")
    records: list[RequestRecord] = []
    running.engine.on_record.append(records.append)
    try:
        ask(page, SECRET)
        page.wait_for("document.querySelector('.message.assistant .text')?.textContent")
        assert text(page, "#send") == "Stop"
        page.evaluate("document.getElementById('composer').requestSubmit()")
        answered(page)
        until(lambda: len(records) == 1)
    finally:
        running.engine.on_record.pop()
    assert set(records[0].finish_reasons) == {"cancelled"}
    assert text(page, ".message.assistant .meta").endswith("stopped")
    assert text(page, "#send") == "Send"


def test_text_is_never_markup(running: Running, page: Browser) -> None:
    page.open(running.url)
    page.wait_for("document.getElementById('status').dataset.state === 'ok'")
    evil = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>'
    page.evaluate("document.getElementById('max-tokens').value = 1")
    ask(page, evil)
    answered(page)
    assert text(page, ".message.user .text") == evil
    assert page.evaluate("document.querySelectorAll('.messages img, .messages script').length") == 0
    assert page.evaluate("window.hacked === undefined")


def test_errors_are_told(running: Running, page: Browser) -> None:
    page.open(running.url)
    page.wait_for("document.getElementById('status').dataset.state === 'ok'")
    page.evaluate("document.getElementById('max-tokens').value = 100000")
    ask(page, SECRET)
    page.wait_for("document.querySelector('.message.error .text')")
    answer = running.post("/v1/chat/completions", messages=[{"role": "user", "content": SECRET}], max_tokens=100000)
    assert text(page, ".message.error .text") == error_of(answer, 400)["message"]
    assert text(page, "#send") == "Send"


def record_requests(page: Browser) -> None:
    """Keeps the bodies of chat requests in `asked`."""
    page.evaluate(
        "window.asked = []; window.fetch = ((send) => (path, options) => {"
        "if (String(path).endsWith('chat/completions')) asked.push(JSON.parse(options.body));"
        "return send(path, options)})(window.fetch); 0"
    )


def test_an_answer_may_have_what_fits_and_a_full_context_leaves_out_the_oldest_turns(
    running: Running, page: Browser
) -> None:
    page.open(running.url)
    page.wait_for("document.getElementById('status').dataset.state === 'ok'")
    record_requests(page)
    page.evaluate("document.getElementById('temperature').value = 0")
    page.evaluate("document.getElementById('system').value = 'Be brief.'")
    ask(page, SECRET)
    answered(page)
    asked = page.evaluate("asked")
    count = running.post("/tokenize", messages=asked[0]["messages"]).json()
    assert asked[0]["max_tokens"] == count["max_model_len"] - count["count"]
    page.evaluate("document.getElementById('clear').click()")
    page.evaluate("document.getElementById('max-tokens').value = 8")
    for i in range(1, 8):
        ask(page, f"{i}: " + f"{SECRET} " * 12)
        page.wait_for(f"document.querySelectorAll('.message.assistant:not(.live) .meta').length === {i}")
        assert text(page, ".message.error .text") == ""
    notes = page.evaluate("[...document.querySelectorAll('.message.aside')].map((one) => one.textContent)")
    assert 1 <= len(notes) <= 3
    assert re.fullmatch(r"The context is full: the oldest \d+ messages are no longer sent\.", notes[0])
    for body in page.evaluate("asked"):
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert body["messages"][1]["role"] == "user"
        size = running.post("/tokenize", messages=body["messages"]).json()
        assert size["count"] + body["max_tokens"] <= size["max_model_len"]
    assert page.evaluate("asked.at(-1).messages.at(-1).content").startswith("7: ")
    assert not page.evaluate("asked.at(-1).messages[1].content").startswith("1: ")
    assert page.errors == []


def test_a_full_context_without_counts_is_no_dead_end(running: Running, page: Browser) -> None:
    page.open(running.url)
    page.wait_for("document.getElementById('status').dataset.state === 'ok'")
    page.evaluate(
        "window.fetch = ((send) => (path, options) => String(path).endsWith('tokenize')"
        "? Promise.resolve(new Response('{}', {status: 404})) : send(path, options))(window.fetch); 0"
    )
    record_requests(page)
    page.evaluate("document.getElementById('max-tokens').value = 8")
    for i in range(1, 6):
        ask(page, f"{i}: " + f"{SECRET} " * 15)
        page.wait_for(f"document.querySelectorAll('.message.assistant:not(.live) .meta').length === {i}")
    assert text(page, ".message.aside").startswith("The context is full")
    assert text(page, ".message.error .text") == ""
    assert page.evaluate("asked.at(-1).messages.at(-1).content").startswith("5: ")


def test_reasoning_is_shown_above_the_answer(running: Running, page: Browser) -> None:
    page.open(running.url)
    page.wait_for("document.getElementById('status').dataset.state === 'ok'")
    # What a server of a reasoning model sends, an event at a time.
    page.evaluate(
        "window.fetch = ((send) => (path, options) => String(path).endsWith('chat/completions')"
        "? Promise.resolve(new Response(new ReadableStream({start: (stream) => { window.push = (choice) => choice"
        "? stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify({choices: [choice]})}\\n\\n`))"
        ": stream.close(); }}))) : send(path, options))(window.fetch); 0"
    )
    ask(page, SECRET)
    page.wait_for("window.push")
    page.evaluate("push({delta: {reasoning_content: 'Let me '}})")
    page.evaluate("push({delta: {reasoning_content: 'see.'}})")
    page.wait_for("document.querySelector('.reasoning[open] .text')?.textContent === 'Let me see.'")
    assert text(page, ".reasoning summary") == "Thinking …"
    page.evaluate("push({delta: {content: 'A cat.'}, finish_reason: 'stop'})")
    page.evaluate("push(null)")
    answered(page)
    assert text(page, ".message.assistant > .text") == "A cat."
    assert text(page, ".reasoning summary").startswith("Thought for ")
    assert page.evaluate("document.querySelector('.reasoning').open") is False
    assert page.evaluate("document.querySelector('.reasoning').nextElementSibling.className") == "text"
    page.evaluate("window.push = null")
    ask(page, "and now?")
    page.wait_for("window.push")
    page.evaluate("push({delta: {reasoning_content: 'Hm'}, finish_reason: 'length'})")
    page.evaluate("push(null)")
    page.wait_for("document.querySelectorAll('.message.assistant:not(.live)').length === 2")
    assert page.evaluate("[...document.querySelectorAll('.reasoning')].at(-1).open") is True
    meta = page.evaluate("[...document.querySelectorAll('.meta')].at(-1).textContent")
    assert meta.endswith("ended by the limit of tokens, within the reasoning: allow more of them")
    assert page.errors == []


def test_page_asks_for_the_key_and_keeps_it_in_memory(english_artifact: Path, page: Browser) -> None:
    with running_server(english_artifact, api_keys=("hush",)) as running:
        page.open(running.url)
        page.wait_for("!document.getElementById('key-field').hidden")
        assert text(page, "#status") == "needs an API key"
        page.evaluate("key.value = 'hush'; key.dispatchEvent(new Event('input'))")
        page.wait_for("document.getElementById('status').dataset.state === 'ok'")
        assert "hush" not in page.evaluate("JSON.stringify({...localStorage, ...sessionStorage}) + document.cookie")
        assert not any("hush" in address for address in page.requests)


def test_a_model_without_chat_template_continues_text(english_artifact: Path, page: Browser, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    shutil.copytree(english_artifact, artifact)
    (artifact / "chat_template.jinja").unlink()
    with running_server(artifact) as running:
        page.open(running.url)
        page.wait_for("document.getElementById('chat-title').textContent === 'Completion'")
        page.evaluate("document.getElementById('max-tokens').value = 8")
        page.evaluate("document.getElementById('temperature').value = 0")
        ask(page, SECRET)
        answered(page)
        expected = running.complete(SECRET, max_tokens=8, temperature=0)["choices"][0]["text"]
        assert text(page, ".message.assistant .text") == expected
