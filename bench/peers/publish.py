"""Publishes measurements: files of bench/results, one per model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from bench.peers.machine_limits import UNITS
from bench.peers.plan import PARTS, Settings
from bench.peers.report import OWN, Point, Report, Spread, significant
from bench.peers.results import FORMAT, RESULTS, Results, Value, peak_prompt
from bench.peers.store import StoreError

KINDS = {
    "speed": {"prefill", "decode"},
    "start": {"start", "start-native"},
    "memory": {"memory"},
    "serve": {"serve", "offline"},
}
"""Kinds of figures, by part of a run."""
MANY = 8
"""Number of sequences whose ratio is shown beside that of the fewest."""


def publish(report: Report, name: str, folder: Path = RESULTS) -> list[str]:
    """Writes NAME-MODEL.json for each model of a report, over older ones; returns the names without .json.

    Raises StoreError if there are no measurements, or if transcribed figures have the name: they would be lost.
    """
    models = report.models()
    if not models:
        raise StoreError(f"{report.store.path} has no measurement to publish: run the benchmark first")
    names = [f"{name}-{model}" for model in models]
    for one in names:
        if (folder / f"{one}.json").exists() and Results.load(one, folder).document.get("transcribed"):
            raise StoreError(
                f"bench/results/{one}.json was transcribed and cannot be measured again: give another name"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for one, model in zip(names, models, strict=True):
        document = json.dumps(figures(report, model), indent=1, ensure_ascii=False)
        (folder / f"{one}.json").write_text(document + "\n", encoding="utf-8")
    return names


def figures(report: Report, model: str) -> dict[str, Any]:
    """The document of a model: medians and ranges in three digits. Parts without figures are left out."""
    store = report.store
    machine = store.machine
    days = [one.at for one in store.measurements if one.key.model == model]
    settings = store.settings
    document: dict[str, Any] = {
        "format": FORMAT,
        "title": f"{model} on {machine['cpu']}",
        "machine": (
            f"{settings.threads} threads of {machine['cpus']} CPUs, {machine['cpu']}, {machine['memory_gib']} GiB"
        ),
        "date": time.strftime("%Y-%m-%d", time.gmtime(max(days))),
        "limits": {limit: value_of(spread, 1e9) for limit, spread in report.limits().items() if limit in UNITS},
        "speed": _speed(report, model),
        "ratios": _ratios(report, model),
        "start": _columns(report, model, {"python": "start", "native": "start-native", "memory": "memory"}),
        "serve": _columns(report, model, {"served": "serve", "offline": "offline"}),
        "commands": [_command(report, model)],
    }
    return {key: value for key, value in document.items() if value}


def figures_compared(settings: Settings) -> list[str]:
    """Figures whose ratios are published: more would make a table too wide for a page."""
    batches = sorted({min(settings.batches), *(size for size in settings.batches if size == MANY)})
    return [*(f"decode:{size}" for size in batches), f"prefill:{peak_prompt(settings.prefills)}"]


def value_of(spread: Spread, scale: float = 1.0, digits: int = 3) -> Value:
    """A figure in the form of results files."""
    middle, *span = (_short(one / scale, digits) for one in (spread.median, spread.min, spread.max))
    return middle if spread.rounds == 1 else [middle, *span]


def _short(value: float, digits: int) -> float:
    written = significant(value, digits)
    return float(written) if "." in written else int(written)


def _speed(report: Report, model: str) -> list[dict[str, Any]]:
    rows = []
    for engine, variant, _ in report.contenders(model):
        sizes: dict[str, dict[int, Point]] = {"prefill": {}, "decode": {}}
        for point in _points(report, model, engine, variant):
            kind, _, size = point.figure.partition(":")
            if kind in sizes:
                sizes[kind][int(size)] = point
        if not any(sizes.values()):
            continue
        settings = report.store.settings
        prompt = sizes["prefill"].get(peak_prompt(settings.prefills))
        first = sizes["decode"].get(min(settings.batches))
        rows.append(
            {
                "engine": engine,
                "variant": variant,
                **{
                    kind: {str(size): value_of(point.value) for size, point in sorted(found.items())}
                    for kind, found in sizes.items()
                },
                "peak": {prompt.limit: _percent(prompt)} if prompt and prompt.fraction else {},
                "reading": first and _percent(first),
            }
        )
    # Without any prefill, or without any decode, the table would lack these columns.
    return rows if all(any(row[kind] for row in rows) for kind in ("prefill", "decode")) else []


def _ratios(report: Report, model: str) -> list[dict[str, Any]]:
    """llmc's variants over each peer's of equal width. A GGUF file is compared with llama.cpp on the same file."""
    rows = []
    contenders = report.contenders(model)
    for own, variant, width in contenders:
        for peer, other, theirs in contenders:
            same_file = variant.removeprefix("gguf-") == other if variant.startswith("gguf-") else width == theirs
            if own != OWN or peer == OWN or not same_file:
                continue
            found = {}
            for figure in figures_compared(report.store.settings):
                sides = [report.points.get((model, *one, figure)) for one in ((own, variant), (peer, other))]
                pairs = report.rounds(*(side for side in sides if side)) if all(sides) else []
                if pairs:
                    found[figure] = value_of(Spread.of([ours / his for ours, his in pairs]))
            if found:
                rows.append({"variant": variant, "peer": [peer, other], "figures": found})
    return rows


def _columns(report: Report, model: str, columns: dict[str, str]) -> list[dict[str, Any]]:
    """A row for every contender with any of the figures. columns: figure by name of the column. Memory is in GiB."""
    rows = []
    for engine, variant, _ in report.contenders(model):
        points = {column: report.points.get((model, engine, variant, figure)) for column, figure in columns.items()}
        found = {
            column: value_of(point.value, 1 << 30 if column == "memory" else 1.0)
            for column, point in points.items()
            if point
        }
        if found:
            rows.append({"engine": engine, "variant": variant, **found})
    return rows


def _points(report: Report, model: str, engine: str, variant: str) -> list[Point]:
    return [point for name, point in report.points.items() if name[:3] == (model, engine, variant)]


def _command(report: Report, model: str) -> str:
    """The command that measures the same again, in one run even if there were several."""
    contenders = report.contenders(model)
    found = [point for name, point in report.points.items() if name[0] == model]
    kinds = {point.figure.partition(":")[0] for point in found}
    parts = [part for part in PARTS if kinds & KINDS[part]]
    words = ["--models", model, "--parts", ",".join(parts), "--rounds", str(max(p.value.rounds for p in found))]
    words += ["--engines", ",".join(dict.fromkeys(engine for engine, _, _ in contenders))]
    words += ["--variants", ",".join(f"{engine}/{variant}" for engine, variant, _ in contenders)]
    return f"python -m bench.peers {' '.join(words)}"


def _percent(point: Point) -> int | None:
    return round(100 * point.fraction.median) if point.fraction else None
