"""Evaluation and load tools that people point at a server, as they install from the package index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams

from support.client_tools import installed, make_environment, run
from support.live_server import LiveServer, serving
from support.paths import ROOT

MODEL = ROOT / "examples" / "tiny-english"
DOCS = [
    {"start": "It is a truth universally acknowledged,", "a": " that a man must be in want of a wife.", "b": " cat."},
    {"start": "She was", "a": " very happy.", "b": " on the moon of."},
    # After "He bowed." the likeliest token is the eos: sampled, it must have its entry, too.
    {"start": "The evening passed.", "a": " He bowed.", "b": " Bowed he"},
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(english_artifact: Path) -> Iterator[LiveServer]:
    with serving(english_artifact, "--served-model-name", "tiny") as server:
        yield server


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("tools"))


def log_likelihood(llm: LLM, start: str, end: str) -> float:
    """Of `end` after `start`, by the engine in this process, whose bits other tests compare with transformers."""
    assert llm.tokenizer is not None
    # As lm_eval does.
    before, ids = (llm.tokenizer.encode(text, add_special_tokens=False) for text in (start, start + end))
    (output,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    num_end = len(ids) - len(before)
    return sum(entry.logprob for entry in output.prompt_logprobs[-num_end:])


def test_lm_eval_scores_are_the_models(
    server: LiveServer, english_artifact: Path, environment: Path, tmp_path: Path
) -> None:
    tools = installed("lm_eval", environment)
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, DOCS)))
    task = {
        "task": "endings", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{start}}",
        "doc_to_choice": "{{[a, b]}}", "doc_to_target": 0, "target_delimiter": "", "metric_list": [{"metric": "acc"}],
        "metadata": {"version": 1},
    }  # fmt: skip
    (tmp_path / "endings.yaml").write_text(json.dumps(task))
    where = f"model=tiny,base_url={server.url}/v1/completions,tokenizer_backend=huggingface,tokenizer={MODEL}"
    run(
        tools,
        ["lm_eval", "run", "--model", "local-completions", "--model_args", where, "--tasks", "endings",
         "--include_path", ".", "--log_samples", "--output_path", "out"],
        tmp_path, HF_HUB_OFFLINE="1",
    )  # fmt: skip
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    told = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(told) == len(DOCS)
    with LLM(english_artifact, num_threads=1) as llm:
        for one in told:
            doc = one["doc"]
            for end, ((score, _),) in zip((doc["a"], doc["b"]), one["resps"], strict=True):
                assert float(score) == pytest.approx(log_likelihood(llm, doc["start"], end), abs=1e-3), (doc, end)


def test_guidellm(server: LiveServer, environment: Path, tmp_path: Path) -> None:
    tools = installed("guidellm", environment)
    (tmp_path / "prompts.txt").write_text(
        "\n".join(f"She was {how} happy" for how in ("very", "not", "so", "too", "now", "still"))
    )
    backend = f"kind=openai_http,target={server.url},model=tiny,request_format=/v1/completions"
    run(
        tools,
        ["guidellm", "run", "--backend", backend,
         "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
         "--data", "kind=text_file,path=prompts.txt", "--tokenizer", f"kind=huggingface_auto,model={MODEL}",
         "--output", "kind=json,path=report.json", "--disable-console-interactive"],
        tmp_path, HF_HUB_OFFLINE="1",
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)


def test_aiperf(server: LiveServer, environment: Path, tmp_path: Path) -> None:
    tools = installed("aiperf", environment)
    (tmp_path / "tiny").symlink_to(MODEL)
    run(
        tools,
        ["aiperf", "profile", "--model", "tiny", "--url", server.url, "--endpoint-type", "completions", "--streaming",
         "--tokenizer", "tiny", "--concurrency", "2", "--request-count", "6", "--isl", "20", "--osl", "8",
         "--artifact-dir", "out", "--ui", "none"],
        tmp_path,
    )  # fmt: skip
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 6
    assert not report.get("error_summary")


def test_locust(server: LiveServer, environment: Path, tmp_path: Path) -> None:
    tools = installed("locust", environment)
    (tmp_path / "locustfile.py").write_text(
        "from locust import HttpUser, task\n"
        "class Reader(HttpUser):\n"
        "    @task\n"
        "    def read(self):\n"
        "        body = {'prompt': 'She was', 'max_tokens': 4, 'stream': True}\n"
        "        with self.client.post('/v1/completions', json=body, stream=True, catch_response=True) as answer:\n"
        "            lines = [line for line in answer.iter_lines() if line]\n"
        "            if lines[-1] != b'data: [DONE]': answer.failure(lines[-1])\n"
    )
    said = run(
        tools,
        ["locust", "--headless", "--users", "3", "--spawn-rate", "3", "--host", server.url, "--json",
         "--run-time", "3s", "--stop-timeout", "120", "--loglevel", "WARNING"],
        tmp_path,
    )  # fmt: skip
    (endpoint,) = json.loads(said)
    assert endpoint["num_requests"] >= 1
    assert endpoint["num_failures"] == 0
