"""Replicas behind one endpoint: none of what happens to them is seen by a client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench import route_chaos

from support import pages
from support.failover import STREAMS
from support.live_router import Asked, LiveRouter, ask_all, routing


@pytest.fixture(scope="module")
def router(english_artifact: Path) -> Iterator[LiveRouter]:
    with routing("--spawn", "2", english_artifact) as one:
        one.until_all_ready(2)
        yield one


def requests(*, seed: int, num_tokens: int, count: int) -> list[Asked]:
    """Of each kind that has a seed, in turn; each streams and is asked without a stream."""
    kinds = [(path, body) for path, body in STREAMS.values() if body.get("seed", body.get("temperature")) is not None]
    found: list[Asked] = []
    for number in range(count):
        path, body = kinds[number // 2 % len(kinds)]
        asked: dict[str, Any] = {**body, "seed": seed + number // 2}
        # Short ones are guided, or have logprobs of their prompt.
        if not {"guided_regex", "response_format", "output_config", "text", "tools", "prompt_logprobs"} & body.keys():
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            asked |= {limit: num_tokens, "ignore_eos": True}
        if number % 2:
            asked["stream"] = True
        else:
            asked.pop("stream_options", None)
        found.append((path, asked))
    return found


def test_replicas_are_killed_and_no_client_sees_it(router: LiveRouter) -> None:
    asked = requests(seed=100, num_tokens=150, count=128)
    assert sum(body.get("stream", False) for _, body in asked) == 64
    undisturbed = ask_all(router.url, asked)
    answers: list[dict[str, Any]] = []
    client = threading.Thread(target=lambda: answers.extend(ask_all(router.url, asked)))
    client.start()
    killed: list[str] = []
    while client.is_alive() and len(killed) < 4:
        name = router.kill_busiest()
        killed += [name] if name is not None else []
        client.join(0.5)
    client.join()
    assert killed
    assert router.metric("llmc_router_failovers_total") > 0
    assert router.metric("llmc_router_broken_streams_total") == 0
    assert len(answers) == len(undisturbed)
    for (_, body), found, wanted in zip(asked, answers, undisturbed, strict=True):
        assert found == wanted, body
    router.until_all_ready(2)


def test_an_update_fails_no_request(english_artifact: Path, tmp_path: Path) -> None:
    """The path of the replicas is a link, which SIGHUP makes them look at anew; streams go on with the old artifact."""
    new = tmp_path / "new"
    shutil.copytree(english_artifact, new)
    manifest = (new / "manifest.json").read_text()
    (new / "manifest.json").write_text(manifest + "\n")  # another artifact, by its name
    link = tmp_path / "served"
    link.symlink_to(english_artifact)
    with routing("--spawn", "2", link) as router:
        router.until_all_ready(2)
        asked = requests(seed=300, num_tokens=100, count=12)
        undisturbed = ask_all(router.url, asked)
        (old,) = {one["artifact"] for one in router.replicas().values()}
        link.unlink()
        link.symlink_to(new)
        os.kill(router.process.pid, signal.SIGHUP)

        def updated() -> bool:
            found = router.replicas().values()
            return len(found) == 2 and all(one["state"] == "ready" and one["artifact"] != old for one in found)

        rounds = 0
        while not updated() or rounds == 0:
            assert ask_all(router.url, asked) == undisturbed
            rounds += 1
        assert set(router.replicas()) == {"r2", "r3"}
        assert router.metric("llmc_router_broken_streams_total") == 0
        assert "does not exist" in router.admin("/v1/llmc/update", artifact="/nowhere").text


@pytest.mark.slow
def test_a_replica_that_hangs_keeps_nobody(router: LiveRouter) -> None:
    """It is stopped, not dead: it answers no look in time, and what it had goes on elsewhere."""
    asked = requests(seed=500, num_tokens=150, count=16)
    undisturbed = ask_all(router.url, asked)
    answers: list[dict[str, Any]] = []
    with routing(
        *(word for one in router.replicas().values() for word in ("--replica", one["url"])), "--health-timeout", "1"
    ) as second:
        second.until_all_ready(2)
        client = threading.Thread(target=lambda: answers.extend(ask_all(second.url, asked)))
        pid = next(iter(router.replicas().values()))["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            client.start()
            client.join()
        finally:
            os.kill(pid, signal.SIGCONT)
    assert answers == undisturbed


def test_the_page_has_a_row_for_each_replica(router: LiveRouter) -> None:
    router.until_all_ready(2)
    with pages.browser() as browser:
        page = browser.new_page()
        page.goto(router.url)
        page.wait_for_selector("#replicas:visible")
        rows = page.locator("#replica-rows tr")
        rows.nth(1).wait_for()
        cells = [row.locator("td").all_text_contents() for row in rows.all()]
        assert [(name, state) for name, state, *_ in cells] == [("r0", "ready"), ("r1", "ready")]
        page.fill("#input", "the cat")
        page.press("#input", "Enter")
        page.wait_for_selector(".message.assistant:not(.live) .meta:not(:empty)")
        page.context.close()


def test_the_router_dies_and_leaves_no_orphans(english_artifact: Path) -> None:
    with routing("--spawn", "1", english_artifact, serve_flags="--threads 1 --skip-warmup") as one:
        (pid,) = (replica["pid"] for replica in one.replicas().values())
        one.process.kill()
        one.process.wait()

        def gone() -> bool:
            try:
                return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
            except FileNotFoundError:
                return True

        while not gone():
            threading.Event().wait(0.05)
        one.process.returncode = 0  # what the block below wants of a router that was told to end


def test_two_artifacts_are_asked_by_their_names(english_artifact: Path, chat_artifact: Path, tmp_path: Path) -> None:
    """Each model has the answers of its own replica; without a name, the first one answers."""
    paths = {"english": english_artifact, "other": chat_artifact}
    for name, path in paths.items():
        shutil.copytree(path, tmp_path / name)  # whose name is that of the model
    asked = {"prompt": "the cat", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with routing("--spawn", "1", *map(tmp_path.joinpath, paths), serve_flags="--threads 1 --skip-warmup") as router:
        router.until_all_ready(2)
        by_model = {one["models"][0]: one["url"] for one in router.replicas().values()}
        assert set(by_model) == set(paths)

        def text(url: str, **model: str) -> str:
            answer = httpx.post(f"{url}/v1/completions", json={**asked, **model}, timeout=300).raise_for_status()
            return str(answer.json()["choices"][0]["text"])

        alone = {name: text(url) for name, url in by_model.items()}
        assert alone["english"] != alone["other"]
        assert {name: text(router.url, model=name) for name in paths} == alone
        assert text(router.url) == alone["english"]


def test_models_ids_and_refusals(router: LiveRouter) -> None:
    with httpx.Client(base_url=router.url, timeout=300) as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert model["id"] == "tiny"
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers={"X-Request-Id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
        unknown = client.post("/v1/completions", json={"prompt": "a", "model": "none"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        wrong = client.post("/v1/completions", json={"prompt": "a", "temperature": -1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
        asked = {"messages": [{"role": "user", "content": "a"}], "model": "none"}
        refused = client.post("/v1/messages", json=asked, headers={"X-Request-Id": "mine"})
        told = (refused.json()["type"], refused.json()["error"]["type"], refused.json()["request_id"])
        assert told == ("error", "not_found_error", refused.headers["request-id"])
        assert client.post("/v1/llmc/replicas/r0/drain").status_code == 401
        assert client.get("/health").json()["status"] == "ok"
        for path in ("/health", "/page/page.js"):  # the router's own, and one that a replica answers
            head = client.head(path)
            assert (head.status_code, head.content) == (200, b"")
        state = client.get("/v1/llmc/state").json()
        each = [client.get(f"{one['url']}/v1/llmc/state").json() for one in router.replicas().values()]
        assert (state["replicas"], state["model"]) == (["r0", "r1"], "tiny")
        for name in ("generation_tokens", "kv_blocks", "steps"):
            assert state["engine"][name] == sum(one["engine"][name] for one in each) > 0
        assert {"p50", "p95", "p99"} == set(state["latency"]["ttft"])
        requests = client.get("/v1/llmc/requests").json()["requests"]
        assert answer.json()["id"] in {one["id"] for one in requests}
        assert {one["replica"] for one in requests} <= {"r0", "r1"}
        text = client.get("/metrics").text
        assert 'llmc_router_replica_ready{replica="' in text
        assert text.count("# TYPE llmc_time_to_first_token_seconds ") == 1
    name = next(iter(router.replicas()))
    assert router.admin(f"/v1/llmc/replicas/{name}/drain").json()["state"] == "draining"
    assert router.replicas()[name]["state"] == "draining"
    assert router.admin(f"/v1/llmc/replicas/{name}/resume").json()["state"] == "ready"


@pytest.mark.slow
def test_chaos(english_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """bench/route_chaos.py, in small."""
    words = ("--requests", "200", "--replicas", "2", "--every", "0.5", "--spare", "1", "--json")
    assert route_chaos.main([str(english_artifact), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["errors"], found["wrong"]) == (200, 0, 0)
    assert found["kills"] > 0
