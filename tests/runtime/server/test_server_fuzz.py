"""Requests made from the served OpenAPI document: never a 5xx, and every answer has the shape it declares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from support.adapter_setting import make_setting, with_tokenizer
from support.live_server import LiveServer, serving

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis belongs to the extra dev")

EXAMPLES = 25


@pytest.fixture(scope="module")
def server(chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[LiveServer]:
    """It takes adapters, so that all endpoints are there."""
    found = with_tokenizer(make_setting(tmp_path_factory, kernel_cache), tmp_path_factory.mktemp("fuzz"), chat_artifact)
    adapter = f"a={found.adapters['a']}"
    options = ("--served-model-name", "tiny", "--lora", adapter, "--allow-runtime-lora", "--replan", "suggest")
    with serving(found.artifact, *options) as server:
        yield server


@pytest.fixture(scope="module")
def document(server: LiveServer) -> dict[str, Any]:
    answer = server.ask("GET", "/openapi.json")
    assert answer.status == 200
    document: dict[str, Any] = answer.json()
    return document


@pytest.fixture(scope="module")
def api(document: dict[str, Any], server: LiveServer) -> Any:
    loaded = schemathesis.openapi.from_dict(document)
    loaded.config.update(base_url=server.url)
    return loaded


OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("GET", "/v1/llmc/state"),
    ("GET", "/v1/llmc/requests"),
    ("GET", "/v1/llmc/replan"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/version"),
    ("GET", "/metrics"),
]
# What a model of text refuses, whatever is asked.
OF_VECTORS = [("POST", "/v1/embeddings"), ("POST", "/v1/rerank"), ("POST", "/v1/score"), ("POST", "/classify")]


@pytest.mark.parametrize(("method", "path"), [*OPERATIONS, *OF_VECTORS])
def test_generated_requests(api: Any, server: LiveServer, method: str, path: str) -> None:
    checks = schemathesis.checks
    wanted = [
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    statuses: set[int] = set()

    @settings(
        max_examples=EXAMPLES if method == "POST" else 5,
        derandomize=True,
        database=None,
        deadline=None,
        # Shrinking a failure takes longer than reading it.
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(api[path][method].as_strategy())
    def run(case: Any) -> None:
        response = case.call(timeout=60)
        case.validate_response(response, checks=wanted)
        statuses.add(response.status_code)

    run()
    assert server.process.poll() is None
    assert statuses
    if path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert 200 in statuses, f"no request came through: {statuses}"


BODIES = [path for method, path in OPERATIONS if method == "POST" and not path.endswith("/cancel")]


@pytest.mark.parametrize("path", BODIES)
def test_what_the_document_forbids_is_refused(api: Any, server: LiveServer, path: str) -> None:
    strategy = api[path]["POST"].as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

    @settings(
        max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def run(case: Any) -> None:
        response = case.call(timeout=60)
        case.validate_response(response, checks=[schemathesis.checks.negative_data_rejection])

    run()
    assert server.process.poll() is None


def test_every_endpoint_is_described(document: dict[str, Any]) -> None:
    paths = document["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described == {*OPERATIONS, *OF_VECTORS}
    for path, methods in paths.items():
        for method, operation in methods.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            assert "422" not in operation["responses"], f"{where} declares FastAPI's errors, which are never sent"
            if method == "post":
                refused = operation["responses"]["400"]["content"]["application/json"]["schema"]
                error = "MessageErrorAnswer" if path.startswith("/v1/messages") else "ErrorAnswer"
                assert refused == {"$ref": f"#/components/schemas/{error}"}, where


def test_a_key_is_declared_where_one_is_needed(chat_artifact: Path) -> None:
    with serving(chat_artifact, "--api-key", "secret") as guarded:
        answer = guarded.ask("GET", "/openapi.json", headers={"Authorization": "Bearer secret"})
    assert answer.json()["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert answer.json()["security"] == [{"key": []}]
