"""Tasks on local data: fills in their templates for a data folder."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TEMPLATES = Path(__file__).parent / "tasks"
_LETTERS = ("A", "B", "C", "D")
# Column names of four-choice questions, by the authors and in copies.
_COLUMNS = (
    ("question", "A", "B", "C", "D", "answer"),
    ("Question", "A", "B", "C", "D", "Answer"),
    ("question", "choice0", "choice1", "choice2", "choice3", "answer"),
)


class EvalError(ValueError):
    """The evaluation cannot run; the message is one sentence."""


@dataclass(frozen=True)
class LocalTask:
    """template: its file in tasks/. data: required paths below the data folder; * is a subject. examples: fixed
    few-shot examples of a subject."""

    template: str
    data: str
    examples: str | None = None


LOCAL_TASKS = {
    "local_mmlu": LocalTask("mmlu.yaml", "mmlu/test/*_test.csv", "mmlu/dev/*_dev.csv"),
    "local_ceval": LocalTask("ceval.yaml", "ceval/val/*_val.csv", "ceval/dev/*_dev.csv"),
    "local_cmmlu": LocalTask("cmmlu.yaml", "cmmlu/test/*.csv", "cmmlu/dev/*.csv"),
    "local_gsm8k": LocalTask("gsm8k.yaml", "gsm8k/test.jsonl"),
    "local_humaneval": LocalTask("humaneval.yaml", "humaneval/HumanEval.jsonl.gz"),
}


def local_task_of(name: str) -> str | None:
    """The local task that `name` is, or is a subject of, as in local_mmlu_anatomy; None for other tasks."""
    return next((task for task in LOCAL_TASKS if name == task or name.startswith(f"{task}_")), None)


def write_tasks(names: Iterable[str], data: Path | None, folder: Path) -> None:
    """Writes the local tasks among `names` to `folder`, in the harness's format. Raises EvalError."""
    for task in dict.fromkeys(filter(None, map(local_task_of, names))):
        if data is None:
            raise EvalError(f"{task} needs --data DIR, the folder with {LOCAL_TASKS[task].data}")
        _write(task, LOCAL_TASKS[task], data.resolve(), folder)


def _write(name: str, task: LocalTask, data: Path, folder: Path) -> None:
    found = sorted(data.glob(task.data))
    if not found:
        raise EvalError(f"--data {data} has no {task.data}, which {name} reads")
    shutil.copy(_TEMPLATES / "run_code.py", folder)
    if task.examples is None:
        _fill(task, folder / f"{name}.yaml", name, found[0].parent, "")
        return
    subjects = []
    _, _, end = task.data.partition("*")
    for file in found:
        subject = file.name.removesuffix(end)
        own = folder / "data" / name / subject
        own.mkdir(parents=True)
        examples = data / task.examples.replace("*", subject)
        if not examples.is_file():
            raise EvalError(f"--data {data} has questions of {subject} for {name} and no examples, {examples}")
        _to_lines(file, own / "test.jsonl")
        _to_lines(examples, own / "dev.jsonl")
        subjects.append(f"{name}_{subject}")
        _fill(task, folder / f"{subjects[-1]}.yaml", subjects[-1], own, subject.replace("_", " "))
    group: dict[str, Any] = {
        "group": name,
        "task": subjects,
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
        "metadata": {"version": 1.0},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(group), encoding="utf-8")


def _fill(task: LocalTask, file: Path, name: str, data: Path, subject: str) -> None:
    text = (_TEMPLATES / task.template).read_text(encoding="utf-8")
    for mark, value in {"@TASK@": name, "@DATA@": str(data), "@SUBJECT@": subject}.items():
        # Escaped for a double-quoted YAML string, which follows JSON.
        text = text.replace(mark, json.dumps(value, ensure_ascii=False)[1:-1])
    file.write_text(text, encoding="utf-8")


def _to_lines(source: Path, target: Path) -> None:
    """Converts four-choice questions from CSV, with or without a header row, to JSON lines. Raises EvalError.

    All cells stay text: type guessing would turn the choice "1.50" into a number, and "None" into null.
    """
    with source.open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    if not rows:
        raise EvalError(f"{source} is empty: download it again")
    names = next((columns for columns in _COLUMNS if set(columns) <= set(rows[0])), None)
    places: Sequence[int] = range(6)
    if names is not None:
        places = [rows[0].index(column) for column in names]
        rows = rows[1:]
    lines = []
    for number, row in enumerate(rows, 1):
        answer = row[places[5]].strip() if len(row) > max(places) else ""
        if answer not in (*_LETTERS, "0", "1", "2", "3"):
            raise EvalError(f"question {number} of {source} has no answer A to D in its columns {list(_COLUMNS[0])}")
        index = _LETTERS.index(answer) if answer in _LETTERS else int(answer)
        choices = [row[place] for place in places[1:5]]
        line = {"question": row[places[0]], "choices": choices, "answer": index}
        lines.append(json.dumps(line, ensure_ascii=False))
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
