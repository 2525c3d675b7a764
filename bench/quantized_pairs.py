"""Speed of pairs of quantized models: act-order and plain groups, int8 and bf16 KV caches.

    python -m bench.quantized_pairs prepare out/pairs
    python -m bench.quantized_pairs measure out/pairs [--rounds 15] [--threads 2] [--output FILE]

`prepare` writes models with random weights of the 0.5-billion shape and compiles them. `measure` replays their graphs:
the two of a pair take turns, in changing order, and ratios are within a round. It takes up to 8 minutes and 14 GiB.

A long context is 16 sequences of 32,768 tokens with blocks of their own. One token of each block is written beforehand:
otherwise all pages would be the one zero page. The values in the cache do not matter.

`measure` writes a file in the form of bench/results; without --output it prints it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch

from bench import make_model
from bench.peers.results import FORMAT
from bench.shapes import SHAPES
from llmc.cli.main import main as llmc
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.graphs_file import read_graphs
from llmc.runtime.profile.steps import Step

SHAPE = "qwen2.5-0.5b"
GROUP, BITS = 128, 4
LONG, SHORT, MANY = 32768, 512, 16
_TURN_NS = 150_000_000
_WARM_UPS = 2


@dataclass(frozen=True)
class Figure:
    """A figure to measure of a pair. graph: a bucket as in SPEC of --buckets. sequences, tokens: the step's load.

    Of a decode, all but one token of each sequence are in the cache; of a prefill, none.
    """

    name: str
    graph: str
    sequences: int
    tokens: int
    prefill: bool = False

    def step(self) -> Step:
        one = (0, self.tokens) if self.prefill else (self.tokens - 1, 1)
        return Step((one,) * self.sequences)


@dataclass(frozen=True)
class Pair:
    """Two artifacts to compare, by their names in the folder."""

    name: str
    first: str
    second: str
    figures: tuple[Figure, ...]


DECODE = Figure("decode, 1 sequence of 128", f"decode:1x{SHORT}", 1, 128)
DECODE_MANY = Figure("decode, 16 sequences of 512", f"decode:{MANY}x{SHORT}", MANY, SHORT)
PREFILL = Figure("prefill, 512 tokens", "prefill:1x512", 1, 512, prefill=True)
DECODE_LONG = Figure("decode, 16 sequences of 32768", f"decode:{MANY}x{LONG}", MANY, LONG)
PAIRS = (
    Pair("act-order beside plain groups", "w4-plain", "w4-act-order", (DECODE, DECODE_MANY, PREFILL)),
    Pair("int8 beside bf16 KV", "kv-bf16", "kv-int8", (DECODE, DECODE_MANY, PREFILL, DECODE_LONG)),
)
BUCKETS = {
    "w4": f"prefill=1x512,decode=[1,{MANY}]x{SHORT}",
    "kv": f"prefill=1x512,decode=[1,{MANY}]x[{SHORT},{LONG}]",
}


# ---- models ----------------------------------------------------------------------------------------------------------


def rounded(name: str, rows: int, columns: int, *, act_order: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a random matrix [rows, columns] in GPTQ's format. Matrices with the same input share an order."""
    generator = torch.Generator().manual_seed(rows * columns)
    groups = -(-columns // GROUP)
    numbers = torch.randint(-(1 << 31), 1 << 31, (columns * BITS // 32, rows), generator=generator)
    yield f"{name}.qweight", numbers.to(torch.int32)
    yield f"{name}.qzeros", torch.full((groups, rows * BITS // 32), 0x77777777, dtype=torch.int32)
    yield f"{name}.scales", (torch.rand((groups, rows), generator=generator) * 0.004 + 0.002).to(torch.float16)
    order = (
        torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        if act_order
        else torch.arange(columns)
    )
    yield f"{name}.g_idx", (order // GROUP).to(torch.int32)


def write_rounded(output: Path, *, act_order: bool) -> None:
    """Writes a model of SHAPE whose layers have 4-bit matrices."""
    make_model.write(SHAPE, output)
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in make_model.tensors(SHAPES[SHAPE], 0):
            if ".layers." in name and tensor.ndim == 2:
                yield from rounded(name.removesuffix(".weight"), *tensor.shape, act_order=act_order)
            else:
                yield name, tensor

    make_model.save(tensors(), output, None)
    config["quantization_config"] = {
        "quant_method": "gptq", "bits": BITS, "group_size": GROUP, "sym": True, "desc_act": act_order,
    }  # fmt: skip
    (output / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def prepare(folder: Path) -> None:
    """Writes and compiles the models that are missing."""
    models = folder / "models"
    for name, options in {
        "w4-plain": [], "w4-act-order": [], "kv-bf16": ["--kv-dtype", "bf16"], "kv-int8": ["--kv-dtype", "int8"],
    }.items():  # fmt: skip
        kind = name.partition("-")[0]
        model = models / (name if kind == "w4" else "bf16")
        if not (model / "config.json").exists() or (kind == "w4" and not _is_rounded(model)):
            write_rounded(model, act_order=name == "w4-act-order") if kind == "w4" else make_model.write(SHAPE, model)
        if not (folder / name / "manifest.json").exists():
            longest = str(SHORT if kind == "w4" else LONG)
            given = ["compile", str(model), "-o", str(folder / name), "--buckets", BUCKETS[kind], "--dtype", "bf16"]
            llmc([*given, "--max-model-len", longest, "--max-num-batched-tokens", "512", *options])


def _is_rounded(model: Path) -> bool:
    return "quantization_config" in json.loads((model / "config.json").read_text(encoding="utf-8"))


# ---- steps -----------------------------------------------------------------------------------------------------------


class Side:
    """One artifact of a pair, with a KV pool large enough for all figures."""

    def __init__(self, folder: Path, figures: tuple[Figure, ...], threads: int) -> None:
        self._tables = read_graphs(folder)
        self._model = self._tables.model
        self._graphs = {graph.name: index for index, graph in enumerate(self._tables.graphs)}
        blocks = 1 + max(figure.step().num_blocks(self._model.block_size) for figure in figures)
        self._replayer = Replayer(Artifact(folder), threads, blocks, weight_memory="copied")
        self._touch(blocks)

    def _touch(self, blocks: int) -> None:
        """Writes a key and a value into each block: pages never written are all the one zero page."""
        at_once = 512
        graph, width = self._graphs[PREFILL.graph], -(-at_once // self._model.block_size)
        positions, table = np.arange(at_once), np.zeros((1, width), np.int32)
        for first in range(0, blocks, at_once):
            slots = np.minimum(first + positions, blocks - 1) * self._model.block_size
            ends = np.array([0, at_once])
            self._replayer.run(graph, positions, positions, slots, table, ends[1:], ends, ends[1:] - 1)

    def time(self, figure: Figure) -> float:
        """Mean seconds of some steps, without the work around them."""
        graph, step = self._graphs[figure.graph], figure.step()
        begin = self._replayer.stats
        while (now := self._replayer.stats).total_ns - begin.total_ns < _TURN_NS:
            step.run(self._replayer, graph, self._model.block_size, self._model.vocab_size)
        return (now.total_ns - begin.total_ns) / (now.num_replays - begin.num_replays) / 1e9

    def close(self) -> None:
        self._replayer.close()


def measure(folder: Path, pair: Pair, rounds: int, threads: int) -> list[dict[str, object]]:
    """One row per figure: milliseconds of both, and the speed of the second relative to the first. Each is (median,
    least, most)."""
    sides = [Side(folder / name, pair.figures, threads) for name in (pair.first, pair.second)]
    rows: list[dict[str, object]] = []
    for figure in pair.figures:
        for side in sides:
            for _ in range(_WARM_UPS):
                side.time(figure)
        times: list[tuple[float, float]] = []
        for turn in range(rounds):
            found = {i: sides[i].time(figure) for i in ((0, 1) if turn % 2 else (1, 0))}
            times.append((found[0], found[1]))
        columns = [
            [1e3 * first for first, _ in times],
            [1e3 * second for _, second in times],
            [a / b for a, b in times],
        ]
        values = [_spread(column, digits) for column, digits in zip(columns, (2, 2, 3), strict=True)]
        rows.append({"name": figure.name, "values": values})
        print(f"{pair.name}: {figure.name}: {values}", flush=True)
    for side in sides:
        side.close()
    return rows


def _spread(values: list[float], digits: int) -> list[float]:
    return [round(value, digits) for value in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("prepare", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--machine", default="", help="what the file says of the machine")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.action == "prepare":
        prepare(given.folder)
        return
    tables = {
        pair.first.partition("-")[0]: {
            "heads": [pair.name, f"{pair.first}, ms", f"{pair.second}, ms", "times as fast"],
            "rows": measure(given.folder, pair, given.rounds, given.threads),
        }
        for pair in PAIRS
    }
    document = {
        "format": FORMAT,
        "title": f"quantized layers and KV caches of {SHAPE}",
        "machine": given.machine or f"{given.threads} threads",
        "date": date.today().isoformat(),
        "commands": [f"python -m bench.quantized_pairs measure {given.folder} --rounds {given.rounds}"],
        "tables": tables,
    }
    text = json.dumps(document, indent=1) + "\n"
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
