"""Run by bench/gpu/run.sh: makes artifacts of bundles and random weights, checks them, and only then measures them."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.goals import REPLAY_HOST_US, TIMES_BASELINE, cells, table
from bench.gpu.random_model import write_random_model
from bench.gpu.time_limit import time_limit
from bench.gpu.whole_runs import generate, upload
from bench.limited import HungError, run_limited
from bench.shapes import SHAPES
from llmc.compiler.bundle_apply import apply_bundle
from llmc.compiler.store.bundle import read_bundle
from llmc.compiler.targets.gpu import wgmma
from llmc.runtime.binding import Artifact, Device, GraphInfo, Replayer
from llmc.runtime.binding.library import library_candidates

Logits = npt.NDArray[np.float32]
_BOUND = 4e-2  # largest error of bf16 against float32, as in the tests of kernels
_CHUNKS = (1, 8, 9, 33)
"""Tokens of chunks whose layers have other forms each, before one of many (`compiler/targets/gpu/linear_forms.py`)."""
_WAYS: dict[str, dict[str, Any]] = {"graphs": {}, "launches": {"eager": 1}, "some graphs": {"graph_mib": 2}}
_IN_TURN = "graphs in turn"
"""Of a target with +dependent: each kernel begins when the one before it has ended, to see what the option gains."""
_STREAMED, _IN_PLACE = "streamed", "read in place"
"""Half of the weights are on the host: copied ahead of kernels, or read by them over the bus."""


class Steps:
    """Runs steps of sequences, each with KV blocks of its own."""

    def __init__(self, artifact: Artifact, replayer: Replayer, num_seqs: int, length: int) -> None:
        self._size, self._replayer = artifact.info.block_size, replayer
        self._blocks = -(-length // self._size)
        order = np.random.default_rng(5).permutation(num_seqs * self._blocks) + 1
        self._tables = order.reshape(num_seqs, self._blocks).astype(np.int32)

    @staticmethod
    def blocks(artifact: Artifact, num_seqs: int, length: int) -> int:
        return num_seqs * -(-length // artifact.info.block_size)

    def run(self, graph: int, parts: Sequence[tuple[int, Sequence[int], int]]) -> Logits:
        """Logits of each part's last token. parts: (sequence, new tokens, position of the first)."""
        spans = [np.arange(start, start + len(tokens), dtype=np.int32) for _, tokens, start in parts]
        tables = self._tables[[seq for seq, _, _ in parts]]
        slots = [
            row[span // self._size] * self._size + span % self._size for row, span in zip(tables, spans, strict=True)
        ]
        ends = np.cumsum([len(span) for span in spans], dtype=np.int32)
        return self._replayer.run(
            graph,
            np.concatenate([np.asarray(tokens, np.int32) for _, tokens, _ in parts]),
            np.concatenate(spans),
            np.concatenate(slots).astype(np.int32),
            tables,
            np.asarray([span[-1] + 1 for span in spans], np.int32),
            np.concatenate(([0], ends)).astype(np.int32),
            ends - 1,
        )


def say(text: str) -> None:
    print(text, flush=True)


def check(name: str, passed: bool, what: str = "") -> None:
    """Ends the script if a check has failed: the speed of wrong results is not reported."""
    say(f"{'ok' if passed else 'FAILED'}  {name}{': ' if what else ''}{what}")
    if not passed:
        sys.exit(1)


def same(a: Logits, b: Logits) -> bool:
    return np.array_equal(a.view(np.int32), b.view(np.int32))


def ways_of(artifact: Artifact) -> dict[str, dict[str, Any]]:
    """Options of the device for each way to run an artifact."""
    dependent = "+dependent" in artifact.info.target_name
    half = {"offload_mib": max(1, artifact.info.rank_weight_bytes >> 21)}
    on_host = {_STREAMED: half, _IN_PLACE: {**half, "offload_ring_mib": 0}}
    return {**_WAYS, **on_host, **({_IN_TURN: {"dependent_launches": 0}} if dependent else {})}


def judge_conformance(program: Path, artifact: Path, library: list[str], limit_s: float) -> None:
    """limit_s: of all ways together, so that the child that hangs is known before its part has no time left."""
    with Artifact(artifact) as opened:
        ways = ways_of(opened)
    for name, options in ways.items():
        given = [*library, *(f"{key}={value}" for key, value in options.items())]
        try:
            done = run_limited("it", [program, "cuda", artifact, *given], limit_s / (len(ways) + 1))
            passed, said = done.returncode == 0, (done.stdout + done.stderr).strip()
        except HungError as error:
            passed, said = False, str(error)
        check(f"conformance, {name}", passed, said[:90] + " … " + said[-500:] if len(said) > 600 else said)


def largest(graphs: Sequence[GraphInfo], phase: str) -> int:
    """Index of a phase's graph with the most sequences, and among these the longest context."""
    return max(
        (i for i, graph in enumerate(graphs) if graph.phase == phase),
        key=lambda i: (graphs[i].max_seqs, graphs[i].max_blocks_per_seq, graphs[i].max_tokens),
    )


def judge_numbers(artifact: Artifact, tokens: list[int], expected: Logits | None) -> None:
    """Checks parity with torch where there is such a model, and that a request has the same bits however it runs."""
    graphs = artifact.graphs()
    prefill, decode = largest(graphs, "prefill"), largest(graphs, "decode")
    count = min(graphs[prefill].max_tokens - 1, len(tokens) - 4)
    found: list[list[Logits]] = []
    for options in ways_of(artifact).values():
        with Replayer(artifact, num_blocks=Steps.blocks(artifact, 4, len(tokens)), **options) as replayer:
            steps = Steps(artifact, replayer, 4, len(tokens))
            rows = [steps.run(prefill, [(0, tokens[:count], 0)])[0]]
            rows += [steps.run(decode, [(0, [tokens[at]], at)])[0] for at in range(count, count + 4)]
            # The same in chunks, and beside another sequence.
            half = count // 2
            steps.run(prefill, [(1, tokens[:half], 0)])
            pieces = [steps.run(prefill, [(1, tokens[half:count], half)])[0]]
            steps.run(prefill, [(2, tokens[3 : 3 + half], 0)])
            for at in range(count, count + 4):
                both = [(1, [tokens[at]], at)]
                if graphs[decode].max_seqs > 1:
                    both.insert(0, (2, [tokens[at + 3 - count]], half + at - count))
                pieces.append(steps.run(decode, both)[-1])
            found += [rows, pieces]
            if not options:  # the forms of layers depend on rows alone
                found.append([_in_chunks(steps, prefill, decode, tokens[:count]), *rows[1:]])
    if expected is not None:
        worst = max(
            float(np.abs(row - expected[count - 1 + i]).max() / np.abs(expected[count - 1 + i]).max())
            for i, row in enumerate(found[0])
        )
        check("parity with torch in float32", worst <= _BOUND, f"largest error {worst:.2e} of the largest logit")
    bits = all(same(np.array(found[0]), np.array(other)) for other in found[1:])
    check("bit-exactness", bits, "chunks of few rows and of many, company, graphs and launches, weights on the host")


def _in_chunks(steps: Steps, prefill: int, decode: int, tokens: Sequence[int]) -> Logits:
    """The last token's logits, by a step of decode behind chunks whose layers have other forms each."""
    at = 0
    for chunk in (*_CHUNKS, len(tokens)):
        end = min(at + chunk, len(tokens) - 1)
        if end > at:
            steps.run(prefill, [(3, tokens[at:end], at)])
        at = end
    logits: Logits = steps.run(decode, [(3, tokens[at:], at)])[0]
    return logits


def seconds_of(work: Callable[[], object], at_least_s: float) -> float:
    """Seconds of the fastest round, of at least one; rounds are repeated for `at_least_s` seconds."""
    work()
    best, end = float("inf"), time.perf_counter() + at_least_s
    while best == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def measure(
    artifact: Artifact,
    at_least_s: float,
    least_s: Callable[[Sequence[tuple[int, int]]], float],
    bus_bytes_s: float,
) -> list[dict[str, Any]]:
    """Of every bucket, by graphs, launches, graphs in turn, and graphs whose weights are on the host: seconds of a full
    step until its logits are on the host, and the host's microseconds for enqueueing its graph.

    least_s: of a step, by each sequence's (new tokens, position of the first). bus_bytes_s: what copies of pinned
    memory reach; of_bus is the fraction of it at which a step streams weights.
    """
    rows = []
    graphs, ways = artifact.graphs(), ways_of(artifact)
    size = artifact.info.block_size
    for name in ("graphs", "launches", _STREAMED, _IN_PLACE, *({_IN_TURN} & ways.keys())):
        length = max(graph.max_blocks_per_seq for graph in graphs) * size
        seqs = max(graph.max_seqs for graph in graphs)
        with Replayer(artifact, num_blocks=Steps.blocks(artifact, seqs, length), **ways[name]) as replayer:
            steps = Steps(artifact, replayer, seqs, length)
            for index, graph in enumerate(graphs):
                each = graph.max_tokens // graph.max_seqs or 1
                each = min(each, graph.max_blocks_per_seq * size)
                last = graph.max_blocks_per_seq * size - each if graph.phase == "decode" else 0
                parts = [(seq, [7] * each, last) for seq in range(min(graph.max_seqs, graph.max_tokens))]
                before = replayer.device_stats()
                step_s = seconds_of(partial(steps.run, index, parts), at_least_s)
                after = replayer.device_stats()
                host_us = mean_host_us(before, after)
                of_bus = streamed_bytes(before, after) / step_s / bus_bytes_s
                bucket = bucket_of(graph)
                tokens_s, of_limit = each * len(parts) / step_s, least_s([(each, last)] * len(parts)) / step_s
                rows.append(
                    {"bucket": bucket, "by": name, "step_s": step_s, "tokens_s": tokens_s, "of_limit": of_limit,
                     "host_us": host_us, "of_bus": of_bus}
                )  # fmt: skip
                took = f"{1e3 * step_s:9.3f} ms  {tokens_s:10.0f} tokens/s"
                share = f"{100 * of_limit:5.1f} % of the limit"
                bus = f"  {100 * of_bus:5.1f} % of the bus" if of_bus else ""
                say(f"    {bucket:18} {name:14} {took}  {share}  {host_us:7.1f} us of the host{bus}")
    return rows


def _steps(stats: dict[str, int]) -> int:
    return stats["replayed_steps"] + stats["launched_steps"]


def streamed_bytes(before: dict[str, int], after: dict[str, int]) -> float:
    """Bytes of weights that a step between two readings of a device's statistics has copied from the host."""
    return (after["streamed_weight_bytes"] - before["streamed_weight_bytes"]) / (_steps(after) - _steps(before))


def mean_host_us(before: dict[str, int], after: dict[str, int]) -> float:
    """Of a step between two readings of a device's statistics: what the host spends on a replay, or on launches."""
    spent, steps = (
        sum(after[name] - before[name] for name in names)
        for names in (("replay_host_ns", "launch_host_ns"), ("replayed_steps", "launched_steps"))
    )
    return spent / steps / 1e3


class Report:
    """What was found so far, kept in a file: a run that was cut off goes on where it ended. limit_s: of each part."""

    def __init__(self, path: Path, key: dict[str, Any], limit_s: float = 3600.0) -> None:
        self._path, self._limit_s = path, limit_s
        known = json.loads(path.read_text()) if path.is_file() else {}
        self.found: dict[str, Any] = known if known.get("key") == key else {"key": key}

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        """What a part found, now or in an earlier run of the same files on the same device."""
        if name in self.found:
            say(f"    {name}: as found before")
        else:
            with time_limit(name, self._limit_s, partial(self._hung, name)):
                self.found[name] = make()
            if name in self.hung:
                self.found["hung"].remove(name)
            self.save()
        return self.found[name]

    @property
    def hung(self) -> list[str]:
        """Parts that hung in earlier runs, and have not ended in one since."""
        return list(self.found.get("hung", ()))

    def _hung(self, name: str) -> None:
        found = {**self.found, "hung": sorted({*self.hung, name})}
        self._path.write_text(json.dumps(found, indent=2) + "\n")

    def save(self) -> None:
        self._path.write_text(json.dumps(self.found, indent=2) + "\n")


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Bench:
    """The parts of a run. given: the command's arguments."""

    def __init__(self, given: argparse.Namespace, shape: dict[str, Any], report: Report) -> None:
        self._given, self._shape, self._report = given, shape, report
        self._model = given.work / f"model-{Path(given.shape).stem}"

    def packed(self, bundle: Path) -> Path:
        """The artifact of a bundle and random weights."""
        out: Path = self._given.work / bundle.stem
        read = read_bundle(bundle)
        target = next(v.resolved.target.name for v in read.variants if v.resolved.target.kind == "cuda")
        if not (self._model / "config.json").is_file():
            write_random_model(self._shape, self._model)
        apply_bundle(read, self._model, out, target=target, tokenizer="none", overwrite=True)
        return out

    def check(self, bundle: Path, artifact: Path) -> None:
        library = [f"library={path}"] if (path := os.environ.get("LLMC_CUDA_LIBRARY")) else []
        self._report.part(
            f"conformance of {bundle.name}",
            lambda: judge_conformance(self._given.conformance, artifact, library, self._given.limit_s),
        )
        self._report.part(self._numbers_of(bundle), lambda: self._numbers(artifact))

    @staticmethod
    def _numbers_of(bundle: Path) -> str:
        return f"numbers of {bundle.name}"

    def passes(self, bundle: Path, path: Path) -> bool:
        """Whether a bundle behind the first one passes its checks, if its target uses wgmma, which a GPU has to allow.

        Any other bundle that does not pass ends the script: also one of kernels that begin early, whose bits are
        promised. The report has the targets that were refused.
        """
        with Artifact(path) as artifact:
            target = artifact.info.target_name
        may_fail = bool(set(wgmma.WAYS).intersection(target.split("+"))) and bundle != self._given.bundles[0]
        try:
            if may_fail and self._numbers_of(bundle) in self._report.hung:
                check(self._numbers_of(bundle), passed=False, what="they hung in an earlier run")
            self.check(bundle, path)
        except SystemExit:
            if not may_fail:
                raise
            self._report.found[f"refused {bundle.name}"] = target
            self._report.save()
            say(f"    {bundle.name} is not measured: {target} is not for this GPU")
            return False
        self._report.found.pop(f"refused {bundle.name}", None)  # of an earlier run
        return True

    def _numbers(self, path: Path) -> None:
        import torch

        from bench.gpu.torch_model import TorchModel, read_weights

        with Artifact(path) as artifact:
            length = min(200, artifact.info.max_model_len)
            tokens = [int(t) for t in np.random.default_rng(3).integers(3, artifact.info.vocab_size, length)]
            expected = None
            if not quantized(path):
                weights = read_weights(self._shape, self._model, self._given.torch_device, torch.float32)
                expected = TorchModel(self._shape, weights).logits(tokens).cpu().numpy()
            judge_numbers(artifact, tokens, expected)

    def limits(self) -> dict[str, float]:
        from bench.gpu.step_limits import measured_limits

        found = measured_limits(self._given.torch_device, partial(seconds_of, at_least_s=self._given.seconds))
        copies = f"copies {found.bytes_s / 1e9:.1f} GB/s, of pinned memory {found.upload_bytes_s / 1e9:.1f} GB/s"
        say(f"    limits: {copies}, products of bf16 {found.flops / 1e12:.2f} TFLOP/s")
        return asdict(found)

    def upload(self, path: Path) -> dict[str, float]:
        found = upload(path, self._report.found["limits"]["upload_bytes_s"])
        share = f"{100 * found['of_copies']:.0f} % of copies of pinned memory"
        say(f"    {path.name}: weights reach the GPU at {found['bytes_s'] / 1e9:.1f} GB/s, {share}")
        return found

    def generate(self, path: Path) -> dict[str, Any]:
        found = generate(path, self._given.tokens)
        check(f"LLM.generate of {path.name}", found["same"], "the same tokens twice")
        batch = f"{found['sequences']} prompts of {found['prompt_tokens']} tokens"
        say(f"    {path.name}: LLM.generate of {batch}: {found['tokens_s']:.0f} tokens/s")
        return found

    def buckets(self, path: Path) -> list[dict[str, Any]]:
        from bench.gpu.step_limits import Limits, Model

        with Artifact(path) as artifact:
            info, limits = artifact.info, Limits(**self._report.found["limits"])
            needs = Model.of(self._shape, info.weight_bytes, info.kv_block_bytes // info.block_size)
            return measure(artifact, self._given.seconds, partial(needs.least_s, limits), limits.upload_bytes_s)

    def baseline(self, path: Path) -> dict[str, Any]:
        """Seconds of a step of each judged bucket."""
        from bench.gpu.baseline import baseline

        with Artifact(path) as artifact:
            graphs, size = artifact.graphs(), artifact.info.block_size
        other = baseline(self._shape, self._model, self._given.torch_device, compiled=self._given.compiled)
        found: dict[str, Any] = {"name": other.name}
        for cell in cells(graphs):
            graph = graphs[cell.graph]
            if bucket_of(graph) in found:
                continue
            new = 1 if graph.phase == "decode" else graph.max_tokens // graph.max_seqs
            context = max(graph.max_blocks_per_seq * size, new)
            found[bucket_of(graph)] = took = seconds_of(other.step(graph.max_seqs, new, context), self._given.seconds)
            say(f"    {bucket_of(graph):18} {other.name}: {1e3 * took:.3f} ms")
        return found

    def judged(self, bundle: Path, path: Path) -> list[dict[str, Any]]:
        baseline, rows = self._report.found["baseline"], self._report.found[f"buckets of {bundle.name}"]
        with Artifact(path) as artifact:
            graphs, found = artifact.graphs(), []
        for cell in cells(graphs):
            bucket = bucket_of(graphs[cell.graph])
            row = next(row for row in rows if (row["bucket"], row["by"]) == (bucket, "graphs"))
            goal = cell.quantized if quantized(path) else cell.floats
            times = baseline[bucket] / row["step_s"] if bucket in baseline else None
            reached = (
                row["of_limit"] >= goal
                and row["host_us"] <= REPLAY_HOST_US
                and (times is None or times >= TIMES_BASELINE)
            )
            found.append(
                {"artifact": bundle.stem, "cell": cell.name, "bucket": bucket, "of_limit": row["of_limit"],
                 "goal": goal, "host_us": row["host_us"], "times_baseline": times, "reached": reached}
            )  # fmt: skip
        return found


def bucket_of(graph: GraphInfo) -> str:
    return f"{graph.phase}:{graph.batch}x{graph.seq}"


def quantized(artifact: Path) -> bool:
    """Whether linear weights are integers: torch then has no such model to compare numbers with."""
    kernels = json.loads((artifact / "manifest.json").read_text())["kernels"]
    return any(kernel["op"].endswith("linear_quant") for kernel in kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", type=Path, nargs="+", help="of one shape, such as bf16, w4a16 and w8a8")
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="of bench/shapes.py, or a file of JSON")
    parser.add_argument("--work", type=Path, default=Path("out/gpu"))
    parser.add_argument("--conformance", type=Path, required=True, help="the program device_conformance")
    parser.add_argument("--torch-device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--tokens", type=int, default=128, help="of each output of LLM.generate")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds after which a part counts as hung")
    parser.add_argument("--no-compiled", dest="compiled", action="store_false", help="a baseline without torch.compile")
    given = parser.parse_args()
    shape = json.loads(Path(given.shape).read_text()) if given.shape.endswith(".json") else SHAPES[given.shape]

    with Device("cuda") as device:
        facts = device.facts
    for name, value in facts.items():
        say(f"    {name:20} {value}")
    given.work.mkdir(parents=True, exist_ok=True)
    key = {
        "shape": given.shape,
        "bundles": {bundle.name: digest_of(bundle) for bundle in given.bundles},
        "device": str(facts["device"]),
        "library": digest_of(next(path for path in library_candidates() if path.is_file())),
        "conformance": digest_of(given.conformance),
        "torch_device": given.torch_device,
        "seconds": given.seconds,
        "tokens": given.tokens,
        "compiled": given.compiled,
    }
    report = Report(given.work / "report.json", key, given.limit_s)
    report.found["device"] = facts
    bench = Bench(given, shape, report)
    artifacts = {bundle: bench.packed(bundle) for bundle in given.bundles}
    artifacts = {bundle: artifact for bundle, artifact in artifacts.items() if bench.passes(bundle, artifact)}
    report.part("limits", bench.limits)
    for bundle, artifact in artifacts.items():
        report.part(f"upload of {bundle.name}", partial(bench.upload, artifact))
        report.part(f"buckets of {bundle.name}", partial(bench.buckets, artifact))
        report.part(f"generation of {bundle.name}", partial(bench.generate, artifact))
    report.part("baseline", partial(bench.baseline, artifacts[given.bundles[0]]))
    report.found["cells"] = [row for bundle, artifact in artifacts.items() for row in bench.judged(bundle, artifact)]
    report.save()
    for line in table(report.found["cells"]):
        say(line)
    say(f"    {given.work / 'report.json'}")


if __name__ == "__main__":
    main()
