"""/v1/embeddings, /v1/rerank, /v1/score and /classify: shapes, refusals, and the numbers of `LLM`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from llmc.runtime.llm import LLM

from support.server_harness import Running, error_of, running_server

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9"]


@pytest.fixture(scope="module")
def embeds(embedder: tuple[Path, Path]) -> Iterator[Running]:
    with running_server(embedder[1]) as running:
        yield running


@pytest.fixture(scope="module")
def ranks(ranker: tuple[Path, Path]) -> Iterator[Running]:
    with running_server(ranker[1]) as running:
        yield running


def answer_of(running: Running, path: str, **body: Any) -> dict[str, Any]:
    """The answer, which must have the shape that the document declares."""
    response = running.post(path, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    document = running.client.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]}).validate(answer)
    return answer


def vectors(running: Running, given: Any, **body: Any) -> list[Any]:
    answer = answer_of(running, "/v1/embeddings", input=given, **body)
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [one["embedding"] for one in answer["data"]]


def test_embeddings_are_those_of_the_python_api(embeds: Running, embedder: tuple[Path, Path]) -> None:
    with LLM(embedder[1]) as llm:
        outputs = llm.embed(TEXTS)
        short = llm.embed(TEXTS, dimensions=8)
    answer = answer_of(embeds, "/v1/embeddings", input=TEXTS)
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    tokens = sum(len(one.prompt_token_ids) for one in outputs)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert [one["embedding"] for one in answer["data"]] == [one.vector.tolist() for one in outputs]
    assert vectors(embeds, TEXTS, dimensions=8) == [one.vector.tolist() for one in short]
    assert vectors(embeds, TEXTS[0]) == [outputs[0].vector.tolist()]
    ids = [list(one.prompt_token_ids) for one in outputs]
    assert vectors(embeds, ids) == [one.vector.tolist() for one in outputs]
    assert vectors(embeds, ids[1]) == [outputs[1].vector.tolist()]
    packed = [np.frombuffer(base64.b64decode(one), "<f4") for one in vectors(embeds, TEXTS, encoding_format="base64")]
    assert all(np.array_equal(one, output.vector) for one, output in zip(packed, outputs, strict=True))


def test_openai_client(embeds: Running) -> None:
    openai = pytest.importorskip("openai", reason="openai belongs to the extra dev")
    with openai.OpenAI(base_url=f"{embeds.url}/v1", api_key="none", max_retries=0) as client:
        # It asks for base64 by itself, and decodes that.
        found = client.embeddings.create(model="tiny", input=TEXTS, dimensions=32)
        assert [len(one.embedding) for one in found.data] == [32] * 3
        assert found.usage.prompt_tokens == found.usage.total_tokens > 0
        with pytest.raises(openai.BadRequestError, match="dimensions is 61"):
            client.embeddings.create(model="tiny", input=TEXTS, dimensions=61)
        with pytest.raises(openai.BadRequestError, match="compiled for the task embed, which /v1/embeddings serves"):
            client.completions.create(model="tiny", prompt="w1")


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": ""}, None, None),
        ({"input": []}, "input", "give a string, a list of token ids"),
        ({"input": [[1, 203]]}, "input", "the input has token id 203"),
        ({"input": [7] * 65}, "input", "maximum context length is 64 tokens, and input 0 has 65"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "model": "other"}, "model", "the model 'other' does not exist"),
    ],
)
def test_what_embeddings_refuse(embeds: Running, body: dict[str, Any], param: str | None, said: str | None) -> None:
    response = embeds.post("/v1/embeddings", **body)
    if said is None:
        # [CLS] [SEP]: a text without words is one.
        assert response.status_code == 200
        return
    error = error_of(response, 404 if param == "model" else 400)
    assert error["param"] == param
    assert said in error["message"]


def test_a_long_text_is_cut_where_asked(embeds: Running) -> None:
    text = "w1 " * 99
    error = error_of(embeds.post("/v1/embeddings", input=text), 400)
    assert error["code"] == "context_length_exceeded"
    answer = answer_of(embeds, "/v1/embeddings", input=text, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 64
    assert answer_of(embeds, "/v1/embeddings", input=text, truncate_prompt_tokens=9)["usage"]["prompt_tokens"] == 9


@pytest.mark.parametrize(
    ("most", "body", "said"),
    [
        (
            1,
            {"input": "w1 w2"},
            "a limit of 1 tokens leaves no room for the text beside 2 special tokens: allow at least 3",
        ),
        (2, {"input": "w1 w2"}, "a limit of 2 tokens leaves no room for the text beside 2 special tokens"),
        (0, {"input": "w1 w2"}, "truncate_prompt_tokens: 0 tokens of a text are none: give 1 or more, or -1"),
        (-2, {"input": "w1 w2"}, "greater than or equal to -1"),
        (2, {"input": ""}, None),
        (3, {"input": "w1 w2"}, None),
        (1, {"input": [5, 6]}, None),
    ],
)
def test_a_limit_that_leaves_nothing_is_told_as_such(
    embeds: Running, most: int, body: dict[str, Any], said: str | None
) -> None:
    response = embeds.post("/v1/embeddings", **body, truncate_prompt_tokens=most)
    if said is None:
        assert response.json()["usage"]["prompt_tokens"] == most
        return
    error = error_of(response, 400)
    assert (error["param"], error["code"]) == ("truncate_prompt_tokens", "invalid_value")
    assert said in error["message"]


def test_a_limit_that_leaves_no_document_is_told_as_such(ranks: Running) -> None:
    body = {"query": "w1 w2", "documents": ["w3 w4"]}
    error = error_of(ranks.post("/v1/rerank", **body, truncate_prompt_tokens=5), 400)
    assert error["message"] == (
        "a limit of 5 tokens leaves no room for the second text beside 2 tokens of the first and 3 special tokens: "
        "allow at least 6, or shorten the first text"
    )
    assert error["param"] == "truncate_prompt_tokens"
    assert answer_of(ranks, "/v1/rerank", **body, truncate_prompt_tokens=6)["usage"]["prompt_tokens"] == 6


def test_rerank_and_score(ranks: Running, ranker: tuple[Path, Path]) -> None:
    query, documents = TEXTS[0], [*TEXTS[1:], "w11 w12", "w4"]
    with LLM(ranker[1]) as llm:
        scores = [one.score for one in llm.score(query, documents)]
    answer = answer_of(ranks, "/v1/rerank", query=query, documents=documents)
    order = sorted(range(4), key=lambda i: -scores[i])
    wanted = [{"index": i, "relevance_score": scores[i], "document": {"text": documents[i]}} for i in order]
    assert answer["results"] == wanted
    assert scores[0] == scores[3]
    assert order.index(0) < order.index(3)
    best = answer_of(ranks, "/v1/rerank", query=query, documents=documents, top_n=1, return_documents=False)
    assert best["results"] == [{"index": order[0], "relevance_score": scores[order[0]]}]
    pairs = answer_of(ranks, "/v1/score", text_1=query, text_2=documents)
    assert [one["score"] for one in pairs["data"]] == scores


def parts_of(*texts: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text} for text in texts]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"documents": [{"text": text, "title": "t"} for text in TEXTS], "top_n": 9}),
        ("/v2/rerank", {"documents": TEXTS, "max_tokens_per_doc": 4096}),
        ("/rerank", {"query": {"text": TEXTS[0]}, "documents": [parts_of(text) for text in TEXTS], "top_n": 0}),
        ("/v1/rerank", {"query": parts_of(TEXTS[0]), "documents": parts_of(*TEXTS)}),
        ("/v1/score", {"text_1": [TEXTS[0]] * 3, "text_2": TEXTS}),
        ("/score", {"queries": TEXTS[0], "documents": TEXTS}),
        ("/score", {"queries": parts_of(TEXTS[0]), "items": [TEXTS[0], {"text": TEXTS[1]}, parts_of(TEXTS[2])]}),
        ("/v1/score", {"data_1": [TEXTS[0]], "data_2": parts_of(*TEXTS)}),
    ],
)
def test_what_clients_send(ranks: Running, path: str, body: dict[str, Any]) -> None:
    """Jina's, Cohere's and vLLM's forms of a request for the same texts have the same scores."""
    by_score = path.endswith("score")
    if not by_score:
        body = {"query": TEXTS[0], **body}
    response = ranks.post(path, **body)
    assert response.status_code == 200, response.text
    answer = response.json()
    key = "score" if by_score else "relevance_score"
    found = {one["index"]: one[key] for one in answer["data" if by_score else "results"]}
    expected = answer_of(ranks, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)
    assert found == {one["index"]: one["score"] for one in expected["data"]}
    assert answer["usage"] == expected["usage"]
    allowed = ranks.client.get("/openapi.json").json()
    schema = allowed["components"]["schemas"]["ScoreRequest" if by_score else "RerankRequest"]
    jsonschema_rs.Draft202012Validator({**schema, "components": allowed["components"]}).validate(body)


def test_what_scores_refuse(ranks: Running) -> None:
    error = error_of(ranks.post("/v1/score", text_1=["w1", "w2"], text_2=["w3"]), 400)
    assert (error["param"], error["code"]) == ("text_1", "conflicting_values")
    assert error_of(ranks.post("/v1/rerank", query="w1", documents=[]), 400)["param"] == "documents"
    assert error_of(ranks.post("/v1/rerank", query="w1", documents=[5]), 400)["param"] == "documents.0"
    assert error_of(ranks.post("/v1/score", text_1=5, text_2="a"), 400)["param"] == "text_1"
    assert error_of(ranks.post("/v1/score", queries="a", documents=[[]]), 400)["param"] == "documents.0"
    assert error_of(ranks.post("/v1/score", text_2="a"), 400)["param"] == "text_1"
    image = {"content": [{"type": "image_url", "image_url": {"url": "a"}}]}
    assert "models here read text" in error_of(ranks.post("/v1/rerank", query="a", documents=[image]), 400)["message"]
    error = error_of(ranks.post("/v1/rerank", query="w1", documents=["w2"], instruction="w3"), 400)
    assert "takes no instruction" in error["message"]
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/classify", {"input": "a"})):
        error = error_of(ranks.post(path, **body), 400)
        assert error["code"] == "unsupported_task"
        assert "compiled for the task rank, which /v1/rerank, /v1/score serves" in error["message"]


def test_a_model_of_text_refuses_vectors_and_the_other_way_round(embeds: Running, english_artifact: Path) -> None:
    said = [{"role": "user", "content": "w1"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": said}),
        ("/v1/completions", {"prompt": "w1"}),
        ("/v1/responses", {"input": "w1"}),
        ("/v1/rerank", {"query": "w1", "documents": ["w2"]}),
    ):
        assert error_of(embeds.post(path, **body), 400)["code"] == "unsupported_task"
    response = embeds.post("/v1/messages", messages=said, max_tokens=4)
    assert response.status_code == 400
    assert "/v1/embeddings serves" in response.json()["error"]["message"]
    with running_server(english_artifact) as text:
        error = error_of(text.post("/v1/embeddings", input="a"), 400)
        assert error["code"] == "unsupported_task"
        assert "compiled for the task generate" in error["message"]
        error_of(text.post("/v1/score", text_1="a", text_2="b"), 400)


def test_what_the_server_tells_of_itself(embeds: Running) -> None:
    embeds.post("/v1/embeddings", input=TEXTS)
    state = embeds.client.get("/v1/llmc/state").json()
    assert state["ready"]
    assert state["engine"]["prompt_tokens"] > 0
    assert state["engine"]["generation_tokens"] == 0
    assert embeds.on_loop(embeds.engine.check_integrity) is None
    assert embeds.client.get("/metrics").status_code == 200


@pytest.mark.parametrize(
    ("served", "path"), [("embeds", "/v1/embeddings"), ("ranks", "/v1/rerank"), ("ranks", "/v1/score")]
)
def test_generated_requests(served: str, path: str, request: pytest.FixtureRequest) -> None:
    """Requests made from the document are never a 5xx, and answers have the shape that it declares."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis belongs to the extra dev")
    running: Running = request.getfixturevalue(served)
    api = schemathesis.openapi.from_dict(running.client.get("/openapi.json").json())
    api.config.update(base_url=running.url)
    checks = schemathesis.checks
    wanted = [checks.not_a_server_error, checks.status_code_conformance, checks.response_schema_conformance]
    statuses: set[int] = set()

    @settings(
        max_examples=25, derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(api[path]["POST"].as_strategy())
    def run(case: Any) -> None:
        response = case.call(timeout=60)
        case.validate_response(response, checks=wanted)
        statuses.add(response.status_code)

    run()
    assert 200 in statuses, f"no request came through: {statuses}"
    assert running.on_loop(running.engine.check_integrity) is None
