"""Runs tasks of lm-evaluation-harness on an artifact in this process, or on a server."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.runtime.eval.local_tasks import EvalError, write_tasks

_INSTALL = "pip install 'lm_eval[api]'"


@dataclass(frozen=True)
class TaskRun:
    """names: tasks of the harness, of include_path, or of LOCAL_TASKS with their data. limit: documents per task.
    num_fewshot: None for the task's own. run_code: whether to execute code that the model writes."""

    names: tuple[str, ...]
    data: Path | None = None
    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    chat: bool = False
    run_code: bool = False


@dataclass(frozen=True)
class Score:
    """A metric of a task. filter: the answer extraction, "none" for none. standard_error: None if the harness gives
    none. samples: number of documents."""

    task: str
    metric: str
    filter: str
    value: float
    standard_error: float | None
    samples: int


def require_harness() -> None:
    """Raises EvalError if lm_eval is not installed."""
    try:
        importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        raise EvalError(f"llmc eval tasks needs lm-evaluation-harness, which is not installed: {_INSTALL}") from None


def run_on_artifact(artifact: Path, run: TaskRun, num_threads: int = 0) -> list[Score]:
    """Runs tasks on an artifact in this process. Raises EvalError and the engine's errors."""
    require_harness()
    from llmc.runtime.eval.harness import HarnessModel

    with contextlib.closing(HarnessModel(artifact, num_threads)) as model:
        return _run(model, None, run)


def run_on_server(base_url: str, model: str | None, tokenizer: Path, run: TaskRun) -> list[Score]:
    """Runs tasks against a server, with the harness's own client. model: None for the server's first. tokenizer: an
    artifact, or a model directory. Raises EvalError."""
    require_harness()
    url = base_url.rstrip("/").removesuffix("/v1")
    arguments = {
        "model": model or _served_model(url),
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(tokenizer),
    }
    return _run("local-completions", arguments, run)


def _served_model(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError, urllib.error.URLError) as error:
        raise EvalError(
            f"--base-url {url} does not tell its models ({error}); start llmc serve, or give --model"
        ) from None


def _run(model: Any, arguments: dict[str, str] | None, run: TaskRun) -> list[Score]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    with _task_folders(run) as folders:
        # The harness reads thousands of files to list its own tasks.
        manager = TaskManager(include_path=folders, include_defaults=False) if folders else None
        if manager is None or not _knows_all(manager, run):
            manager = TaskManager(include_path=folders or None)
        for name in run.names:
            if not manager.match_tasks([name]):
                raise EvalError(f"--tasks: there is no task {name!r}; lm_eval ls tasks lists those of the harness")
        found = simple_evaluate(
            model=model,
            model_args=arguments,
            tasks=list(run.names),
            task_manager=manager,
            num_fewshot=run.num_fewshot,
            limit=run.limit,
            apply_chat_template=run.chat,
            confirm_run_unsafe_code=run.run_code,
            log_samples=False,
        )
    return scores_of(found)


def _knows_all(manager: Any, run: TaskRun) -> bool:
    return all(manager.match_tasks([name]) for name in run.names)


@contextlib.contextmanager
def _task_folders(run: TaskRun) -> Iterator[list[str]]:
    """Task folders of the harness besides its own."""
    with tempfile.TemporaryDirectory(prefix="llmc-eval-") as folder:
        write_tasks(run.names, run.data, Path(folder))
        folders = [folder] if any(Path(folder).iterdir()) else []
        if run.include_path is not None:
            if not run.include_path.is_dir():
                raise EvalError(f"--include-path {run.include_path} is not a folder; name one with YAML files of tasks")
            folders.append(str(run.include_path))
        yield folders


def scores_of(found: dict[str, Any]) -> list[Score]:
    """The metrics in the harness's result, in its order; groups precede their members."""
    scores: list[Score] = []
    results: dict[str, Any] = {**found.get("groups", {}), **found["results"]}
    for task, metrics in results.items():
        samples = found.get("n-samples", {}).get(task, {}).get("effective") or metrics.get("sample_len")
        for key, value in metrics.items():
            metric, comma, by = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{by}")
            known = float(error) if isinstance(error, int | float) else None
            scores.append(Score(task, metric, by, float(value), known, int(samples or _group_samples(found, task))))
    return scores


def _group_samples(found: dict[str, Any], group: str) -> int:
    """Documents of all tasks in a group."""
    counts: Sequence[str] = found.get("group_subtasks", {}).get(group, ())
    return sum(found.get("n-samples", {}).get(task, {}).get("effective", 0) for task in counts)
