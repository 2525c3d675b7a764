"""`llmc run` with images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.cli.main import main
from llmc.cli.options.warm_up import WarmOptions, WarmUpPlanner
from llmc.runtime.llm import LLM
from llmc.runtime.params import SamplingParams
from llmc.runtime.warm_up.budget import BudgetOptions, size_text
from llmc.runtime.warm_up.tower_memory import tower_memory

from support.image_forms import encoded, picture
from support.seeing_chat import Seeing, compile_seeing_chat


@pytest.fixture(scope="module")
def seeing(kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return compile_seeing_chat(tmp_path_factory.mktemp("seeing"), "smolvlm", kernel_cache)


def test_images_of_flags_and_files(seeing: Seeing, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cat, dog = tmp_path / "cat.png", tmp_path / "dog.png"
    cat.write_bytes(encoded(picture(60, 40)))
    dog.write_bytes(encoded(picture(60, 40, seed=1)))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "What is <image>?", "images": [str(dog)]}) + "\n")
    line = [
        "run", str(seeing.text), "--images", str(seeing.tower), "--image", str(cat), "--prompt", "What is it?",
        "--prompts", str(prompts), "--temperature", "0", "--max-tokens", "5", "--json", "--quiet",
    ]  # fmt: skip
    assert main(line) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    params = SamplingParams(temperature=0.0, max_tokens=5)
    with LLM(seeing.text, images=seeing.tower, num_threads=1) as llm:
        given = [{"prompt": "<image>What is it?", "images": [cat]}, {"prompt": "What is <image>?", "images": [dog]}]
        expected = llm.generate(given, params)
        parts = [{"type": "image", "path": cat}, {"type": "text", "text": "What is it?"}]
        (chat,) = llm.chat([{"role": "user", "content": parts}], params)
    assert [one["token_ids"] for one in results] == [list(one.outputs[0].token_ids) for one in expected]
    assert results[1]["images"] == [str(dog)]
    line = [*line[:8], *line[10:], "--chat"]
    assert main(line) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["token_ids"] == list(chat.outputs[0].token_ids)


def test_a_budget_counts_what_encodes_images(seeing: Seeing, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(seeing.text, images=seeing.tower, num_threads=1, memory_utilization=0.3) as llm:
        assert llm.budget is not None
        lines = llm.budget.lines
        (answer,) = llm.generate({"prompt": "<image>What is it?", "images": [picture(60, 40)]})
    assert answer.error is None
    counted = f", encoding of images {size_text(tower_memory(seeing.tower))}, "
    assert any(counted in line for line in lines)
    WarmUpPlanner(seeing.text, WarmOptions(budget=BudgetOptions(0.3), measure=False), images=seeing.tower)
    assert counted in capsys.readouterr().err


@pytest.mark.parametrize("place", ["flag", "images", "message"])
def test_results_are_not_continued_with_other_images(
    seeing: Seeing, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cat, results, prompts = tmp_path / "cat.png", tmp_path / "results.jsonl", tmp_path / "prompts.jsonl"
    parts = [{"type": "image", "path": str(cat)}, {"type": "text", "text": "What is it?"}]
    lines = {
        "images": {"prompt": "What is it?", "images": [str(cat)]},
        "message": {"messages": [{"role": "user", "content": parts}]},
    }
    given = ["--image", str(cat), "--prompt", "What is it?"]
    if place != "flag":
        prompts.write_text(json.dumps(lines[place]) + "\n")
        given = ["--prompts", str(prompts), *(["--chat"] if place == "message" else [])]
    line = [
        "run", str(seeing.text), "--images", str(seeing.tower), *given,
        "--max-tokens", "2", "--output", str(results), "--quiet",
    ]  # fmt: skip
    cat.write_bytes(encoded(picture(20, 20)))
    assert main(line) == 0
    assert main([*line, "--resume"]) == 0
    cat.write_bytes(encoded(picture(20, 20, seed=1)))
    assert main([*line, "--resume"]) != 0
    assert "other prompts" in capsys.readouterr().err


def test_an_image_needs_what_encodes_it(seeing: Seeing, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["run", str(seeing.text), "--image", str(tmp_path / "no.png"), "--prompt", "a"]
    assert main(line) == 2
    assert "--image needs --images ARTIFACT" in capsys.readouterr().err
    assert main([*line, "--images", str(seeing.tower)]) == 1
    assert "cannot be read: No such file or directory" in capsys.readouterr().err
