"""docs/embeddings.md is true: its commands and program run, and the families do what it says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from llmc.cli import main as cli
from llmc.models.registry import FAMILIES
from llmc.runtime.llm import LLM
from llmc.task_names import TASKS

from support.paths import ROOT

PAGE = (ROOT / "docs" / "embeddings.md").read_text(encoding="utf-8")


def commands(name: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in re.findall(rf"^ {{4}}(llmc {name} .*)$", PAGE, re.MULTILINE)]


def test_embed_runs(embedder: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = commands("embed")
    assert cli.main([str(embedder[1]) if word == "minilm.llmc" else word for word in command]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["A bucket is a static shape.", "Rivers flow to the sea."]
    assert all(len(line["embedding"]) == 60 for line in lines)


def test_the_output_of_embed_does_not_replace_a_file(
    embedder: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("one\ntwo\n")
    command = ["embed", str(embedder[1]), "--prompts", str(texts), "-o", str(texts)]
    assert cli.main(command) == 2
    assert "exists: pass --overwrite to replace it" in capsys.readouterr().err
    assert texts.read_text() == "one\ntwo\n"
    assert cli.main([*command, "--overwrite"]) == 0
    assert len(texts.read_text().splitlines()) == 2
    assert json.loads(texts.read_text().splitlines()[0])["prompt"] == "one"


def test_rank_names_its_own_options(ranker: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["rank", str(ranker[1]), "--query", "a"]
    assert cli.main([*command, "--documents", "/nowhere.txt"]) != 0
    assert "cannot read documents file /nowhere.txt" in capsys.readouterr().err


def test_an_empty_text_is_one(
    embedder: tuple[Path, Path], ranker: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": ""}\n{"prompt": "w1"}\n')
    assert cli.main(["embed", str(embedder[1]), "--prompt", "", "--prompts", str(texts)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    with LLM(embedder[1]) as llm:
        vectors = [one.vector.tolist() for one in llm.embed(["", "", "w1"])]
    assert [(line["prompt"], line["embedding"]) for line in lines] == list(zip(["", "", "w1"], vectors, strict=True))
    assert cli.main(["rank", str(ranker[1]), "--query", "", "--document", "", "--documents", str(texts), "--json"]) == 0
    scores = {line["index"]: line["score"] for line in map(json.loads, capsys.readouterr().out.splitlines())}
    with LLM(ranker[1]) as llm:
        assert scores == {one.index: one.score for one in llm.score("", ["", "", "w1"])}
    texts.write_text('{"prompt": 1}\n')
    assert cli.main(["rank", str(ranker[1]), "--query", "", "--documents", str(texts)]) != 0
    assert "prompt 1 is not a text: leave the line out" in capsys.readouterr().err


def test_rank_runs(ranker: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = commands("rank")
    (tmp_path / "passages.txt").write_text("w1 w2\nw3\nw4 w5 w6\n")
    places = {"reranker.llmc": str(ranker[1]), "passages.txt": str(tmp_path / "passages.txt")}
    assert cli.main([places.get(word, word) for word in command]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    scores = [float(line.split()[0]) for line in lines]
    assert scores == sorted(scores, reverse=True)


def test_the_program_runs(embedder: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    program = program.replace("minilm.llmc", str(embedder[1])).replace("dimensions=128", "dimensions=12")
    exec(compile(program, "docs/embeddings.md", "exec"), {})
    assert len(re.findall(r"^\d \[", capsys.readouterr().out, re.MULTILINE)) == 2


def test_tasks_and_families_are_those_there_are() -> None:
    tasks = re.findall(r"^\| `(\w+)` \| ", PAGE.partition("| task |")[2].partition("\n\n")[0], re.MULTILINE)
    assert ("auto", *tasks) == TASKS
    rows = PAGE.partition("| models | tasks |")[2].partition("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert named == {name for name, family in FAMILIES.items() if family.vectors is not None}
