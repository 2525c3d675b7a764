"""Prefill, decode, start and overhead of one artifact, with the machine's limits measured right before and after.

    python -m bench.bench_model ARTIFACT [--threads N] [--repeat 5] [--compile MODEL] [--json | --markdown]
    python -m bench.bench_model LONG --prefill 512 8192 --decode 1:32768 --only speed

Every round measures each figure once, between two probes of the limit that binds it. A fraction is the figure over the
mean of its two probes. Medians and ranges over the rounds are printed. docs/performance.md explains the counters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import processes
from bench.figures import UNITS, Bench, Figure, run_rounds, speed_figures, spread
from llmc.runtime.binding.library import library_candidates

ROOT = Path(__file__).resolve().parent.parent
PREFILLS = (128, 512, 2048)
DECODES = ((1, 128), (8, 128))
DECODE_STEPS = 16
OVERHEAD_PROMPT = 128
PROMPT = list(range(2, 18))
LLMC = [sys.executable, "-P", "-c", "import sys; from llmc.cli.main import main; sys.exit(main())"]


def build_embed(folder: Path) -> Path | None:
    """examples/embed.c linked with the installed library; None without a C compiler."""
    library = next(path for path in library_candidates() if path.is_file())
    program = folder / "embed"
    command: list[str | Path] = ["cc", "-O2", "-I", ROOT / "runtime/native/include", ROOT / "examples/embed.c", library]
    try:
        subprocess.run([*command, f"-Wl,-rpath,{library.parent}", "-o", program], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return program


def start_figures(artifact: Path, rounds: int) -> list[Figure]:
    """First token of a fresh process, page cache warm: `llmc run` and the C example."""
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        prompts.write_text(json.dumps({"prompt_token_ids": PROMPT}) + "\n")
        options: list[str | Path] = [
            "--prompts",
            prompts,
            "--max-tokens",
            "1",
            "--temperature",
            "0",
            "--ignore-eos",
            "--quiet",
            "--json",
        ]
        commands: dict[str, list[str | Path]] = {"llmc run": [*LLMC, "run", artifact, *options]}
        embed = build_embed(folder)
        if embed is not None:
            commands["embed.c"] = [embed, artifact, "1", *map(str, PROMPT)]
        for title, command in commands.items():
            time, memory = Figure(f"first token, {title}", "s"), Figure(f"peak memory, {title}", "GiB")
            processes.run(command)
            for _ in range(rounds):
                finished = processes.run(command)
                time.values.append(finished.seconds)
                memory.values.append(finished.peak_bytes / (1 << 30))
            found += [time, memory]
    return found


def overhead_figures(bench: Bench, rounds: int) -> list[Figure]:
    """Shares of a decode step's time at batch 1, through the engine."""
    names = {"kernels": "in kernels", "barrier": "at barriers", "overhead": "overhead"}
    found = {name: Figure(f"decode batch 1, {title}", "% of step") for name, title in names.items()}
    for _ in range(rounds):
        shares = bench.decode_overhead(OVERHEAD_PROMPT, 2 * DECODE_STEPS)
        for name, figure in found.items():
            figure.values.append(100 * shares[name])
    return list(found.values())


def compile_figures(model: Path, buckets: str, added: str) -> list[Figure]:
    """Wall time and peak memory of compiling: cold, warm into the same and a fresh output, one bucket added."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = (
            ("cold", "a", buckets),
            ("warm, same output", "a", buckets),
            ("warm, fresh output", "b", buckets),
            ("one bucket added", "b", added),
        )
        for title, output, ladder in plan:
            command: list[str | Path] = [*LLMC, "compile", model, "-o", folder / output, "--buckets", ladder]
            command += ["--cache-dir", folder / "c", "--overwrite"]
            finished = processes.run(command)
            found.append(Figure(f"compile, {title}", "s", values=[finished.seconds]))
            found.append(Figure(f"peak memory, compile {title}", "GiB", values=[finished.peak_bytes / (1 << 30)]))
    return found


def rows(figures: list[Figure]) -> list[tuple[str, str, str, str]]:
    """(figure, value with range, limit, fractions with ranges) as text."""
    found = []
    for figure in figures:
        value = spread(figure.values)
        limit, shares = "", ""
        if figure.limits and figure.limit:
            scale, unit = UNITS[figure.limit]
            low, high = min(figure.limits) / scale, max(figure.limits) / scale
            limit = f"{figure.limit} {low:.3g}–{high:.3g} {unit}"
            parts = {way: spread(values) for way, values in figure.fractions().items()}
            shares = ", ".join(f"{p['median']:.0%} ({p['min']:.0%}–{p['max']:.0%}) {way}" for way, p in parts.items())
        text = f"{value['median']:.4g} {figure.unit} ({value['min']:.4g}–{value['max']:.4g})"
        found.append((figure.name, text, limit, shares))
    return found


def decode(text: str) -> tuple[int, int]:
    """Parses BATCH:CONTEXT."""
    batch, _, context = text.partition(":")
    return int(batch), int(context)


HEADS = ("figure", "median (range)", "limit beside it", "fraction, median (range)")


def print_table(figures: list[Figure], markdown: bool) -> None:
    """Prints aligned columns, or a Markdown table."""
    table = [HEADS, *rows(figures)]
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in table]
        lines.insert(1, "|" + "---|" * len(HEADS))
        print("\n".join(lines))
        return
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADS))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=5, help="rounds")
    parser.add_argument("--prefill", type=int, nargs="*", default=PREFILLS, metavar="TOKENS", help="prompts")
    parser.add_argument("--decode", type=decode, nargs="*", default=DECODES, metavar="BATCH:CONTEXT",
                        help="sequences, and the tokens that each has before: 1:128 8:128")  # fmt: skip
    parser.add_argument("--only", choices=("speed",), help="neither overhead nor the start of processes")
    parser.add_argument("--compile", type=Path, metavar="MODEL", help="also time compiling this model directory")
    parser.add_argument("--buckets", default="prefill=[1]x[128,512,2048],decode=[1,8]x[512,2048]", help="for --compile")
    parser.add_argument("--added", default="prefill=[1]x[128,512,1024,2048],decode=[1,8]x[512,2048]",
                        help="for --compile: --buckets and one more")  # fmt: skip
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(arguments.artifact, arguments.threads, max((batch for batch, _ in arguments.decode), default=1))
    speed = speed_figures(bench, arguments.prefill, arguments.decode, DECODE_STEPS)
    run_rounds(bench, speed, arguments.repeat)
    figures = [figure for figure, _ in speed]
    if arguments.only is None:
        figures += overhead_figures(bench, arguments.repeat)
        figures += start_figures(arguments.artifact, arguments.repeat)
    if arguments.compile is not None:
        figures += compile_figures(arguments.compile, arguments.buckets, arguments.added)
    if arguments.json:
        report: dict[str, Any] = {
            "target": bench.manifest.get("target"),
            "threads": arguments.threads,
            "figures": [figure.as_dict() for figure in figures],
        }
        print(json.dumps(report, indent=1))
        return
    print_table(figures, arguments.markdown)


if __name__ == "__main__":
    main()
