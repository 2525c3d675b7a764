"""The gallery in examples/: each program runs, against one artifact of tiny-chat; README.md names all of them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.runtime.binding.library import library_candidates

from support.adapters import make_adapter
from support.compiled import compile_tiny
from support.live_server import LiveServer, serving
from support.paths import ROOT

EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
MODEL = EXAMPLES / "tiny-chat"
KEY = "key-of-the-gallery"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    path = tmp_path_factory.mktemp("gallery") / "tiny"
    ladder = "prefill=1x512,decode=[1,8]x512"
    compile_tiny(MODEL, path, kernel_cache, buckets=ladder, max_num_seqs=8, lora_slots=2).close()
    return path


@pytest.fixture(scope="module")
def server(artifact: Path) -> Iterator[LiveServer]:
    with serving(artifact, "--api-key", KEY, "--chat-template", EXAMPLES / "clients" / "story.jinja") as server:
        yield server


def run(*command: str | Path) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def example(name: str, *arguments: str | Path) -> str:
    return run(sys.executable, "-P", EXAMPLES / name, *arguments)


def client(name: str, server: LiveServer) -> str:
    if "import openai" in (text := (EXAMPLES / "clients" / name).read_text()) or "from openai" in text:
        pytest.importorskip("openai", reason="openai belongs to the extra dev")
    return example(f"clients/{name}", f"{server.url}/v1", KEY)


def test_batch(artifact: Path, tmp_path: Path) -> None:
    shown = example("batch.py", artifact, EXAMPLES / "prompts.txt", tmp_path / "answers.jsonl")
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    prompts = (EXAMPLES / "prompts.txt").read_text().splitlines()
    assert [answer["prompt"] for answer in sorted(answers, key=lambda answer: int(answer["index"]))] == prompts
    assert all(answer["text"] and answer["error"] is None for answer in answers)
    assert shown.startswith("5 prompts, ")


def test_speculation(artifact: Path) -> None:
    shown = example("speculate.py", artifact)
    counts = re.findall(r"(\d+) tokens in (\d+) steps", shown)
    assert len(counts) == 2
    assert counts[0][0] == counts[1][0]
    assert shown.endswith("same tokens: True\n")


def test_adapters(artifact: Path, tmp_path: Path) -> None:
    named = [
        f"{name}={make_adapter(tmp_path / name, MODEL, ['q_proj', 'down_proj'], seed=seed, size=3.0)}"
        for seed, name in enumerate(("formal", "short"))
    ]
    lines = example("adapters.py", artifact, *named).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["no adapter", "formal", "short"]
    assert len({line.partition(":")[2] for line in lines}) == 3, "each adapter has a text of its own"


def test_rag(artifact: Path, embedder: tuple[Path, Path], tmp_path: Path) -> None:
    passages = ["w1 w2 w3 w4", "w50 w60 w70", "w9 w9 w9 w9 w9"]
    (tmp_path / "passages.txt").write_text("\n".join(passages))
    shown = example("rag.py", embedder[1], artifact, tmp_path / "passages.txt", "w50 w60 w70")
    assert shown.startswith("passage: w50 w60 w70\nanswer: ")


def test_cells_of_the_notebook_run_in_order(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        assert {"cell_type", "id", "metadata", "source"} <= set(cell)
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), "clear outputs before a commit"
            # Compiled already: that a model directory will do is shown by other tests.
            source = "".join(cell["source"]).replace('"examples/tiny-chat"', repr(str(artifact)))
            exec(compile(source, cell["id"], "exec"), names)
    assert capsys.readouterr().out.splitlines()[-1] in ("yes", "no")


def test_many_at_once(server: LiveServer) -> None:
    lines = client("async_client.py", server).splitlines()
    assert len(lines) == 4
    assert all(re.match(r"[A-Z][a-z ]+\? ['\"].+['\"]$", line) for line in lines)


def test_a_stream(server: LiveServer) -> None:
    text, _, tokens = client("stream_client.py", server).rstrip().rpartition("\n")
    assert text
    assert re.fullmatch(r"\d+ tokens", tokens)


def test_tools(server: LiveServer) -> None:
    shown = dict(line.split(": ", 1) for line in client("tools_client.py", server).splitlines()[:3])
    assert shown["call"].startswith("weather {")
    assert shown["result"] in ("rain", "fog")
    assert shown["answer"]


def test_an_object_of_a_class(server: LiveServer) -> None:
    assert re.fullmatch(r".*, \d+, (married|single)\n", client("schema_client.py", server), re.DOTALL)


def test_priorities(server: LiveServer) -> None:
    shown = client("priority_client.py", server)
    body = {"prompt": "The evening passed", "max_tokens": 8, "seed": 1, "ignore_eos": True}
    alone = server.ask("POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}"}).json()
    assert shown.startswith(f"urgent: {alone['choices'][0]['text']!r}\n"), "same request, same bits"
    assert re.search(r"place \d+ of 13\n$", shown)


def test_c_plus_plus_generates_what_c_does(artifact: Path, tmp_path: Path) -> None:
    for program in ("cc", "c++"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    library = next(path for path in library_candidates() if path.is_file())
    link: list[str | Path] = [
        f"-I{ROOT / 'runtime/native/include'}",
        library,
        f"-Wl,-rpath,{library.parent}",
        "-Wall",
        "-Werror",
    ]
    run("cc", EXAMPLES / "embed.c", *link, "-o", tmp_path / "c")
    run("c++", "-std=c++17", EXAMPLES / "embed.cc", *link, "-o", tmp_path / "cc")
    arguments: list[str | Path] = [artifact, "20", "301", "284", "96"]
    ids = run(tmp_path / "cc", *arguments)
    assert ids == run(tmp_path / "c", *arguments)
    assert ids.split()
    for program in ("c", "cc"):
        with open("/dev/full", "w") as full:
            lost = subprocess.run([tmp_path / program, *arguments], stdout=full, stderr=subprocess.PIPE, check=False)
        assert (lost.returncode, lost.stderr) == (1, b"embed: cannot write the tokens to stdout\n")
    failed = subprocess.run([tmp_path / "cc", tmp_path / "gone", "1", "1"], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("embed: ")
    assert "gone" in failed.stderr


def test_the_readme_names_every_example() -> None:
    linked = {EXAMPLES / name for name in re.findall(r"\]\(([\w./-]+)\)", README)}
    assert [path for path in linked if not path.exists()] == []
    programs = {path for folder in (EXAMPLES, EXAMPLES / "clients") for path in folder.iterdir() if path.suffix}
    assert programs - linked == {EXAMPLES / "README.md", EXAMPLES / "prompts.txt"}
    for line in re.findall(r"^\| \[[\w.]+\]\((\S+)\) .*`((?:python|sh) [^`]+)` \|$", README, re.MULTILINE):
        assert ROOT / shlex.split(line[1])[1] == EXAMPLES / line[0]
