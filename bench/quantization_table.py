"""Size, quality and speed of every quantization scheme and method on trained models. Writes the table of the docs.

    python -m bench.quantization_table --work DIR --model tiny-english MODEL TRAINING.txt HELD-OUT.txt [--model …]
    python -m bench.quantization_table --work DIR --speed
    python -m bench.quantization_table --write

The first form measures the rows that docs/quantization.json lacks, one after another, and keeps artifacts in DIR. A row
takes a calibration, a compilation and an evaluation. With --speed all artifacts of DIR are measured: each round goes
through all rows, and the fastest counts. With --write the table is put into docs/quantization.md, which the other forms
do at their end, too. The embedding and the output projection are not quantized.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.compiler.calibration.driver import quantize_checkpoint
from llmc.compiler.calibration.request import DEFAULT_METHODS, CalibrationConfig, methods_of
from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import compile_model
from llmc.machine import machine_facts
from llmc.quantize import SCHEMES, QuantConfig
from llmc.quantize.formats.registry import format_of
from llmc.runtime.eval.divergence import divergence

DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS, PAGE = DOCS / "quantization.json", DOCS / "quantization.md"
BEGIN, END = "<!-- table of bench.quantization_table: begin -->", "<!-- table of bench.quantization_table: end -->"
BASE, REFERENCE = "none", "reference"
BUCKETS = "prefill=[1]x[128],decode=[1,32]x[288]"
WINDOW, TOKENS, SAMPLES, SAMPLE_TOKENS = 256, 8192, 48, 128
ROUNDS, STEPS, CONTEXT, PROMPT = 15, 32, 32, 128


@dataclass(frozen=True)
class Case:
    """A row of the table. group_size, asymmetric: None for the scheme's default."""

    scheme: str
    method: str
    group_size: int | None = None
    asymmetric: bool | None = None

    @property
    def name(self) -> str:
        parts = [self.scheme, self.method, self.group_size, "asymmetric" if self.asymmetric else None]
        return "-".join(str(part) for part in parts if part)


def cases() -> Iterator[Case]:
    """Rows of the table: the unquantized model, and every scheme with every method that rounds to it."""
    yield Case(BASE, "")
    for scheme in SCHEMES:
        grouped = scheme in DEFAULT_METHODS and SCHEMES[scheme].weight.is_regrouped
        for size, asymmetric in ((64, None), (64, True)) if grouped else ((None, None),):
            for method in methods_of(scheme):
                yield Case(scheme, method, size, asymmetric)


def artifact_of(case: Case, model: Path, text: str, work: Path) -> tuple[Path, Path]:
    """The artifact, and the model that it was compiled from."""
    source, quant = model, None
    if case.scheme in DEFAULT_METHODS:
        source = work / f"{case.name}.checkpoint"
        shutil.rmtree(source, ignore_errors=True)
        config = QuantConfig(case.scheme, case.group_size, case.asymmetric)
        quantize_checkpoint(
            CalibrationConfig(model, source, config, case.method, text, samples=SAMPLES, sample_tokens=SAMPLE_TOKENS)
        )
    elif case.scheme != BASE:
        quant = QuantConfig(case.scheme, skip=("lm_head",))
    return compiled(source, work / case.name, work, "bf16", quant), source


def compiled(model: Path, output: Path, work: Path, dtype: str, quant: QuantConfig | None = None) -> Path:
    compile_model(
        CompileConfig(
            model=model, output=output, buckets=BUCKETS, dtype=dtype, max_num_seqs=32, quant=quant,
            overwrite=True, jobs=1, cache_dir=work.parent / "cache",
        )
    )  # fmt: skip
    return output


def size_of(artifact: Path) -> dict[str, float]:
    """Bits per weight of the linear layers, scales included, and bytes of all weights."""
    bits = count = 0.0
    for name, weight in json.loads((artifact / "manifest.json").read_text())["weights"].items():
        if len(weight["shape"]) == 2 and name.startswith("layers."):
            n, k = weight["shape"]
            count += n * k
            bits += n * k * (format_of(weight["format"]).bits_per_weight(k) if "format" in weight else 16)
    return {"bits_per_weight": round(bits / count, 3), "bytes": (artifact / "weights.safetensors").stat().st_size}


def measure_quality(
    model: Path, training: str, held_out: str, work: Path, rows: dict[str, Any], save: Callable[[], None]
) -> None:
    reference = work / REFERENCE
    if not (reference / "manifest.json").is_file():
        compiled(model, reference, work, "f32")
    for case in cases():
        if case.name in rows and (work / case.name / "manifest.json").is_file():
            continue
        artifact, _ = artifact_of(case, model, training, work)
        found = divergence(artifact, reference, held_out, window=WINDOW, max_tokens=TOKENS, num_threads=1)
        rows[case.name] = {
            "scheme": case.scheme, "method": case.method, "group_size": case.group_size,
            "asymmetric": bool(case.asymmetric), **size_of(artifact), "perplexity": found.perplexity,
            "reference_perplexity": found.reference_perplexity, "kl": found.kl_mean,
            "kl_error": found.standard_error, "tokens": found.tokens,
        }  # fmt: skip
        print(f"{case.name:32} KL {found.kl_mean:.5f}  perplexity {found.perplexity:.3f}", flush=True)
        save()


def measure_speed(work: Path, rows: dict[str, Any]) -> None:
    """Sets tokens per second with one thread: the fastest round of each figure, over all rows with equal kernels."""
    from bench.figures import Bench
    from llmc.runtime.profile.steps import Step

    prompt = [Step(((0, PROMPT),))]
    decode = [Step(((CONTEXT + step, 1),)) for step in range(STEPS)]
    benches = {name: Bench(work / name, 1, 1) for name in rows}
    for _ in range(ROUNDS):
        for name, bench in benches.items():
            for figure, phase, steps in (
                ("prefill_tokens_per_s", "prefill", prompt),
                ("decode_tokens_per_s", "decode", decode),
            ):
                graph = bench.graph(phase, steps[-1])
                assert graph is not None
                rows[name][figure] = max(rows[name].get(figure, 0.0), round(bench.tokens_per_s(graph, steps), 1))


def share_speeds(rows: dict[str, Any]) -> None:
    """Gives all rows of one format the fastest figures of any: methods change weights, not kernels."""
    for figure in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        fastest: dict[Any, float] = {}
        for row in rows.values():
            key = row["scheme"], row["group_size"], row["asymmetric"]
            fastest[key] = max(fastest.get(key, 0.0), row[figure])
        for row in rows.values():
            row[figure] = fastest[row["scheme"], row["group_size"], row["asymmetric"]]


def table(results: dict[str, Any]) -> str:
    """Markdown with one table per model."""
    parts = []
    for name, found in results["models"].items():
        rows = found["rows"]
        base = rows[BASE]
        parts.append(
            f"**{name}**: {base['tokens']:,} tokens in windows of {results['window']}; perplexity of f32 "
            f"{base['reference_perplexity']:.3f}\n\n"
            "| scheme | method | bits a weight | weights, KiB | perplexity | KL, millinats | of `rtn`'s KL "
            "| decode 1, tok/s | prefill 128, tok/s |\n|---|---|---|---|---|---|---|---|---|\n"
        )
        parts.append("".join(_row(rows[case.name], rows) for case in cases() if case.name in rows) + "\n")
    if "speed" in results:
        how = results["speed"]
        parts.append(f"Speeds: {how['processor']}, the fastest of {ROUNDS} rounds, load {how['load']} meanwhile.\n")
    return "".join(parts)


def _row(row: dict[str, Any], rows: dict[str, Any]) -> str:
    scheme = "not quantized, bf16" if row["scheme"] == BASE else f"`{row['scheme']}`"
    scheme += ", asymmetric" if row["asymmetric"] else ""
    plain = (
        rows[Case(row["scheme"], "rtn", row["group_size"], row["asymmetric"] or None).name] if row["method"] else row
    )
    share = "" if row is plain else f"{row['kl'] / plain['kl']:.0%}"
    speeds = [f"{row[name]:,.0f}" for name in ("decode_tokens_per_s", "prefill_tokens_per_s") if name in row]
    method = row["method"] and f"`{row['method']}`"
    size = [f"{row['bits_per_weight']:.2f}", f"{row['bytes'] / 1024:,.0f}"]
    kl = f"{1000 * row['kl']:.2f} ± {1000 * row['kl_error']:.2f}"
    cells = [scheme, method, *size, f"{row['perplexity']:.3f}", kl, share, *(speeds or ["", ""])]
    return f"| {' | '.join(cells)} |\n"


def write_page(results: dict[str, Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(results)}{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where checkpoints and artifacts are kept")
    parser.add_argument("--model", nargs=4, action="append", default=[], metavar=("NAME", "MODEL", "TRAINING", "TEXT"))
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--write", action="store_true", help="only put the table into the page")
    given = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"window": WINDOW, "models": {}}

    def save() -> None:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    for name, model, training, text in given.model:
        rows = results["models"].setdefault(name, {"rows": {}})["rows"]
        work = given.work / name
        work.mkdir(parents=True, exist_ok=True)
        calibration, held_out = (Path(path).read_text(encoding="utf-8") for path in (training, text))
        measure_quality(Path(model), calibration, held_out, work, rows, save)
    if given.speed:
        for name, found in results["models"].items():
            measure_speed(given.work / name, found["rows"])
            share_speeds(found["rows"])
        results["speed"] = {
            "processor": machine_facts(1)["processor"],
            "threads": 1,
            "load": round(os.getloadavg()[1], 1),
        }
        save()
    write_page(results)


if __name__ == "__main__":
    main()
