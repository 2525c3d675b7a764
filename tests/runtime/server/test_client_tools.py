"""Evaluation and load tools that people point at a server, as they install from the package index."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams

from support.artifacts import TinyArtifact
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


@pytest.mark.exhaustive
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


def with_tools(environment: Path, *arguments: str | Path) -> str:
    """Output of this interpreter, which sees this tree, with what is installed there."""
    (site,) = environment.glob("lib/python*/site-packages")
    variables = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1", "HF_HOME": str(environment / "hub")}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=variables, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.exhaustive
def test_lm_eval_in_process_agrees_with_transformers(
    chat_artifact: Path, tiny_artifact: TinyArtifact, environment: Path, tmp_path: Path
) -> None:
    installed("lm_eval", environment)
    installed("accelerate", environment)  # the harness' own model of transformers imports it
    model = tmp_path / "model"
    shutil.copytree(tiny_artifact.model, model)
    shutil.copy(chat_artifact / "tokenizer.json", model)
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    script = ROOT / "tests" / "support" / "harness_scores.py"
    theirs, ours = json.loads(with_tools(environment, script, model, chat_artifact))
    assert len(ours["pairs"]) == 5
    for (score, likely), (expected, expected_likely) in zip(ours["pairs"], theirs["pairs"], strict=True):
        assert score == pytest.approx(expected, abs=1e-4)
        assert likely is expected_likely
    assert ours["rolling"] == pytest.approx(theirs["rolling"], abs=1e-3), "sums of a hundred"
    # The last character may lack bytes, which theirs tells.
    assert ours["texts"] == [text.rstrip("\ufffd") for text in theirs["texts"]]


def test_llmc_eval_tasks(server: LiveServer, english_artifact: Path, environment: Path, tmp_path: Path) -> None:
    """Choices and generation in this process; the same choices, and a task of the user's, asked of a server."""
    installed("lm_eval", environment)
    for split in ("test", "dev"):
        file = tmp_path / "mmlu" / split / f"manners_{split}.csv"
        file.parent.mkdir(parents=True)
        file.write_text("question,choice0,choice1,choice2,choice3,answer\n" + "Was she happy?,very,not,so,now,1\n" * 5)
    (tmp_path / "humaneval").mkdir()
    doc = {"task_id": "0", "prompt": "pass\n#", "test": "def check(f):\n    f(1)", "entry_point": "print"}
    with gzip.open(tmp_path / "humaneval" / "HumanEval.jsonl.gz", "wt") as packed:
        packed.write(json.dumps(doc))
    command = ["-m", "llmc.cli.main", "eval", "tasks", "--data", str(tmp_path), "--num-fewshot", "0", "--json"]
    names = "local_mmlu,local_humaneval"
    local = json.loads(
        with_tools(environment, *command, str(english_artifact), "--tasks", names, "--limit", "3", "--run-code")
    )
    values = {one["task"]: one for one in local}
    assert set(values) == {"local_mmlu", "local_humaneval", "local_mmlu_manners"}
    assert values["local_mmlu"]["value"] in (0, 1)
    assert values["local_mmlu"]["samples"] == 3
    assert (values["local_humaneval"]["metric"], values["local_humaneval"]["samples"]) == ("pass_at_1", 1)
    asked = ["--base-url", server.url, "--tokenizer", str(MODEL)]
    remote = json.loads(with_tools(environment, *command, *asked, "--tasks", "local_mmlu", "--limit", "3"))
    assert [one["value"] for one in remote if one["task"] == "local_mmlu"] == [values["local_mmlu"]["value"]]


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
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
