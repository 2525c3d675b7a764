"""Tasks with local data, as files for lm-evaluation-harness; what it computes is in the slow tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmc.cli.main import main
from llmc.runtime.eval.local_tasks import LOCAL_TASKS, EvalError, local_task_of, write_tasks
from llmc.runtime.eval.run_tasks import scores_of
from llmc.runtime.eval.tasks.run_code import process_results

LAYOUTS = {
    "local_mmlu": ("mmlu/test/{}_test.csv", "mmlu/dev/{}_dev.csv", "question,choice0,choice1,choice2,choice3,answer"),
    "local_ceval": ("ceval/val/{}_val.csv", "ceval/dev/{}_dev.csv", "id,question,A,B,C,D,answer"),
    "local_cmmlu": ("cmmlu/test/{}.csv", "cmmlu/dev/{}.csv", ",Question,A,B,C,D,Answer"),
}
ROWS = {
    "local_mmlu": ['"Which, of these?",1.50,None,NA,"a ""b""",2'],
    "local_ceval": ['0,"Which, of these?",1.50,None,NA,"a ""b""",C'],
    "local_cmmlu": ['0,"Which, of these?",1.50,None,NA,"a ""b""",C'],
}


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """That knows the harness' tag for functions."""


Loader.add_constructor("!function", lambda loader, node: f"!{node.value}")


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(file.read_text(encoding="utf-8"), Loader)
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder whose name YAML would not take as it is."""
    folder = tmp_path / 'the "data"'
    for name, layout in LAYOUTS.items():
        for file in layout[:2]:
            for subject in ("world_history", "law"):
                path = folder / file.format(subject)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("\n".join([layout[2], *ROWS[name]]))
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_questions_are_read_as_text(name: str, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_tasks([f"{name}_law", name], data, folder)
    group = read(folder / f"{name}.yaml")
    assert group["group"] == name
    assert group["task"] == [f"{name}_law", f"{name}_world_history"]
    task = read(folder / f"{name}_world_history.yaml")
    assert task["task"] == f"{name}_world_history"
    assert "world history" in task["description"]
    for file in task["dataset_kwargs"]["data_files"].values():
        (line,) = Path(file).read_text(encoding="utf-8").splitlines()
        assert json.loads(line) == {
            "question": "Which, of these?",
            "choices": ["1.50", "None", "NA", 'a "b"'],
            "answer": 2,
        }


def test_the_first_copy_of_mmlu_names_no_columns(data: Path, tmp_path: Path) -> None:
    for file in (data / "mmlu").rglob("*.csv"):
        file.write_text("Which?,a,b,c,d,D\nAnd now?,a,b,c,d,A\n")
    write_tasks(["local_mmlu"], data, tmp_path)
    lines = (tmp_path / "data" / "local_mmlu" / "law" / "test.jsonl").read_text().splitlines()
    assert [json.loads(line)["answer"] for line in lines] == [3, 0]


def test_one_file_tasks_read_their_data_where_it_is(data: Path, tmp_path: Path) -> None:
    for name in ("gsm8k/test.jsonl", "humaneval/HumanEval.jsonl.gz"):
        (data / name).parent.mkdir(parents=True)
        (data / name).touch()
    write_tasks(["local_gsm8k", "local_humaneval", "hellaswag"], data, tmp_path)
    math = read(tmp_path / "local_gsm8k.yaml")
    assert math["dataset_kwargs"]["data_files"]["test"] == str(data / "gsm8k" / "test.jsonl")
    code = read(tmp_path / "local_humaneval.yaml")
    assert code["process_results"] == "!run_code.process_results"
    assert code["unsafe_code"] is True
    assert (tmp_path / "run_code.py").is_file()


def test_names_of_local_tasks() -> None:
    assert local_task_of("local_mmlu_high_school_physics") == "local_mmlu"
    assert local_task_of("local_mmlu") == "local_mmlu"
    assert local_task_of("mmlu") is None
    assert all((Path(LOCAL_TASKS[name].template).suffix) == ".yaml" for name in LOCAL_TASKS)


def test_data_that_is_not_there(data: Path, tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"local_mmlu needs --data DIR, the folder with mmlu/test/\*_test.csv"):
        write_tasks(["local_mmlu"], None, tmp_path)
    with pytest.raises(EvalError, match=r"has no gsm8k/test\.jsonl"):
        write_tasks(["local_gsm8k"], data, tmp_path)
    (data / "mmlu" / "dev" / "law_dev.csv").unlink()
    with pytest.raises(EvalError, match="questions of law for local_mmlu and no examples"):
        write_tasks(["local_mmlu"], data, tmp_path)
    (data / "cmmlu" / "test" / "law.csv").write_text("Which?,a,b,c,d,E\n")
    with pytest.raises(EvalError, match=r"question 1 of .* has no answer A to D"):
        write_tasks(["local_cmmlu"], data, tmp_path)


def test_completions_run() -> None:
    doc = {"prompt": "def add(a, b):\n", "test": "def check(f):\n    assert f(1, 2) == 3\n", "entry_point": "add"}
    assert process_results(doc, ["    return a + b\n"]) == {"pass_at_1": 1.0}
    assert process_results(doc, ["    return a - b\n"]) == {"pass_at_1": 0.0}
    assert process_results(doc, ["    no python\n"]) == {"pass_at_1": 0.0}


def test_scores_are_read_from_what_the_harness_returns() -> None:
    found = {
        "results": {
            "local_mmlu": {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "local_mmlu"},
            "local_mmlu_law": {"acc,none": 0.25, "acc_stderr,none": "N/A", "alias": " - law"},
        },
        "groups": {"local_mmlu": {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "local_mmlu"}},
        "group_subtasks": {"local_mmlu": ["local_mmlu_law"]},
        "n-samples": {"local_mmlu_law": {"original": 9, "effective": 4}},
    }
    group, law = scores_of(found)
    assert (group.task, group.value, group.standard_error, group.samples) == ("local_mmlu", 0.5, 0.1, 4)
    assert (law.task, law.metric, law.filter, law.value, law.standard_error) == (
        "local_mmlu_law", "acc", "none", 0.25, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["out", "--tasks", ","], "--tasks is empty"),
        (["--tasks", "x"], "give either an artifact or --base-url URL"),
        (["out", "--tasks", "x", "--base-url", "http://h"], "give either an artifact or --base-url URL"),
        (["--tasks", "x", "--base-url", "http://h"], "--base-url needs --tokenizer PATH"),
        (["--tasks", "x", "--base-url", "http://h", "--tokenizer", "out", "--chat"], "--chat is for an artifact"),
    ],
)
def test_requests_that_make_no_sense(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "tasks", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_harness_that_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["eval", "tasks", "out", "--tasks", "x"]) == 1
    assert "pip install 'lm_eval[api]'" in capsys.readouterr().err
