"""The ctypes binding over a hand-made artifact: no compiler, no torch."""

from __future__ import annotations

import ctypes
import re
import resource
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llmc.buckets.bucket import Bucket
from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer, abi
from llmc.runtime.binding.handle import ERROR_NAMES
from llmc.runtime.binding.statistics import BucketMiss

from support.paths import ROOT

VOCAB, TOKENS, BLOCK = 8, 4, 16
SOURCE = """
#include <stdint.h>
void twice(void *ids, void *arena, const int64_t *s, int32_t task, int32_t n) {
  for (int64_t t = task; t < s[0]; t += n) ((float *)arena)[t] = 2.0f * ((int32_t *)ids)[t];
}
void logits(void *arena, void *weight, void *sample, void *seq, void *out, const int64_t *s, int32_t task, int32_t n) {
  for (int64_t i = task; i < s[2] * 8; i += n) {
    int32_t row = ((int32_t *)sample)[i / 8];
    ((float *)out)[i] = ((float *)arena)[row] + ((float *)weight)[i % 8] + 100.0f * ((int32_t *)seq)[row];
  }
}
"""
Batch = dict[str, npt.ArrayLike]
BATCH: Batch = {
    "input_ids": [3, 4, 5],
    "positions": [0, 1, 0],
    "slot_mapping": [16, 17, 32],
    "block_tables": [[1, 0, 0, 0], [2, 0, 0, 0]],
    "context_lens": [2, 1],
    "query_start": [0, 2, 3],
    "sample_index": [1, 2],
}


def graphs_bin(code: bytes, weights: bytes, version: int = 5) -> bytes:
    strings = b"twice\0logits\0tablecpux86-64-v3tilesrowskernels.so"
    model = [1, 1, 4, BLOCK, 0, VOCAB, 64, 2, 0, 0, 1, 7, *[0] * 7, 1]
    pools = 4 * BLOCK * 4, 16 * BLOCK * 4
    operands = [(2, 0, 0, 16), (0, 0, 0, 16), (0, 0, 0, 16), (1, 0, 0, 32), (2, 6, 0, 8), (2, 7, 0, 16), (5, 0, 0, 64)]
    sections = [
        (1, 1, strings),
        (2, 128, struct.pack("<20i2Q32x", *model, *pools)),
        (3, 48, struct.pack("<24I", 0, 5, 2, 0, 0, *[0] * 7, 6, 6, 5, 2, 0, 64, *[0] * 6)),
        (4, 80, struct.pack("<4I2Q4q4I", 13, 5, 0, 1, 64, 32, VOCAB, 0, 0, 0, zlib.crc32(weights[64:]), 35, 4, 0)),
        (5, 64, struct.pack("<10I3Q", 0, 1, 4, TOKENS, 2, 2, 4, 4, 0, 2, 64, 0, 0)),
        (6, 24, struct.pack("<4IiI4IiI", 0, 0, 2, 1, -1, 0, 1, 2, 5, 0, -1, 2)),
        (7, 24, b"".join(struct.pack("<IIQQ", *operand) for operand in operands)),
        (8, 32, struct.pack("<8I", 18, 3, 21, 9, 30, 5, 1, 0)),
        (9, 24, struct.pack("<4IQ", 39, 10, zlib.crc32(code), 0, len(code))),
    ]
    table, body = b"", b""
    for kind, record_bytes, data in sections:
        table += struct.pack(
            "<IIQQ", kind, record_bytes, 64 + 24 * len(sections) + len(body), len(data) // record_bytes
        )
        body += data + b"\0" * (-len(data) % 8)
    rest = table + body
    start = struct.pack("<8sIIQI", b"LLMCGRPH", version, 64, 64 + len(rest), 9)
    end = struct.pack("<QI20x", len(weights), zlib.crc32(weights[:64])) + rest
    return start + struct.pack("<I", zlib.crc32(end, zlib.crc32(start))) + end


def tables_of(path: Path, version: int = 5) -> bytes:
    """graphs.bin for the other files in `path`."""
    return graphs_bin((path / "kernels.so").read_bytes(), (path / "weights.safetensors").read_bytes(), version)


@pytest.fixture(scope="module")
def artifact_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("artifact")
    (path / "kernels.c").write_text(SOURCE)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", path / "kernels.so", path / "kernels.c"], check=True)
    weights = np.arange(VOCAB, dtype=np.float32) / 2
    (path / "weights.safetensors").write_bytes(struct.pack("<Q56x", 56) + weights.tobytes())
    (path / "graphs.bin").write_bytes(tables_of(path))
    return path


def test_artifact_describes_itself(artifact_path: Path) -> None:
    with Artifact(artifact_path) as artifact:
        info = artifact.info
        assert (info.num_graphs, info.num_kernels, info.num_commands, info.num_weights) == (1, 2, 2, 1)
        assert (info.vocab_size, info.block_size) == (VOCAB, BLOCK)
        assert (info.target_kind, info.target_name, info.target_level) == ("cpu", "x86-64-v3", 1)
        assert info.kv_block_bytes == (4 + 16) * BLOCK * 4
        (graph,) = artifact.graphs()
        assert (graph.phase, graph.max_tokens, graph.max_seqs, graph.arena_bytes) == ("prefill", TOKENS, 2, 64)
    with pytest.raises(ValueError, match="closed"):
        artifact.info  # noqa: B018
    artifact.close()


def test_every_status_has_its_name() -> None:
    header = ROOT / "runtime/native/include/llmc/llmc.h"
    enum = header.read_text().partition("typedef int32_t llmc_status;")[2].partition("};")[0]
    codes = re.findall(r"^  LLMC_(?:ERR_)?(\w+) = (\d+)", enum, re.MULTILINE)
    assert [(name.lower(), int(code)) for name, code in codes] == [(n, i) for i, n in enumerate(ERROR_NAMES)]


def test_verify_names_the_damaged_weight(artifact_path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(artifact_path, tmp_path / "copy"))
    with Artifact(copy) as artifact:
        artifact.verify()
    weights = copy / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[70] ^= 4
    weights.write_bytes(data)
    with Artifact(copy) as artifact:
        with pytest.raises(LlmcError, match="weight 'table' at byte 64") as caught:
            artifact.verify()
        assert caught.value.name == "corrupt"
        assert artifact.info.vocab_size == VOCAB  # it can be asked on


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_replay(artifact_path: Path, num_threads: int) -> None:
    with Artifact(artifact_path) as artifact:
        replayer = Replayer(artifact, num_threads=num_threads)
    expected = np.array([[8], [110]], np.float32) + np.arange(VOCAB, dtype=np.float32) / 2
    replayer.set_profiling(True)
    for _ in range(3):
        np.testing.assert_array_equal(replayer.run(0, **BATCH), expected)
    stats = replayer.stats
    assert (stats.num_threads, stats.num_replays) == (num_threads, 3)
    assert 0 < stats.kernel_ns == sum(stats.family_ns.values()) <= stats.total_ns
    assert replayer.run(0, **(BATCH | {"sample_index": []})).shape == (0, VOCAB)
    replayer.close()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_ids": [3, VOCAB, 5]}, LlmcError, r"input_ids\[1\] is 8"),
        ({"slot_mapping": [16, 17, 1 << 20]}, LlmcError, r"slot_mapping\[2\]"),
        ({"context_lens": [2, 65]}, LlmcError, r"context_lens\[1\] is 65"),
        ({"positions": [0, 1]}, ValueError, "positions has 2 elements"),
        ({"block_tables": [1, 2]}, ValueError, "block_tables has shape"),
        ({"input_ids": [0.5, 1.0, 2.0]}, TypeError, "pass integers"),
        ({"input_ids": [3, 1 << 40, 5]}, ValueError, "int32"),
        ({"state_slots": [[1, 0, 0]]}, ValueError, r"state_slots has shape \(1, 3\); this batch needs \(2, 3\)"),
        ({"state_slots": [[1, 0, 0], [2, 0, 0]]}, LlmcError, "no layer of this model has a state; leave it out"),
    ],
)
def test_bad_batches(artifact_path: Path, change: Batch, error: type[Exception], message: str) -> None:
    with Artifact(artifact_path) as artifact, Replayer(artifact, num_threads=1) as replayer:
        with pytest.raises(error, match=message):
            replayer.run(0, **(BATCH | change))
        assert replayer.stats.num_replays == 0


def test_bad_artifacts(artifact_path: Path, tmp_path: Path) -> None:
    with pytest.raises(LlmcError, match="no artifact") as caught:
        Artifact(tmp_path / "missing")
    assert caught.value.name == "not_found"
    copy = tmp_path / "copy"
    shutil.copytree(artifact_path, copy)
    (copy / "graphs.bin").write_bytes(tables_of(copy, version=4))
    with pytest.raises(LlmcError, match="format version 4") as caught:
        Artifact(copy)
    assert caught.value.name == "version"
    (copy / "graphs.bin").write_bytes(tables_of(copy)[:-1])
    with pytest.raises(LlmcError, match="damaged") as caught:
        Artifact(copy)
    assert caught.value.name == "corrupt"


def test_replaced_artifact_gets_its_own_kernels(artifact_path: Path, tmp_path: Path) -> None:
    """The loader would hand out the old library for the old path while an artifact still holds it."""
    path, built = tmp_path / "a", tmp_path / "b"
    shutil.copytree(artifact_path, path)
    shutil.copytree(artifact_path, built)
    (built / "kernels.c").write_text(SOURCE.replace("2.0f *", "3.0f *"))
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", built / "kernels.so", built / "kernels.c"], check=True)
    (built / "graphs.bin").write_bytes(tables_of(built))
    with Artifact(path) as old:
        shutil.rmtree(path)
        built.rename(path)
        with Artifact(path) as new, Replayer(old, 1) as first, Replayer(new, 1) as second:
            assert first.run(0, **BATCH)[0, 0] == 8
            assert second.run(0, **BATCH)[0, 0] == 12


@pytest.mark.parametrize(
    ("machine", "name"), [(183, "aarch64"), (243, "riscv64"), (258, r"another architecture \(ELF machine 258\)")]
)
def test_code_of_another_architecture_is_not_called_damaged(
    machine: int, name: str, artifact_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "artifact"
    shutil.copytree(artifact_path, path)
    code = bytearray((path / "kernels.so").read_bytes())
    struct.pack_into("<H", code, 18, machine)
    (path / "kernels.so").write_bytes(code)
    (path / "graphs.bin").write_bytes(tables_of(path))
    said = rf"was compiled for {name} \(target x86-64-v3\) and this machine is x86-64; compile it for this machine"
    with Artifact(path) as artifact, pytest.raises(LlmcError, match=said):
        Replayer(artifact, 1)


def test_code_that_the_system_does_not_run_is_not_called_damaged(artifact_path: Path, tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        path = tmp_path / "artifact"
        shutil.copytree(artifact_path, path)
        said = r"cannot map '.*kernels.so' as code: Operation not permitted; move the artifact to .* not mounted noexec"
        with Artifact(path) as artifact, pytest.raises(LlmcError, match=said):
            Replayer(artifact, 1)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_limit_of_open_files_is_called_by_its_name(artifact_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = r"cannot open '.*': Too many open files; raise the limit of open files \(ulimit -n\)"
    with Artifact(artifact_path) as artifact:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
            with pytest.raises(LlmcError, match=said):
                Replayer(artifact, 1)
            with pytest.raises(LlmcError, match=said):
                Artifact(artifact_path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_engine_greedy(artifact_path: Path) -> None:
    """The artifact's only graph is a prefill of 4 tokens with 2 samples; its logits rise with the token id."""
    with Artifact(artifact_path) as artifact, Engine(artifact, num_threads=1, num_blocks=8) as engine:
        request = engine.submit([1, 2, 3], temperature=0.0, max_tokens=1)
        for _ in range(10):
            engine.step()
            engine.check_integrity()
        events = engine.poll()
        assert [event.request_id for event in events] == [request] * len(events)
        assert events[-1].kind == "finished"
        assert engine.stats.num_finished == 1
        assert sum(replays for replays, _ in engine.graph_use()) >= 1
        with pytest.raises(LlmcError):
            engine.submit([])


FORKED = """
import os, sys
from llmc.runtime.binding import Artifact, Engine, LlmcError, Replayer
artifact = Artifact(sys.argv[1])
engine, replayer = Engine(artifact, num_threads=2, num_blocks=8), Replayer(artifact, 2)
def ask(made):
    made.submit([1, 2, 3], temperature=0.0, max_tokens=1)
    while made.step():
        pass
    return len(made.poll())
ask(engine)
child = os.fork()
if child == 0:
    for what in (lambda: ask(engine), lambda: engine.stats, lambda: engine.warm_graph(0), lambda: replayer.stats):
        try:
            print("no error", what())
        except LlmcError as error:
            print(error)
    engine.close()
    replayer.close()
    print(ask(Engine(artifact, num_threads=2, num_blocks=8)), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(ask(engine))
"""


def test_a_fork_is_refused_its_parents_engine(artifact_path: Path) -> None:
    """It lacks the threads for which it would wait."""
    command = [sys.executable, "-P", "-c", FORKED, str(artifact_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    *errors, childs_own, parents = done.stdout.splitlines()
    said = r"Process (\d+) made the {0}, and its fork (?!\1)\d+ has none of the threads; make the {0} in the process .*"
    for error, name in zip(errors, ("engine", "engine", "engine", "replayer"), strict=True):
        assert re.fullmatch(said.format(name), error), error
    assert childs_own == parents != "0"


def test_misses_are_listed_by_shape(artifact_path: Path) -> None:
    """There is no decode graph, so every token but the first misses."""
    with Artifact(artifact_path) as artifact, Engine(artifact, num_threads=1, num_blocks=8) as engine:
        engine.submit([1, 2, 3], temperature=0.0, max_tokens=3, ignore_eos=True)
        while engine.step():
            pass
        assert engine.bucket_misses() == [
            BucketMiss(
                "decode", num_seqs=1, num_tokens=1, num_blocks=1, count=2, graph=0, wanted=Bucket("decode", 1, 16)
            )
        ]
        assert engine.stats.num_missed_shapes == 1
        assert engine.graph_stats()[0].replays == 3
        assert engine.stats.num_bucket_misses == 2


def test_steps_are_counted_by_shape_once_asked_for(artifact_path: Path) -> None:
    with Artifact(artifact_path) as artifact, Engine(artifact, num_threads=1, num_blocks=8) as engine:

        def run(tokens: int) -> None:
            engine.submit([1, 2, 3], temperature=0.0, max_tokens=tokens, ignore_eos=True)
            while engine.step():
                pass

        run(2)
        assert engine.take_step_shapes() == ([], 0)
        run(3)
        shapes, lost = engine.take_step_shapes()
        assert lost == 0
        assert [(one.phase, one.graph, one.num_seqs, one.num_tokens, one.num_samples, one.num_blocks, one.count)
                for one in shapes] == [("prefill", 0, 1, 3, 1, 1, 1), ("decode", 0, 1, 1, 1, 1, 2)]  # fmt: skip
        assert all(one.replay_ns_squared <= one.replay_ns**2 <= one.count * one.replay_ns_squared * 1.001
                   for one in shapes)  # fmt: skip
        assert engine.take_step_shapes() == ([], 0)


@pytest.mark.parametrize(
    ("option", "value", "most"),
    [
        ("kv_bytes", 2**64 + (1 << 30), 2**64 - 1),
        ("kv_bytes", -1, 2**64 - 1),
        ("max_num_seqs", 2**32 + 1, 2**32 - 1),
        ("max_num_seqs", 1.5, 2**32 - 1),
        ("max_num_seqs", float("nan"), 2**32 - 1),
        ("max_num_seqs", "2", 2**32 - 1),
        ("kv_bytes", None, 2**64 - 1),
    ],
)
def test_engine_cuts_no_option_to_its_field(artifact_path: Path, option: str, value: Any, most: int) -> None:
    sentence = re.escape(f"{option} is {value!r}; use a whole number from 0 to {most}.")
    with Artifact(artifact_path) as artifact, pytest.raises(LlmcError, match=sentence) as error:
        Engine(artifact, **{option: value})
    assert error.value.name == "invalid_argument"


def test_engine_rejects_unknown_options(artifact_path: Path) -> None:
    with Artifact(artifact_path) as artifact:
        with pytest.raises(TypeError, match="unknown engine option 'threads'"):
            Engine(artifact, threads=1)
        with pytest.raises(ValueError, match="miss_policy"):
            Engine(artifact, miss_policy="wait")


def test_structs_match_the_header(tmp_path: Path) -> None:
    """Offsets and sizes as the C compiler lays llmc.h out."""
    header = ROOT / "runtime/native/include"
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    structs = {
        "llmc_error": abi.Error,
        "llmc_artifact_info": abi.ArtifactInfo,
        "llmc_graph_info": abi.GraphInfo,
        "llmc_replayer_options": abi.ReplayerOptions,
        "llmc_batch": abi.Batch,
        "llmc_replay_stats": abi.ReplayStats,
        "llmc_engine_options": abi.EngineOptions,
        "llmc_logit_bias": abi.LogitBias,
        "llmc_sampling_params": abi.SamplingParams,
        "llmc_request": abi.Request,
        "llmc_event": abi.Event,
        "llmc_engine_stats": abi.EngineStats,
        "llmc_graph_stats": abi.GraphStats,
        "llmc_warm_load": abi.WarmLoad,
        "llmc_bucket_miss": abi.BucketMiss,
        "llmc_step_shape": abi.StepShape,
    }
    expected, lines = [], []
    for name, struct_type in structs.items():
        for field in struct_type._fields_:
            expected.append(str(getattr(struct_type, field[0]).offset))
            lines.append(f'printf("%zu\\n", offsetof({name}, {field[0]}));')
        expected.append(str(ctypes.sizeof(struct_type)))
        lines.append(f'printf("%zu\\n", sizeof({name}));')
    source = tmp_path / "offsets.c"
    source.write_text("#include <stdio.h>\n#include <llmc/llmc.h>\nint main(void) {" + "\n".join(lines) + "return 0;}")
    subprocess.run(["cc", "-I", header, "-o", tmp_path / "offsets", source], check=True)
    actual = subprocess.run([tmp_path / "offsets"], check=True, capture_output=True, text=True).stdout.split()
    assert actual == expected


def test_binding_imports_no_compiler(tmp_path: Path) -> None:
    code = "import sys, llmc.runtime.binding; print([m for m in ('torch', 'tvm', 'llmc.compiler') if m in sys.modules])"
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert output.strip() == "[]"
