"""`llmc run` as a process on a compiled model: interruptions, terminals, chat and failed requests."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.graphs_file import read_graphs
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
from llmc.runtime.request_error import RequestError

LLMC = [sys.executable, "-P", "-m", "llmc.cli.main"]
# Beside other tests, two threads would wait for one another longer than they compute.
SAMPLING = ["--max-tokens", "50", "--temperature", "0.8", "--seed", "5", "--ignore-eos", "--threads", "1"]
NUM_PROMPTS = 300


def llmc(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [*LLMC, *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- interruptions -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt_token_ids": [3 + i % 400, 5 + i // 400]}) + "\n" for i in range(NUM_PROMPTS))
    )
    return path


@pytest.fixture(scope="module")
def undisturbed(chat_artifact: Path, prompts: Path) -> bytes:
    """The output file of a run that nobody interrupts."""
    path = prompts.with_name("undisturbed.jsonl")
    assert llmc("run", chat_artifact, "--prompts", prompts, "-o", path, *SAMPLING).returncode == 0
    assert len(lines(path)) == NUM_PROMPTS
    return path.read_bytes()


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_keeps_its_results_and_continues(
    kind: signal.Signals, chat_artifact: Path, prompts: Path, undisturbed: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    arguments = ["run", str(chat_artifact), "--prompts", str(prompts), "-o", str(path), *SAMPLING]
    process = subprocess.Popen([*LLMC, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 3):
        time.sleep(0.002)
    process.send_signal(kind)
    output, errors = process.communicate(timeout=60)
    assert output == ""
    assert process.returncode == (130 if kind == signal.SIGINT else -kind)
    kept = path.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert undisturbed.startswith(kept)
    assert 3 <= kept.count(b"\n") < NUM_PROMPTS
    if kind == signal.SIGINT:
        assert f"of {NUM_PROMPTS} results kept, --resume continues" in errors

    refused = llmc(*arguments, "--resume", "--temperature", "0.7")
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1] == (
        f"llmc: error: {path} was made with temperature 0.8 and this run has 0.7: resume with the same, or pass "
        "--overwrite"
    )
    resumed = llmc(*arguments, "--resume", "--json")
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads(resumed.stdout)["summary"]
    assert summary["resumed"] >= kept.count(b"\n")
    assert summary["requests"] + summary["resumed"] == NUM_PROMPTS
    assert path.read_bytes() == undisturbed
    assert sorted(file.name for file in tmp_path.iterdir()) == ["answers.jsonl", "answers.jsonl.run"]


# ---- terminals ---------------------------------------------------------------------------------------------------


def under_terminal(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout (a pipe) and what a terminal that is stderr showed."""
    leader, follower = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        # Linux ends a terminal that nobody holds open any more with an error.
        try:
            while chunk := os.read(leader, 65536):
                shown.append(chunk)
        except OSError:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.run(
        [*LLMC, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=follower,
        env=environment,
        timeout=120,
    )
    os.close(follower)
    reader.join()
    os.close(leader)
    return process.returncode, process.stdout.decode(), b"".join(shown).decode()


def test_only_results_go_to_stdout(chat_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"prompt {i}\n" for i in range(12)))
    arguments = ["run", str(chat_artifact), "--prompts", str(file), *SAMPLING]
    with LLM(chat_artifact) as llm:
        params = SamplingParams(max_tokens=50, temperature=0.8, seed=5, ignore_eos=True)
        texts = [f"prompt {o.index}{o.outputs[0].text}\n" for o in llm.generate(file.read_text().splitlines(), params)]
    code, output, shown = under_terminal([*arguments, "--stats"])
    assert code == 0
    assert output == "".join(texts)
    assert "12/12" in shown
    assert "tokens/s" in shown
    assert "throughput" in shown
    code, output, shown = under_terminal(arguments)
    assert (code, output) == (0, "".join(texts))
    assert "12/12" in shown
    assert "throughput" not in shown

    code, output, shown = under_terminal([*arguments, "--quiet"])
    assert (code, output, shown) == (0, "".join(texts), "")
    piped = llmc(*arguments)
    assert (piped.stdout, piped.stderr) == ("".join(texts), ""), "no bar where there is no terminal"
    as_json = llmc(*arguments, "--json", "--quiet")
    assert [r["prompt"] + r["text"] + "\n" for r in json.loads(as_json.stdout)["results"]] == texts
    assert as_json.stderr == ""


def test_verify_reads_the_artifact_before_it_runs(chat_artifact: Path, tmp_path: Path) -> None:
    arguments = ["--prompt", "one", "--max-tokens", "2", "--temperature", "0"]
    plain, checked = llmc("run", chat_artifact, *arguments), llmc("run", chat_artifact, *arguments, "--verify")
    assert (checked.returncode, checked.stdout) == (0, plain.stdout)
    assert re.match(r"verified: \d+ weights and the code, .* match\n", checked.stderr)
    assert llmc("run", chat_artifact, *arguments, "--verify", "--quiet").stderr == ""

    rotten = Path(shutil.copytree(chat_artifact, tmp_path / "rotten"))
    weight = read_graphs(rotten).weights[0]
    with (rotten / "weights.safetensors").open("r+b") as file:
        file.seek(weight.file_offset)
        byte = file.read(1)[0]
        file.seek(weight.file_offset)
        file.write(bytes([byte ^ 1]))
    damaged = llmc("run", rotten, *arguments, "--verify")
    assert (damaged.returncode, damaged.stdout) == (1, "")
    assert re.fullmatch(rf"llmc: error: .*weight '{weight.name}' at byte .*: compile the model again\n", damaged.stderr)


# ---- chat --------------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_chat_is_generate_on_the_rendered_conversation(chat_artifact: Path, tmp_path: Path) -> None:
    conversations = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "é"}, {"role": "user", "content": "Hi"}],
    ]
    rendered = ["<user>Hi<assistant>", "<system>é<user>Hi<assistant>", "<user>Hi[1]<assistant>"]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(chat_artifact) as llm:
        expected = [o.outputs[0] for o in llm.generate(rendered, params)]
        assert [o.outputs[0] for o in llm.chat(conversations, params)] == expected[:2]
        assert [o.outputs[0] for o in llm.chat(conversations[0], params)] == expected[:1]
        assert [o.outputs[0] for o in llm.chat(conversations[0], params, tools=[TOOL])] == expected[2:]
        with pytest.raises(RequestError, match="message 0 is 'Hi'"):
            llm.chat([["Hi"]], params)  # type: ignore[arg-type]

    file = tmp_path / "chats.jsonl"
    records = [{"messages": c} for c in conversations] + [
        {"messages": conversations[0], "tools": [TOOL]},
        {"prompt": "Hi"},
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    greedy = ["--max-tokens", "12", "--temperature", "0", "--ignore-eos", "--chat", "--quiet"]
    found = llmc("run", chat_artifact, "--prompts", file, "-o", tmp_path / "out.jsonl", *greedy)
    assert found.returncode == 0, found.stderr
    ids = [tuple(record["token_ids"]) for record in lines(tmp_path / "out.jsonl")]
    assert ids == [e.token_ids for e in [*expected, expected[0]]]
    shown = llmc("run", chat_artifact, "--prompt", "Hi", *greedy)
    assert shown.stdout == expected[0].text + "\n", "an answer stands without its question"


def test_chat_without_template_is_one_sentence(chat_artifact: Path, tmp_path: Path) -> None:
    shutil.copytree(chat_artifact, tmp_path / "artifact")
    (tmp_path / "artifact" / "tokenizer_config.json").unlink()
    output = tmp_path / "out.jsonl"
    result = llmc("run", tmp_path / "artifact", "--chat", "--prompt", "Hi", "-o", output)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "llmc: error: this model has no default chat template: use plain prompts, without chat\n"
    assert not output.exists()


# ---- failures ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned(chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact with an embedding of "q" that is not a number: prompts with a q fail, others do not."""
    path = tmp_path_factory.mktemp("poisoned") / "artifact"
    shutil.copytree(chat_artifact, path)
    with LLM(chat_artifact) as llm:
        (token,) = llm.tokenizer.encode("q")
    weight = next(w for w in read_graphs(path).weights if w.name == "embed.weight")
    row_bytes = weight.bytes // weight.shape[0]
    with (path / "weights.safetensors").open("r+b") as file:
        file.seek(weight.file_offset + token * row_bytes)
        file.write(b"\xff" * row_bytes)
    return path


def test_a_failed_request_leaves_the_others_alone(poisoned: Path) -> None:
    prompts = ["a" * 20, "q" * 30, "b" * 30, "cq", "d"]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    with LLM(poisoned) as llm:
        outputs = llm.generate(prompts, params)
        again = llm.generate(prompts[::2], params)
    assert [o.error.code if o.error else None for o in outputs] == [None, "not_finite", None, "not_finite", None]
    for output in outputs[1::2]:
        assert output.error is not None
        assert "produced the logit" in output.error.message
        assert "nan" in output.error.message
        assert output.outputs[0].finish_reason == "error"
    assert [o.outputs for o in again] == [o.outputs for o in outputs[::2]], "blocks that held NaN are reused"
    for prompt, output in zip(prompts[::2], outputs[::2], strict=True):
        with LLM(poisoned, prefix_cache=False) as llm:
            assert llm.generate(prompt, params)[0].outputs == output.outputs


def test_failures_are_counted_and_end_with_1(poisoned: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    options: list[str | Path] = [
        "--prompt",
        "q",
        "--prompt",
        "a",
        "--max-tokens",
        "9",
        "--temperature",
        "0",
        "--ignore-eos",
        "-o",
        output,
    ]
    result = llmc("run", poisoned, *options, "--stats")
    assert result.returncode == 1
    failed, fine = lines(output)
    assert (failed["finish_reason"], failed["error"]["code"], failed["token_ids"]) == ("error", "not_finite", [])
    assert (fine["finish_reason"], "error" in fine, len(fine["token_ids"])) == ("length", False, 9)
    assert "2 in" in result.stderr
    assert "1 failed" in result.stderr
    assert result.stderr.splitlines()[-1] == (
        f"llmc: error: 1 of 2 prompts failed, the first is 0: {failed['error']['message']}"
    )
    again = llmc("run", poisoned, *options, "--resume", "--json")
    assert again.returncode == 1
    summary = json.loads(again.stdout)["summary"]
    assert (summary["requests"], summary["resumed"], summary["failed"]) == (1, 1, 1)
    assert lines(output) == [failed, fine]


def test_a_refused_request_fails_alone(chat_artifact: Path) -> None:
    with LLM(chat_artifact) as llm:
        fine = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        # Ids of the model are the engine's to check.
        wrong, short = llm.generate([[5] * 9, [5] * 3], [SamplingParams(stop_token_ids=[99999]), fine])
    assert wrong.error is not None
    assert wrong.error.code == "invalid_argument"
    assert wrong.outputs[0].finish_reason == "error"
    assert (short.error, len(short.outputs[0].token_ids)) == (None, 4)


def test_a_small_pool_is_told_on_stderr(chat_artifact: Path) -> None:
    with LLM(chat_artifact) as llm:
        info = llm.artifact.info
    pool = ["--kv-bytes", str(2 * info.kv_block_bytes), "--temperature", "0", "--ignore-eos"]
    warning = (
        f"warning: a request may have {info.block_size} tokens, not the model's 64, because the KV pool holds no more"
    )
    run = llmc("run", chat_artifact, "--prompt", "abc", "--json", *pool)
    assert run.stderr.startswith(warning)
    assert run.stderr.count("\n") == 1
    (record,) = json.loads(run.stdout)["results"]
    assert (record["finish_reason"], len(record["token_ids"])) == ("length", info.block_size - 3)
    assert f"fill the {info.block_size} tokens that the KV pool holds" in record["finish_detail"]
    refused = llmc("run", chat_artifact, "--prompt", "a" * 40, *pool)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.splitlines()[-1].startswith(
        f"llmc: error: prompt 0 has 40 tokens and the KV pool holds {info.block_size}: shorten it to at most"
    )
