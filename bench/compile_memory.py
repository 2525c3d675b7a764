"""Memory that `llmc compile` takes, against the size of a checkpoint's largest shard.

    python -m bench.compile_memory FOLDER [--case CASE]

For each case a checkpoint of random weights is made in FOLDER, compiled into an empty cache, and deleted. Memory is the
PSS of the compiler and its processes, sampled at 20 Hz:

- `before`: most anonymous memory before weights are packed, with that of the processes that compile kernels.
- `weights`: most anonymous memory from then on; `added`: how much more that is than when packing began.
- `read`: how many more pages of files are mapped meanwhile. They are the checkpoint's.

The last line is the anonymous memory of a process that has only imported torch, TVM and transformers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench import make_model
from bench.processes import SAMPLES_PER_S, Memory, tree_memory
from bench.shapes import named

_IMPORTS = (
    "import torch, transformers, sys; from llmc.tvm_import import import_tvm; import_tvm(); "
    "print(flush=True); sys.stdin.read()"
)
_LLMC = Path(sys.executable).with_name("llmc")
_RANK = 64


@dataclass(frozen=True)
class Case:
    """A checkpoint of a shape, cut to some layers, in shards of at least shard_mib; and how it is compiled.

    options: for a folder of the case, and the checkpoint in it. Returns what follows `llmc compile`.
    """

    shape: str
    layers: int
    shard_mib: int
    options: Callable[[Path, Path], Sequence[str | Path]]


def _plain(_: Path, model: Path) -> Sequence[str | Path]:
    return (model,)


def _rounded(_: Path, model: Path) -> Sequence[str | Path]:
    return (model, "--quant", "w4a16")


def _merged(folder: Path, model: Path) -> Sequence[str | Path]:
    """With an adapter of bf16 for every matrix of every layer."""
    adapter, shape = folder / "adapter", json.loads((model / "config.json").read_text())
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {}
    for name, size in named(shape):
        if "_proj." in name and len(size) == 2:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(_RANK, size[1]).to(torch.bfloat16)
            tensors[f"{module}.lora_B.weight"] = torch.randn(size[0], _RANK).to(torch.bfloat16)
    save_file(tensors, adapter / "adapter_model.safetensors")
    return (model, "--merge-lora", adapter)


def _gguf(folder: Path, model: Path) -> Sequence[str | Path]:
    """As a file of 4-bit numbers."""
    file = folder / "model.gguf"
    command: list[str | Path] = [
        _LLMC,
        "quantize",
        model,
        "-o",
        file,
        "--format",
        "gguf",
        "--scheme",
        "w4a16",
        "--method",
        "rtn",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(model)
    return (file,)


CASES = {
    "dense": Case("llama-3.2-1b", 16, 512, _plain),
    "dense, w4a16": Case("llama-3.2-1b", 16, 512, _rounded),
    "dense, an adapter merged": Case("llama-3.2-1b", 16, 512, _merged),
    "experts, a tensor each": Case("qwen3-moe-4b", 2, 512, _plain),
    "experts, stacked": Case("gpt-oss-3b", 1, 512, _plain),
    "GGUF": Case("qwen2.5-0.5b", 24, 512, _gguf),
}


@dataclass(frozen=True)
class Measured:
    """Bytes of a compilation. shard: the largest file of weights. begin, before, weights: memory when packing begins,
    and most of each kind before and from then on."""

    shard: int
    artifact: int
    begin: Memory
    before: Memory
    weights: Memory


def _most(samples: Sequence[Memory]) -> Memory:
    kinds = ("anonymous", "mapped", "resident_files")
    return Memory(*(max(getattr(one, kind) for one in samples) for kind in kinds))


def imports() -> Memory:
    """Memory of a process that has imported what the compiler does."""
    command = [sys.executable, "-c", _IMPORTS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return tree_memory(process.pid)


def _sampled(command: Sequence[str | Path], report: Path) -> tuple[dict[str, Any], list[tuple[float, Memory]]]:
    """Runs `llmc compile` to its end: (its report, samples with the seconds since its start)."""
    samples: list[tuple[float, Memory]] = []
    with report.open("wb") as out:
        begin = time.monotonic()
        process = subprocess.Popen(list(map(str, command)), stdout=out)
        while process.poll() is None:
            samples.append((time.monotonic() - begin, tree_memory(process.pid)))
            time.sleep(1 / SAMPLES_PER_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed with {process.returncode}")
    found: dict[str, Any] = json.loads(report.read_bytes())
    return found, samples


def measure(case: Case, folder: Path) -> Measured:
    """Makes, compiles and deletes a case in a new folder."""
    folder.mkdir(parents=True)
    try:
        model, output = folder / "model", folder / "out.llmc"
        make_model.write(case.shape, model, shard_bytes=case.shard_mib << 20, layers=case.layers)
        options = case.options(folder, model)
        command = [_LLMC, "compile", *options, "-o", output, "--cache-dir", folder / "cache", "--json"]
        report, samples = _sampled([*command, "--max-model-len", "2048"], folder / "report.json")
        source = Path(options[0])
        shards = source.glob("*.safetensors") if source.is_dir() else [source]
        phases = report["phase_seconds"]
        begin = sum(phases[phase] for phase in itertools.takewhile(lambda phase: phase != "weights", phases))
        before = [memory for at, memory in samples if at < begin]
        after = [memory for at, memory in samples if at >= begin]
        return Measured(
            max(file.stat().st_size for file in shards),
            sum(file.stat().st_size for file in output.iterdir()),
            after[0], _most(before), _most(after),
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on a disk with 6 GB of room")
    parser.add_argument("--case", choices=CASES, help="this one alone")
    args = parser.parse_args()
    print(f"{'MiB':28} {'shard':>6} {'artifact':>9} {'before':>7} {'weights':>8} {'added':>6} {'read':>5}")
    for name in [args.case] if args.case else CASES:
        found = measure(CASES[name], args.folder / "compile-memory")
        begin, weights = found.begin, found.weights
        figures = (
            (6, found.shard), (9, found.artifact), (7, found.before.anonymous), (8, weights.anonymous),
            (6, weights.anonymous - begin.anonymous), (5, weights.resident_files - begin.resident_files),
        )  # fmt: skip
        print(f"{name:28} {' '.join(f'{value >> 20:{width}}' for width, value in figures)}", flush=True)
    print(f"{'imports':28} {imports().anonymous >> 20:24}")


if __name__ == "__main__":
    main()
