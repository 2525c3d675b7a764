"""Adapters over HTTP: listed as models, chosen by name, loaded and unloaded while others are served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.server.run import ServerError, open_engine

from support.adapter_setting import SLOTS, Setting, make_setting, with_tokenizer
from support.artifacts import TinyArtifact
from support.engine_driver import random_ids
from support.server_harness import Running, error_of, make_config, running_server, slow_down

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
PROMPT = random_ids(3, 12)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path, chat_artifact: Path) -> Setting:
    found = make_setting(tmp_path_factory, kernel_cache)
    return with_tokenizer(found, tmp_path_factory.mktemp("served"), chat_artifact)


@pytest.fixture(scope="module")
def server(setting: Setting) -> Iterator[Running]:
    given = tuple((name, setting.adapters[name]) for name in "ab")
    with running_server(setting.artifact, lora=given, allow_runtime_lora=True) as running:
        yield running


def ids(server: Running, model: str | None) -> list[int]:
    answer = server.complete(PROMPT, model=model, **GREEDY)
    assert answer["model"] == (model or "tiny")
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def test_models_are_listed_with_their_parent(server: Running) -> None:
    listed = server.client.get("/v1/models").json()["data"]
    assert [(one["id"], one["parent"], one["root"]) for one in listed] == [
        ("tiny", None, "artifact"), ("a", "tiny", "a"), ("b", "tiny", "b"),
    ]  # fmt: skip
    assert server.client.get("/v1/models/b").json() == listed[2]
    assert "this server has tiny, a, b" in error_of(server.client.get("/v1/models/z"), 404)["message"]


def test_every_endpoint_takes_the_name(server: Running) -> None:
    """All of them run the model that `model` names."""
    outputs = [ids(server, name) for name in (None, "tiny", "a", "b")]
    assert outputs[0] == outputs[1]
    assert len({tuple(one) for one in outputs}) == 3
    texts = {}
    for name in ("tiny", "b"):
        chat = server.chat("hello", model=name, temperature=0, max_tokens=8, ignore_eos=True)
        response = server.post("/v1/responses", model=name, input="hello", temperature=0, max_output_tokens=8)
        message = server.post(
            "/v1/messages", model=name, max_tokens=8, temperature=0, messages=[{"role": "user", "content": "hello"}]
        )
        streamed = server.events("/v1/completions", prompt=PROMPT, model=name, **GREEDY)
        assert chat["model"] == response.json()["model"] == message.json()["model"] == name
        assert {event["model"] for event in streamed} == {name}
        assert [t for e in streamed for t in e["choices"][0]["token_ids"]] == ids(server, name)
        texts[name] = (
            chat["choices"][0]["message"],
            message.json()["content"],
            response.json()["output"][0]["content"],
        )
    assert all(one != other for one, other in zip(texts["tiny"], texts["b"], strict=True))
    assert error_of(server.post("/v1/completions", prompt=PROMPT, model="z"), 404)["code"] == "model_not_found"


def test_load_and_unload(server: Running, setting: Setting) -> None:
    path = str(setting.adapters["c"])
    loaded = server.post("/v1/load_lora_adapter", lora_name="c", lora_path=path)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'c' added successfully.")
    assert ids(server, "c") not in (ids(server, "tiny"), ids(server, "a"))
    again = error_of(server.post("/v1/load_lora_adapter", lora_name="c", lora_path=path), 400)
    assert (again["code"], "is loaded already" in again["message"]) == ("name_taken", True)
    full = error_of(server.post("/v1/load_lora_adapter", lora_name="d", lora_path=path), 400)
    assert f"every slot of {SLOTS} has an adapter" in full["message"]
    taken = error_of(server.post("/v1/load_lora_adapter", lora_name="tiny", lora_path=path), 400)
    assert "is the name of the model" in taken["message"]
    gone = server.post("/v1/unload_lora_adapter", lora_name="c")
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'c' removed successfully.")
    assert error_of(server.post("/v1/completions", prompt=PROMPT, model="c"), 404)["code"] == "model_not_found"
    assert error_of(server.post("/v1/unload_lora_adapter", lora_name="c"), 404)["code"] == "adapter_not_found"
    missing = error_of(server.post("/v1/load_lora_adapter", lora_name="c", lora_path=path + "/no"), 404)
    assert "has no adapter_config.json" in missing["message"]
    for body in ({"lora_name": "c"}, {"lora_path": path}, {"lora_name": "", "lora_path": path}):
        error_of(server.post("/v1/load_lora_adapter", **body), 400)
    error_of(server.post("/v1/unload_lora_adapter"), 400)
    assert [one["id"] for one in server.client.get("/v1/models").json()["data"]] == ["tiny", "a", "b"]


def test_a_running_request_ends_with_its_adapter(
    server: Running, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(setting.adapters["c"])
    assert server.post("/v1/load_lora_adapter", lora_name="c", lora_path=path).status_code == 200
    expected = ids(server, "c")
    slow_down(server.engine, monkeypatch, 0.05)
    found: list[int] = []
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": PROMPT, "model": "c", "stream": True, **GREEDY}
    ) as response:
        lines = response.iter_lines()
        for line in lines:
            if not line.startswith("data: {"):
                continue
            if not found:
                assert server.post("/v1/unload_lora_adapter", lora_name="c").status_code == 200
                error_of(server.post("/v1/completions", prompt=PROMPT, model="c"), 404)
            found += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    assert found == expected


def test_metrics(server: Running) -> None:
    before = server.client.get("/metrics").text
    ids(server, "a")
    after = server.client.get("/metrics").text
    assert "llmc_adapters 2.0" in after

    def count(text: str) -> float:
        (line,) = (line for line in text.splitlines() if line.startswith('llmc_adapter_requests_total{adapter="a"}'))
        return float(line.split()[-1])

    assert count(after) == count(before) + 1


def test_without_the_flag_nobody_loads(setting: Setting) -> None:
    with running_server(setting.artifact, lora=(("a", setting.adapters["a"]),)) as server:
        path = str(setting.adapters["b"])
        error_of(server.post("/v1/load_lora_adapter", lora_name="b", lora_path=path), 404)
        assert "/v1/load_lora_adapter" not in server.client.get("/openapi.json").json()["paths"]
        assert [one["id"] for one in server.client.get("/v1/models").json()["data"]] == ["tiny", "a"]


def test_what_cannot_start(setting: Setting, tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"--lora: .* has no adapter_config\.json"):
        open_engine(make_config(setting.artifact, lora=(("x", tmp_path),)))
    with pytest.raises(ServerError, match=r"--lora: .* takes no adapters; compile the model with --lora-slots"):
        open_engine(make_config(tiny_artifact.artifact, lora=(("a", setting.adapters["a"]),)))
    with pytest.raises(ServerError, match="takes no adapters: compile it with --lora-slots, or leave out"):
        open_engine(make_config(tiny_artifact.artifact, allow_runtime_lora=True))
