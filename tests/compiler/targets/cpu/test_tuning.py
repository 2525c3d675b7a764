"""Schedules that are measured: they change no bit, the search takes only what is faster twice, and it is done once."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.buckets import Bucket
from llmc.cli.main import main
from llmc.compiler.config import CompileConfig, CompileError
from llmc.compiler.extend import add_buckets
from llmc.compiler.kernel_spec import KernelSpec
from llmc.compiler.pipeline import compile_model
from llmc.compiler.store.cache import GraphCache
from llmc.compiler.targets.base import Choice
from llmc.compiler.targets.cpu import tuning
from llmc.compiler.targets.cpu.backend import CpuTarget
from llmc.compiler.targets.cpu.kernel_timing import KernelTimer, last_cache_bytes, linear_call
from llmc.compiler.targets.cpu.kernels.codegen import llvm_text
from llmc.compiler.targets.cpu.kernels.linear.schedule import Schedule, neighbours
from llmc.compiler.targets.cpu.kernels.linear.spec import linear_quant_spec, linear_spec
from llmc.compiler.targets.cpu.kernels.registry import build_kernel, default_schedule
from llmc.compiler.targets.cpu.packing import pack_activation, pack_linear
from llmc.compiler.targets.cpu.quant_packing import pack_quantized, pack_quantized_activation, quantize_activation
from llmc.compiler.targets.cpu.target import TARGETS, Target, enable, native_target, runs_here
from llmc.machine import num_cores
from llmc.models.convert import DTYPES
from llmc.quantize.formats.integers import Integers
from llmc.quantize.formats.registry import format_of_kernel
from llmc.quantize.formats.steps import Steps
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.graphs_file import read_graphs

from support.artifacts import TINY_LADDER, TinyArtifact
from support.compiled import Pages, random_tokens, replay
from support.kernel_harness import run, targets_here
from support.marks import rare

pytestmark = pytest.mark.native
NATIVE = native_target()
AVX2, AVX512 = TARGETS["x86-64-v3"], TARGETS["icelake-server"]
MACHINE = {"processor": "a test", "cpus": "2", "threads": "2"}
ROWS, N, K = 77, 2 * 115, 1500
FORMATS = {"w8": Integers(8), "w4": Integers(4, 64), "steps": Steps(64)}


def operands(spec: KernelSpec, target: Any) -> dict[str, NDArray[Any]]:
    """Random ones of a layer [N, K]."""
    rng = np.random.default_rng(0)
    weight, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((N, K), (ROWS, K)))
    p = spec.as_dict()
    tile, gated = int(p["row_tile"]), bool(p["gated"])
    y = pack_activation(np.zeros((ROWS, N // 2), np.float32), tile) if gated else np.zeros((ROWS, N), np.float32)
    if spec.op == "linear":
        dtype = DTYPES[str(p["act_dtype"])]
        parts = [pack_linear(part.astype(dtype), target.panel_columns) for part in np.split(weight, 1 + gated)]
        return {"x": pack_activation(x.astype(dtype), tile), "w": np.concatenate(parts), "y": y}
    format = format_of_kernel(p)
    packed = pack_quantized(weight, target.panel_columns, format, 1 + gated)
    if p["act_dtype"] == "i8":
        sums = format.sums
        assert sums is not None
        given = pack_quantized_activation(*quantize_activation(x), tile, sums)
    else:
        given = pack_activation(x.astype(DTYPES[str(p["act_dtype"])]), tile)
    planes = {plane.name: packed[plane.name] for plane in format.planes(K)}
    return {"x": given, "w": packed["numbers"], **planes, "y": y}


def layer(kind: str, tile: int) -> KernelSpec:
    dtype, _, rest = kind.partition("-")
    if not rest:
        return linear_spec(N, K, tile, dtype, gated="f32")
    return linear_quant_spec(N, K, tile, dtype, FORMATS[rest], gated="f32")


@pytest.mark.slow
@pytest.mark.parametrize("target", targets_here("x86-64-v3"), ids=lambda t: t.name)
@pytest.mark.parametrize(
    "kind", ["i8-w8", "bf16-w4", *map(rare, ("bf16", "f32", "f16", "i8-w4", "i8-steps", "bf16-w8", "f16-w4"))]
)
def test_no_schedule_changes_a_bit(kind: str, target: Any) -> None:
    for tile in (1, 2, target.row_tile):
        spec = layer(kind, tile)
        default = default_schedule(spec, target)
        if default is None:
            assert target.bf16_tiles
            continue

        def result(schedule: Schedule | None, rows: int, tasks: int, spec: KernelSpec = spec) -> NDArray[Any]:
            written = run(spec, target, operands(spec, target), written=("y",), scalars={0: rows}, num_tasks=tasks,
                          schedule=schedule)  # fmt: skip
            return written["y"]

        for rows, tasks in ((ROWS, 2), (tile, 1)):
            expected = result(None, rows, tasks)
            assert np.any(expected[:rows])
            tried = [schedule for _, schedule in neighbours(default, tile, target.row_tile)]
            assert tried
            for schedule in (default, *tried):
                same = result(schedule, rows, tasks).view(np.uint32) == expected.view(np.uint32)
                assert same.all(), f"{schedule}, tile {tile}, {rows} rows"


def test_neighbours_differ_in_one_number_that_matters() -> None:
    start = Schedule(streams=8, ahead_bytes=1024, block_bytes=24576, chunk_rows=128)
    for tile, names in ((1, {"streams", "ahead_bytes"}), (2, {"ahead_bytes"}), (4, set()),
                        (8, {"block_bytes", "chunk_rows"})):  # fmt: skip
        found = list(neighbours(start, tile, 8))
        assert {name for name, _ in found} == names
        for name, other in found:
            changed = [n for n in Schedule.__dataclass_fields__ if getattr(other, n) != getattr(start, n)]
            assert changed == [name]
    assert Schedule.parse(start.text()) == start


@pytest.mark.parametrize("text", ['{"streams": 8}', "[]", "null", '{"streams": 0, "ahead_bytes": 1, "block_bytes": 1, '
                                  '"chunk_rows": 1}', "{"])  # fmt: skip
def test_no_schedule_is_read_from_something_else(text: str) -> None:
    with pytest.raises(ValueError, match="schedule"):
        Schedule.parse(text)


class Told:
    """Compares kernels by what it was told of their code: how many times as fast as the first; keeps a record."""

    def __init__(self, gains: dict[bytes, float], second: dict[bytes, float] | None = None) -> None:
        self.gains, self.second = gains, second or {}
        self.calls: list[tuple[KernelSpec, int, int]] = []

    def __call__(self, spec: KernelSpec, codes: Sequence[bytes], rows: int) -> list[float]:
        again = any(spec == other for other, _, _ in self.calls)
        self.calls.append((spec, len(codes), rows))
        gains = {**self.gains, **self.second} if again else self.gains
        return [gains.get(code, 1.0) for code in codes]


@pytest.fixture
def told_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled and no code runs: this machine need not have what the target has."""
    monkeypatch.setattr(CpuTarget, "check_tunes_here", lambda target: None)


def found(spec: KernelSpec, compare: Told, cache: Path, rows: int = 2000, machine: dict[str, str] = MACHINE,
          target: Target = AVX512) -> Choice:  # fmt: skip
    return CpuTarget(target).tune({spec: rows}, GraphCache(cache), machine, 1, lambda done, total: None, compare)[spec]


def code_of(spec: KernelSpec, schedule: Schedule | None, target: Target = AVX512) -> bytes:
    return CpuTarget(target).compile(spec, None if schedule is None else schedule.text())


@pytest.mark.usefixtures("told_machine")
@pytest.mark.parametrize("target", [AVX2, AVX512], ids=lambda t: t.name)
def test_what_is_faster_alone_is_joined_and_measured_again(target: Target, tmp_path: Path) -> None:
    spec = linear_quant_spec(N, 6000, target.row_tile, "i8", FORMATS["w4"])  # several blocks of K
    default = default_schedule(spec, target)
    assert default is not None
    tried = dict(neighbours(default, target.row_tile, target.row_tile))  # the last value of each number
    block, rows = tried["block_bytes"].block_bytes, tried["chunk_rows"].chunk_rows
    joined = Schedule(default.streams, default.ahead_bytes, block, rows)
    fast = {code_of(spec, tried["block_bytes"], target): 1.2, code_of(spec, tried["chunk_rows"], target): 1.1}
    told = Told({**fast, code_of(spec, joined, target): 1.25})
    assert found(spec, told, tmp_path, target=target) == Choice(joined.text(), 1.25)
    assert told.calls == [(spec, 5, 512), (spec, 2, 512)]
    # Known on this machine, for as many rows; not on another.
    again = Told({})
    assert found(spec, again, tmp_path, rows=600, target=target) == Choice(joined.text(), 1.25)
    assert again.calls == []
    found(spec, again, tmp_path, rows=64, target=target)
    found(spec, again, tmp_path, machine={**MACHINE, "processor": "another"}, target=target)
    assert [rows for _, _, rows in again.calls] == [64, 512]


@pytest.mark.usefixtures("told_machine")
def test_luck_and_noise_choose_nothing(tmp_path: Path) -> None:
    spec = linear_spec(1000, 64, 1, "f32")  # more panels than streams
    default = default_schedule(spec, AVX512)
    assert default is not None
    codes = [code_of(spec, schedule) for _, schedule in neighbours(default, 1, AVX512.row_tile)]
    little = Told(dict.fromkeys(codes, 1.02))
    assert found(spec, little, tmp_path / "a") == Choice(None)
    assert len(little.calls) == 1
    lucky = Told({codes[0]: 1.3}, second={codes[0]: 1.0})
    assert found(spec, lucky, tmp_path / "b") == Choice(None)
    assert len(lucky.calls) == 2
    # That nothing was found is known, too.
    assert found(spec, Told({codes[0]: 1.3}), tmp_path / "b") == Choice(None)


@pytest.mark.usefixtures("told_machine")
def test_schedules_that_make_the_same_code_are_no_choice(tmp_path: Path) -> None:
    spec = linear_quant_spec(48, 1000, 2, "i8", FORMATS["w8"])
    same = linear_spec(48, 64, 1, "f32")  # one panel, so one stream: only how far ahead it is fetched differs
    told = Told({})
    assert [found(one, told, tmp_path) for one in (spec, same)] == [Choice(None)] * 2
    assert [count for _, count, _ in told.calls] == [3, 3]
    gains = Told({code_of(linear_spec(48, 64, 2, "f16"), None): 2.0})
    assert found(linear_spec(48, 64, 2, "f16"), gains, tmp_path) == Choice(None)
    assert gains.calls == []


@pytest.mark.usefixtures("told_machine")
def test_what_was_found_before_an_interrupt_is_kept(tmp_path: Path) -> None:
    first, second = layer("i8-w8", 1), linear_spec(1000, 64, 1, "f32")
    told = Told({})

    def compare(spec: KernelSpec, codes: Sequence[bytes], rows: int) -> list[float]:
        if spec == second:
            raise KeyboardInterrupt
        return told(spec, codes, rows)

    with pytest.raises(KeyboardInterrupt):
        CpuTarget(AVX512).tune(
            {first: 1, second: 1}, GraphCache(tmp_path), MACHINE, 1, lambda done, total: None, compare
        )
    again = Told({})
    assert found(first, again, tmp_path, rows=1) == Choice(None)
    assert again.calls == []


def test_a_core_with_two_threads_is_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 4, 5, 6})
    assert num_cores(tmp_path) == 5
    for cpu, siblings in ((0, "0,4"), (1, "1,5"), (4, "0,4"), (5, "1,5"), (6, "2,6")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert num_cores(tmp_path) == 3


def test_the_caches_of_a_machine_are_counted_once(tmp_path: Path) -> None:
    for cpu, (size, shared) in enumerate((("32768K", "0-1"), ("32768K", "0-1"), ("16384K", "2"), ("?", "3"))):
        folder = tmp_path / f"cpu{cpu}" / "cache" / "index3"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size + "\n")
        (folder / "shared_cpu_list").write_text(shared + "\n")
    assert last_cache_bytes(tmp_path) == 48 << 20
    assert last_cache_bytes(tmp_path / "nothing") == 0


@pytest.mark.parametrize("target", dict.fromkeys([NATIVE, TARGETS["sapphirerapids"]]), ids=lambda t: t.name)
@pytest.mark.parametrize("kind", ["i8-w4", "bf16-w4", *map(rare, ("f32", "bf16", "i8-w8", "i8-steps"))])
def test_a_kernel_takes_no_more_stack_than_hosts_are_told_to_give(kind: str, target: Any) -> None:
    """docs/c-abi.md: 2 MiB, of which the caller has some; the largest chunks and blocks of every number of elements.

    The wider layer is that of the larger frames; the narrower one is asked for the default alone.
    """
    for k in (896, 4096):
        dtype, _, rest = kind.partition("-")
        if rest:
            spec = linear_quant_spec(N, k, target.row_tile, dtype, FORMATS[rest], gated="f32")
        else:
            spec = linear_spec(N, k, target.row_tile, dtype, gated="f32")
        default = default_schedule(spec, target)
        largest = default
        if default is not None:
            tried = dict(neighbours(default, target.row_tile, target.row_tile))  # the last value of each number
            largest = replace(default, block_bytes=tried["block_bytes"].block_bytes,
                              chunk_rows=tried["chunk_rows"].chunk_rows)  # fmt: skip
        for schedule, most in ((None, 0.8), (largest, 1.75))[: 1 if k == 896 else 2]:
            text = llvm_text(build_kernel(spec, target, schedule), target, "asm")
            frames = [int(size) for size in re.findall(r"subq?\s+\$(\d+), %rsp", text)]
            assert frames
            assert max(frames) <= most * (1 << 20)


@pytest.mark.usefixtures("told_machine")
def test_a_kernel_without_choices_is_left_alone(tmp_path: Path) -> None:
    told = Told({})
    assert found(layer("f32", 4), told, tmp_path) == Choice(None)
    assert told.calls == []
    gather = KernelSpec.of("gather", "gather_rows", dim=16)
    assert CpuTarget(AVX512).tune({gather: 4}, GraphCache(tmp_path), MACHINE, 1, lambda done, total: None, told) == {}


def test_nothing_is_measured_for_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuTarget, "runs_here", lambda target: False)
    with pytest.raises(CompileError, match=f"cannot run code for {AVX512.name}, .*leave out --tune"):
        found(layer("f32", 1), Told({}), tmp_path)


def test_which_machine_runs_a_target(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("vendor_id\t: GenuineIntel\nflags\t\t: fma avx2 bmi1 bmi2 f16c abm movbe popcnt sse\n")
    assert runs_here(AVX2, str(cpuinfo))
    assert not runs_here(TARGETS["icelake-server"], str(cpuinfo))
    assert runs_here(NATIVE)


@pytest.mark.parametrize("kind", ["f32", "bf16", "i8-w4", "bf16-w4", *map(rare, ("i8-w8", "i8-steps"))])
def test_the_timer_calls_every_task_within_its_buffers(kind: str) -> None:
    """Sizes are those of packed arrays, so what is measured is what a graph does."""
    enable(NATIVE)
    for tile, rows in ((1, 1), (NATIVE.row_tile, 77)):
        spec = layer(kind, tile)
        call = linear_call(spec, NATIVE, rows)
        arrays = operands(spec, NATIVE)
        packed_rows = -(-ROWS // tile)
        for name, size in call.operands.items():
            if name == "x":
                assert size * packed_rows == arrays[name].nbytes * -(-rows // tile)
            elif name != "y":
                assert size == arrays[name].nbytes, name
        assert call.operands["y"] >= rows * (N // 2) * 4
        with KernelTimer(2, [call]) as timer:
            code = code_of(spec, None, NATIVE)
            gains = timer.compare(spec.symbol(), [code, code, code], call, 0.01)
        assert gains[0] == 1.0
        assert len(gains) == 3
        assert min(gains) > 0


def test_an_interrupted_measurement_leaves_no_thread() -> None:
    spec = layer("f32", 1)
    before = threading.active_count()

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    def measure() -> None:
        with KernelTimer(3, [linear_call(spec, NATIVE, 1)]) as timer:
            assert threading.active_count() == before + 2
            timer._team.run(lambda task, tasks: interrupt() if task == 0 else None)

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert threading.active_count() == before


def tuned_artifact(tiny: TinyArtifact, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """An artifact whose every kernel with choices has another schedule than the default, and its cache."""
    cache = Path(shutil.copytree(tiny.cache, folder / "cache"))

    def favour_last(spec: KernelSpec, codes: Sequence[bytes], rows: int) -> list[float]:
        return [1.0] * (len(codes) - 1) + [1.5]

    real = tuning._Search.run
    monkeypatch.setattr(tuning._Search, "run", lambda self, compare, threads: real(self, favour_last, threads))
    config = CompileConfig(tiny.model, folder / "tuned", TINY_LADDER, dtype="f32", cache_dir=cache, tune_for=MACHINE)
    report = compile_model(config)
    assert report.tuned
    assert set(report.tuned.values()) == {1.5}
    return config.output, cache


def logits(artifact: Path, graph: int, num_tokens: int) -> NDArray[Any]:
    with Artifact(artifact) as opened, Replayer(opened, num_threads=2, num_blocks=16) as replayer:
        tokens = random_tokens(read_graphs(artifact).model.vocab_size, num_tokens)
        return replay(replayer, graph, Pages(16, opened.info.block_size), [(0, tokens, 0)])


def test_a_tuned_artifact_has_the_same_graphs_and_logits(
    tiny_artifact: TinyArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, cache = tuned_artifact(tiny_artifact, tmp_path, monkeypatch)
    kernels = json.loads((artifact / "manifest.json").read_text())["kernels"]
    tuned = [kernel for kernel in kernels if "schedule" in kernel["components"]]
    assert tuned
    assert all(kernel["op"] == "linear" for kernel in tuned)
    assert (artifact / "kernels.so").read_bytes() != (tiny_artifact.artifact / "kernels.so").read_bytes()
    for graph, count in ((0, 12), (5, 1)):
        assert (logits(artifact, graph, count) == logits(tiny_artifact.artifact, graph, count)).all()
    # Buckets that are added leave the tuned kernels the bytes they are.
    add_buckets(artifact, [Bucket("prefill", 1, 48)], cache_dir=cache)
    after = json.loads((artifact / "manifest.json").read_text())["kernels"]
    assert after[: len(kernels)] == kernels


@pytest.mark.slow
def test_the_command_measures_once(
    tiny_artifact: TinyArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "SECONDS", 0.005)
    cache = Path(shutil.copytree(tiny_artifact.cache, tmp_path / "cache"))
    command = ["compile", str(tiny_artifact.model), "--buckets", TINY_LADDER, "--dtype", "f32", "--tune", "--json",
               "--no-tokenizer", "--cache-dir", str(cache)]  # fmt: skip
    assert main([*command, "-o", str(tmp_path / "first")]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["phase_seconds"]["tune"] > 0
    monkeypatch.setattr(tuning._Search, "run", lambda *args: pytest.fail("it is known"))
    assert main([*command, "-o", str(tmp_path / "second")]) == 0
    assert json.loads(capsys.readouterr().out)["tuned"] == first["tuned"]
    code = [(tmp_path / name / "kernels.so").read_bytes() for name in ("first", "second")]
    assert code[0] == code[1]
    third = tmp_path / "third"
    assert main(["compile", str(tmp_path / "first"), "--add", "prefill:1x48", "--tune", "-o", str(third)]) == 2
    assert not third.exists()
    assert "leave out one of them" in capsys.readouterr().err
