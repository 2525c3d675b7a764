"""The live page in Chromium: what a reader does with it, in both widths and both colours, without a violation."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llmc.buckets.replanning.evenness import Evenness
from llmc.buckets.replanning.shapes import ShapeUse, StepShape
from llmc.runtime.server.async_engine import AsyncEngine

from support import pages
from support.marks import rare
from support.pages import axe_violations
from support.server_harness import Running, running_server, slow_down, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
# What a server would send: window.push(choice) sends an event, window.push(null) ends the stream.
SCRIPTED = """
window.asked = [];
const send = window.fetch;
window.fetch = (path, options) => {
  if (!String(path).endsWith("chat/completions")) return send(path, options);
  asked.push(JSON.parse(options.body));
  return Promise.resolve(new Response(new ReadableStream({start: (stream) => {
    options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
    window.push = (choice) => choice
      ? stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify({choices: [choice]})}\\n\\n`))
      : stream.close();
  }})));
};
"""
MARKDOWN = """# Title

Some **bold**, *slanted*, ~~old~~ and `code` with [a link](https://example.org/x) and [none](javascript:alert(1)).

1. one
2. two
   - deep

| a | b |
|---|--:|
| x | 1 |

> a quote

```python
print("<b>")
```

<img src=x onerror="window.hacked = 1"> ![a picture](https://example.org/p.png)"""


@pytest.fixture(scope="module")
def running(english_artifact: Path) -> Iterator[Running]:
    with running_server(english_artifact) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with pages.browser() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser, running: Running) -> Iterator[Page]:
    """The page with scripted answers; it may complain of nothing, and ask nobody else."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    opened = context.new_page()
    complaints: list[str] = []
    opened.on("console", lambda told: complaints.extend([told.text] if told.type in ("error", "warning") else []))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on(
        "request", lambda request: complaints.extend([] if request.url.startswith(running.url) else [request.url])
    )
    opened.add_init_script(SCRIPTED)
    show(opened, running)
    yield opened
    found = list(complaints)  # a page that closes has no scripted answers any more
    context.close()
    assert found == []


def show(page: Page, running: Running) -> None:
    page.goto(running.url)
    page.wait_for_selector('#status[data-state="ok"]')


def wait(page: Page, expression: str) -> None:
    """Until it is true; Playwright's own way would have the page evaluate text, which its policy forbids."""
    until(lambda: bool(page.evaluate(f"Boolean({expression})")))


def begin(page: Page, text: str) -> None:
    """Sends a message; the answer is not over."""
    number = page.evaluate("asked.length")
    page.fill("#input", text)
    page.press("#input", "Enter")
    wait(page, f"asked.length > {number}")


def answer(page: Page, *choices: dict[str, Any]) -> None:
    for choice in choices:
        page.evaluate("(choice) => push(choice)", choice)
    page.evaluate("push(null)")
    page.wait_for_selector(".message.live", state="detached")


def says(text: str, finish: str = "stop") -> dict[str, Any]:
    return {"delta": {"content": text}, "finish_reason": finish}


def test_answers_are_markdown_and_never_markup(page: Page) -> None:
    begin(page, "<b>hello</b>")
    for at in range(0, len(MARKDOWN), 40):  # a block is drawn anew while it grows
        page.evaluate("(text) => push({delta: {content: text}})", MARKDOWN[at : at + 40])
    answer(page, {"delta": {}, "finish_reason": "stop"})
    text = page.locator(".message.assistant > .text")
    for selector in (
        "h3",
        "strong",
        "em",
        "del",
        "p code",
        "ol > li",
        "li ul > li",
        "td.right",
        "blockquote p",
        "pre code",
    ):
        assert text.locator(selector).count() >= 1, selector
    assert text.locator("pre code").text_content() == 'print("<b>")'
    links = text.locator("a").evaluate_all("(all) => all.map((one) => [one.href, one.rel])")
    assert [href for href, _ in links] == ["https://example.org/x", "https://example.org/p.png"]
    assert all("noopener" in rel for _, rel in links)
    assert page.locator(".messages img, .messages script, .message.user b").count() == 0
    assert page.evaluate("window.hacked === undefined")
    assert page.locator(".message.user .text").text_content() == "<b>hello</b>"


def test_copy_an_answer_and_a_block_of_code(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    begin(page, "code, please")
    answer(page, says("Here:\n\n```\nx = 1\n```"))
    page.click(".copy-code")
    page.wait_for_selector('.copy-code:text("Copied")')
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"
    page.click(".message.assistant .copy")
    page.wait_for_selector('.message.assistant .copy:text("Copied")')
    assert page.evaluate("navigator.clipboard.readText()") == "Here:\n\n```\nx = 1\n```"


def test_regenerate_and_edit(page: Page) -> None:
    begin(page, "one")
    answer(page, says("first"))
    begin(page, "two")
    answer(page, says("second"))
    page.locator(".message.assistant .again").last.click()
    wait(page, "asked.length === 3")
    answer(page, says("again"))
    contents = [message["content"] for message in page.evaluate("asked[2].messages")]
    assert contents == ["one", "first", "two"]
    assert page.locator(".message.assistant > .text").all_text_contents() == ["first", "again"]
    page.locator(".message.user .edit").first.click()
    page.fill(".editor textarea", "uno")
    page.press(".editor textarea", "Enter")
    wait(page, "asked.length === 4")
    answer(page, says("changed"))
    assert page.evaluate("asked[3].messages") == [{"role": "user", "content": "uno"}]
    assert page.locator(".message").count() == 2
    page.press("#input", "ArrowUp")
    assert page.locator(".editor textarea").input_value() == "uno"
    page.press(".editor textarea", "Escape")
    assert page.locator(".editor").count() == 0


def test_stop_keeps_what_came(page: Page) -> None:
    begin(page, "long")
    page.evaluate("push({delta: {content: 'half an '}})")
    page.wait_for_selector('.message.live:has-text("half an")')
    page.keyboard.press("Escape")
    page.wait_for_selector(".message.live", state="detached")
    assert "stopped" in (page.locator(".message.assistant .meta").text_content() or "")
    assert page.locator("#send").text_content() == "Send"
    begin(page, "go on")
    assert [one["content"] for one in page.evaluate("asked[1].messages")] == ["long", "half an ", "go on"]
    page.click("#send")
    page.wait_for_selector(".message.live", state="detached")


def test_conversation_settings_and_theme_outlive_a_reload(page: Page, running: Running) -> None:
    page.click("#settings-toggle")
    for field, value in (("system", "Be brief."), ("temperature", "0.5"), ("top-k", "7"), ("stop", "END\nstop")):
        page.fill(f"#{field}", value)
    begin(page, "hello")
    answer(page, {"delta": {"reasoning_content": "Hm."}}, says("**hi**"))
    sent = page.evaluate("asked[0]")
    assert (sent["temperature"], sent["top_k"], sent["stop"]) == (0.5, 7, ["END", "stop"])
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "top_p" not in sent
    page.select_option("#theme", "dark")
    show(page, running)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator("#theme").input_value() == "dark"
    assert page.locator("#system").input_value() == "Be brief."
    assert page.locator(".message.assistant > .text strong").text_content() == "hi"
    assert page.locator(".reasoning").evaluate("(one) => one.open") is False
    assert page.locator(".reasoning .text").text_content() == "Hm."
    page.click("#settings-toggle")
    page.click("#settings-reset")
    page.click("#clear")
    show(page, running)
    assert page.locator(".message").count() == 0
    assert page.locator("#temperature").input_value() == ""


def test_tool_calls_are_shown_and_answered(page: Page) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    page.click("#settings-toggle")
    page.fill("#tools", json.dumps([tool]))
    begin(page, "weather?")
    assert page.evaluate("asked[0].tools") == [tool]

    def call(**piece: Any) -> dict[str, Any]:
        return {"delta": {"tool_calls": [{"index": 0, **piece}]}}

    answer(
        page,
        call(id="c1", type="function", function={"name": "weather", "arguments": '{"city"'}),
        call(function={"arguments": ': "Oslo"}'}),
        {"delta": {}, "finish_reason": "tool_calls"},
    )
    assert page.locator(".tool-call summary").text_content() == "Calls weather"
    assert json.loads(page.locator(".tool-call code").text_content() or "") == {"city": "Oslo"}
    page.fill(".tool-call textarea", "rain")
    begin(page, "and?")
    assert page.evaluate("asked[1].messages")[1:3] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    answer(page, says("Rain."))
    page.fill("#tools", "[")
    page.fill("#input", "x")
    page.press("#input", "Enter")
    page.wait_for_selector(".message.error")
    assert "are no JSON" in (page.locator(".message.error").text_content() or "")


def test_export(page: Page) -> None:
    begin(page, "hello")
    answer(page, says("hi"))
    texts = {}
    for form in ("markdown", "json"):
        page.click("#export summary")
        with page.expect_download() as download:
            page.click(f"#export [data-form={form}]")
        texts[form] = Path(download.value.path()).read_text()
    assert texts["markdown"] == "## You\n\nhello\n\n## Model\n\nhi\n"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    assert json.loads(texts["json"]) == {"model": "tiny", "messages": messages}


def test_streams_are_announced_by_the_sentence(page: Page) -> None:
    page.evaluate(
        "window.heard = []; new MutationObserver(() => heard.push(announcer.textContent))"
        ".observe(announcer, {childList: true, characterData: true, subtree: true}); 0"
    )
    begin(page, "talk")
    for i in range(30):
        page.evaluate("(i) => push({delta: {content: `Word ${i}. `}})", i)
    answer(page, {"delta": {}, "finish_reason": "stop"})
    wait(page, "heard.at(-1)?.includes('Word 29.')")
    assert page.evaluate("heard.length") <= 3 + page.evaluate("performance.now()") / 3000
    assert page.locator("#messages").get_attribute("aria-live") == "off"
    assert page.locator("#announcer").get_attribute("aria-live") == "polite"


def test_errors_are_a_sentence_and_the_message_is_not_lost(page: Page) -> None:
    page.evaluate("window.fetch = () => Promise.reject(new TypeError('Failed to fetch')); 0")
    page.fill("#input", "again")
    page.press("#input", "Enter")
    page.wait_for_selector(".message.error")
    assert (page.locator(".message.error").text_content() or "").startswith("The server cannot be reached:")
    assert page.locator("#input").input_value() == "again"
    assert page.locator(".message.user + .message.assistant").count() == 0


def test_keys(page: Page) -> None:
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.click("#help-close")
    page.keyboard.press("3")
    assert page.evaluate("document.body.dataset.view") == "requests"
    page.keyboard.press("2")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "input"
    page.keyboard.type("n2?")  # text, not a command
    assert page.locator("#input").input_value() == "n2?"
    page.click("#help-open")
    page.uncheck("#single-keys")
    page.click("#help-close")
    page.keyboard.press("3")
    assert page.evaluate("document.body.dataset.view") == "overview"


def test_buckets_by_keyboard_and_by_touch(browser: Browser, running: Running) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    page = context.new_page()
    show(page, running)
    page.click("#views [data-view=overview]")
    hint = page.locator("#heat-detail").text_content()
    page.locator("button.cell").nth(1).tap()
    first = page.locator("#heat-detail").text_content() or ""
    assert first != hint
    assert first.startswith("prefill ")
    page.keyboard.press("ArrowDown")
    second = page.locator("#heat-detail").text_content() or ""
    assert second.startswith("prefill 4 × ")
    assert page.locator('.grid button.cell[tabindex="0"]').count() == page.locator(".grid").count()
    context.close()


def test_timelines_show_chunks_and_why_requests_ended(
    page: Page, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.click("#views [data-view=requests]")
    until(lambda: bool(running.client.get("/v1/llmc/requests").json()["complete"]))
    running.complete("the cat sat on the mat " * 6, max_tokens=5, ignore_eos=True)
    row = page.locator(".timeline").first
    row.wait_for()
    wait(page, "document.querySelector('.timeline .facts').textContent.includes('length')")
    row.locator("summary").click()
    row.locator(".steps li").first.wait_for()
    assert "finished: the limit of tokens" in (row.locator(".why").text_content() or "")
    slow_down(running.engine, monkeypatch)
    body = {"prompt": "the cat", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with running.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # held: the connection closes with it
        next(lines)
        page.wait_for_selector('.timeline[data-state="decode"]')
        assert page.locator(".timeline i.decode").count() >= 1
    wait(page, "document.querySelector('.timeline .facts').textContent.includes('cancelled')")


def test_a_request_that_had_to_wait_again_is_drawn_so(
    browser: Browser, english_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(english_artifact, max_num_seqs=1) as running:
        page = browser.new_page()
        show(page, running)
        page.click("#views [data-view=requests]")
        until(lambda: bool(running.client.get("/v1/llmc/requests").json()["complete"]))
        slow_down(running.engine, monkeypatch, 0.02)
        body = {"prompt": "the cat", "max_tokens": 40, "ignore_eos": True, "stream": True, "priority": 1}
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            running.complete("urgent", max_tokens=20, ignore_eos=True, priority=0)
            assert len(list(lines)) > 40  # it went on
        page.wait_for_selector(".timeline i.preempted")
        row = page.locator(".timeline", has=page.locator("i.preempted"))
        assert row.count() == 1
        row.locator("summary").click()
        row.locator(".steps li").first.wait_for()
        assert "preempted" in (row.locator(".steps").text_content() or "")
        assert axe_violations(page) == []
        page.context.close()


def test_replicas_and_adapters_where_there_are_any(page: Page, running: Running) -> None:
    assert page.locator("#replicas").is_hidden()
    assert page.locator("#adapters").is_hidden()
    state = running.client.get("/v1/llmc/state").json()
    state["adapters"] = [{"name": "sql", "requests": 1234}]
    replica = {"name": "a", "state": "ready", "active_requests": 2, "requests": 9, "times_lost": 1}
    page.route("**/v1/llmc/state", lambda route: route.fulfill(json=state))
    page.route("**/v1/llmc/replicas", lambda route: route.fulfill(json={"object": "list", "data": [replica]}))
    page.route("**/tokenize", lambda route: route.fulfill(json={"count": 3, "max_model_len": 512}))
    page.route("**/health", lambda route: route.fulfill(json={"status": "ok", "replicas": 1}))
    show(page, running)
    page.wait_for_selector("#replicas:visible")
    assert page.locator("#replica-rows td").all_text_contents() == ["a", "ready", "2", "9", "1"]
    assert page.locator("#adapter-rows td").all_text_contents() == ["sql", "1,234"]
    page.click("#settings-toggle")
    page.select_option("#adapter", "sql")
    begin(page, "select")
    assert page.evaluate("asked[0].model") == "sql"
    answer(page, says("x"))


def test_guesses_where_there_are_any(page: Page, running: Running) -> None:
    assert page.locator("#speculation").is_hidden()
    state, polls = running.client.get("/v1/llmc/state").json(), itertools.count()

    def answered(route: Any) -> None:
        n = next(polls)
        counts = {"drafted_tokens": 100 + 10 * n, "accepted_tokens": 60 + 7 * n, "speculative_steps": 40 + 2 * n}
        engine = {**state["engine"], **counts}
        route.fulfill(json={**state, "speculate": "ngram:4", "uptime_s": 10.0 + n, "engine": engine})

    page.route("**/v1/llmc/state", answered)
    show(page, running)
    page.wait_for_selector("#speculation:visible")
    wait(page, "document.getElementById('guesses-right').textContent.startsWith('70')")
    assert page.locator("#guesses-gain").text_content() == "+3.50"
    summary = page.locator("#speculation-summary").text_content() or ""
    assert re.fullmatch(r"ngram:4, \d+ of \d+ guesses right in \d+ steps", summary), summary
    assert axe_violations(page) == []


def test_which_form_of_buckets_suits_the_steps(page: Page, running: Running) -> None:
    state = running.client.get("/v1/llmc/state").json()
    shape = StepShape("decode", 4, 4, 4, 512, 800)
    contexts = Evenness.of([ShapeUse(shape, None, 100.0)]).as_dict("computed")
    nothing: dict[str, Any] = {"line": None, "changes": [], "trial": None, "decisions": []}
    replan = {"mode": "suggest", **nothing, "contexts": contexts}
    page.route("**/v1/llmc/state", lambda route: route.fulfill(json={**state, "replan": replan}))
    show(page, running)
    page.wait_for_selector("#replan:visible")
    said = page.locator("#replan-contexts").text_content() or ""
    assert "61% of sequences × longest context belongs to no sequence, which costs time" in said
    assert said.endswith("buckets for a total suit them")
    assert axe_violations(page) == []


def test_a_key_is_asked_for_and_never_kept(browser: Browser, english_artifact: Path) -> None:
    with running_server(english_artifact, api_keys=("hush",)) as running:
        context = browser.new_context()
        page = context.new_page()
        page.goto(running.url)
        page.fill("#key", "hush")
        page.wait_for_selector('#status[data-state="ok"]')
        page.fill("#input", "hello")
        page.press("#input", "Enter")
        page.wait_for_selector(".message.assistant:not(.live) .meta:not(:empty)")
        assert "hush" not in page.evaluate("JSON.stringify({...localStorage, ...sessionStorage}) + document.cookie")
        context.close()


@pytest.mark.parametrize(
    ("size", "scheme"), [("desktop", "light"), ("phone", "dark"), rare("desktop", "dark"), rare("phone", "light")]
)
def test_no_view_breaks_a_rule(browser: Browser, running: Running, size: str, scheme: str) -> None:
    width, height = SIZES[size]
    colors: Any = scheme
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=colors)
    page = context.new_page()
    page.add_init_script(SCRIPTED)
    show(page, running)
    if size == "phone":
        assert page.locator("#input").is_visible(), "a phone shows the chat first"
        assert page.locator("#tiles").is_hidden()
    begin(page, "everything")
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    answer(page, {"delta": {"reasoning_content": "Hm."}}, {"delta": {"tool_calls": [call]}}, says(MARKDOWN))
    found = {"chat": axe_violations(page)}
    page.click("#settings-toggle")
    found["settings"] = axe_violations(page)
    page.click("#settings-toggle")
    running.complete("the cat", max_tokens=3)
    for view in ("overview", "requests"):
        page.click(f"#views [data-view={view}]")
        if view == "requests":
            page.locator(".timeline summary").first.click()
        found[view] = axe_violations(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is wider than the window"
    page.click("#help-open")
    found["help"] = axe_violations(page)
    context.close()
    assert {view: lines for view, lines in found.items() if lines} == {}


def test_nothing_is_noted_before_anybody_looks(running: Running) -> None:
    engine: AsyncEngine = running.engine
    while len(engine.engine.take_request_marks()[0]):
        pass
    running.complete("the cat sat", max_tokens=2)
    marks, complete = engine.engine.take_request_marks()
    assert complete
    assert [mark.kind for mark in marks] == ["prefill"]
    assert (marks[0].start, marks[0].begin_ns < marks[0].end_ns) == (0, True)
