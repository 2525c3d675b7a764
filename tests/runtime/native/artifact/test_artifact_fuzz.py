"""Damaged bytes of a real artifact are always noticed, and the process never crashes.

Every flip in graphs.bin and kernels.so and every truncation is refused when the artifact is opened, every flip in
weights.safetensors then or by verify. Everything runs in child processes, so that a crash is seen as one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.artifacts import TinyArtifact

# argv: artifact directory (a copy, changed in place), name of the file, kind of damage, seed, number of rounds.
# Prints how often opening and verifying ended how, as JSON.
CHILD = r"""
import collections, json, random, resource, struct, sys, zlib
from pathlib import Path
from llmc.runtime.binding import Artifact, Engine, LlmcError
from llmc.runtime.graphs_checks import FormatError
from llmc.runtime.graphs_file import read_graphs
from llmc.runtime.checksums import verify_artifact

root, name, kind, seed, rounds = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
random.seed(seed)
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))  # absurd sizes are to be refused, not served
path = root / name
good = path.read_bytes()
tables = read_graphs(root)
SPECIAL = (0, 1, 2, 11, 12, 13, 63, 64, 65, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFC0, 1 << 24, 1 << 28)

def regions():
    # Byte ranges by what they hold: every one is hit, however small.
    if name == "graphs.bin":
        sections = [struct.unpack_from("<IIQQ", good, 64 + 24 * i) for i in range(9)]
        found = [(offset, offset + size * count) for _, size, offset, count in sections]
        return [(0, 64), (64, 64 + 24 * 9), *(span for span in found if span[0] < span[1])]
    if name == "weights.safetensors":
        header = 8 + int.from_bytes(good[:8], "little")
        spans = [(w.file_offset, w.file_offset + w.bytes) for w in tables.weights]
        ends = [header, *(end for _, end in spans)]
        starts = [*(start for start, _ in spans), len(good)]
        padding = [(end, start) for end, start in zip(ends, starts) if end < start]
        return [(0, 8), (8, header), *padding, *spans]
    table, count = struct.unpack_from("<Q", good, 32)[0], struct.unpack_from("<H", good, 56)[0]
    loaded = [struct.unpack_from("<QQQQ", good, table + 56 * i + 8) for i in range(count)]
    found = [(offset, offset + size) for offset, _, _, size in loaded if size]
    return [(0, 64), (table, table + 56 * count), *found, (0, len(good))]

REGIONS = regions()

def fixed(data):
    if len(data) >= 64:
        struct.pack_into("<Q", data, 16, len(data))
        struct.pack_into("<I", data, 28, zlib.crc32(data[32:], zlib.crc32(data[:28])))
    return data

def damaged(round_):
    data = bytearray(good)
    if kind == "flip":
        begin, end = REGIONS[round_ % len(REGIONS)]
        for _ in range(random.choice((1, 1, 1, 2, 8))):
            data[random.randrange(begin, end)] ^= 1 << random.randrange(8)
    elif kind == "noise":
        begin, end = REGIONS[round_ % len(REGIONS)]
        at = random.randrange(begin, end)
        data[at:at + 64] = random.randbytes(len(data[at:at + 64]))
    elif kind == "truncate":
        edges = [edge + by for region in REGIONS for edge in region for by in (-1, 0, 1)]
        edges = [edge for edge in (*edges, 1, 7, 100, random.randrange(len(data))) if 0 <= edge < len(data)]
        del data[random.choice(edges):]
    elif kind == "grow":
        data += bytes(random.choice((1, 8, 64, 4096)))
    elif kind == "hostile":
        # What CRC-32 does not catch: a wrong writer. Whole fields get hostile values.
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            at = random.choice((random.randrange(32, 280), random.randrange(64, len(data)))) & ~3
            if random.random() < 0.5:
                struct.pack_into("<I", data, at, random.choice(SPECIAL))
            elif random.random() < 0.5:
                value = random.choice(SPECIAL) << random.choice((0, 32))
                struct.pack_into("<Q", data, min(at & ~7, len(data) - 8), value)
            else:
                data[at] ^= 1 << random.randrange(8)
        if random.random() < 0.1:
            del data[random.randrange(64, len(data)):]
        fixed(data)
    return bytes(data)

def serve(artifact):
    with Engine(artifact, num_threads=1, num_blocks=4) as engine:
        engine.submit([5, 6, 7], temperature=0.0, max_tokens=3)
        for _ in range(20):
            if not engine.step():
                break
        engine.poll()

def outcome():
    with Artifact(root) as artifact:
        artifact.graphs()
        if kind == "hostile":
            # Tables whose checksum was made to fit may say anything that is in range; they are not replayed.
            Engine(artifact, num_threads=1, num_blocks=4).close()
            return "opened"
        try:
            artifact.verify()
        except LlmcError as error:
            check(error)
            serve(artifact)  # other values of weights are another model
            return "verify: " + error.name
        return "opened"

def python_outcome():
    try:
        return "verify" if verify_artifact(root, read_graphs(root)) else "whole"
    except FormatError as error:
        assert "\n" not in str(error)
        return "open"

def check(error):
    text = str(error)
    assert text and "\n" not in text and len(text) < 1016 and (kind == "hostile" or name in text), text

outcomes = collections.Counter()
for round_ in range(rounds):
    data = damaged(round_)
    (root / "last").write_bytes(data)
    # A new file: what an earlier round mapped stays as it was.
    path.unlink()
    path.write_bytes(data)
    try:
        found = outcome()
    except LlmcError as error:
        found = error.name
        check(error) if found != "version" else None
    outcomes["unchanged" if data == good else found] += 1
    if kind != "hostile":
        # The reader in Python notices what the native one notices.
        assert (python_outcome() == "whole") == (found == "opened"), (found, python_outcome())
path.unlink()
path.write_bytes(good)
with Artifact(root) as artifact:
    artifact.verify()
    serve(artifact)
print(json.dumps(outcomes))
"""

REFUSALS = {"corrupt", "version", "unsupported_target", "not_found"}


def fuzz(tiny: TinyArtifact, folder: Path, name: str, kind: str, seed: int, rounds: int) -> dict[str, int]:
    artifact = shutil.copytree(tiny.artifact, folder / "artifact")
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, artifact, name, kind, str(seed), str(rounds)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        check=False,
    )
    # The bytes of the round that crashed are in the file "last".
    assert done.returncode == 0, f"{kind} of {name}, seed {seed} in {artifact}: exit {done.returncode}\n{done.stderr}"
    outcomes: dict[str, int] = json.loads(done.stdout)
    assert sum(outcomes.values()) == rounds
    return outcomes


@pytest.mark.parametrize("kind", ["flip", "noise", "truncate", "grow"])
@pytest.mark.parametrize("name", ["graphs.bin", "kernels.so", "weights.safetensors"])
def test_damage_is_always_noticed(name: str, kind: str, tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    rounds = 200 if kind == "flip" else 60
    outcomes = fuzz(tiny_artifact, tmp_path, name, kind, 1, rounds)
    # Two flips may meet in one bit, noise may be what was there.
    noticed = rounds - outcomes.pop("unchanged", 0)
    assert noticed > rounds * 0.9
    if name == "weights.safetensors" and kind in ("flip", "noise"):
        # Tensor data is read on demand only.
        assert set(outcomes) == {"corrupt", "verify: corrupt"}, outcomes
    else:
        assert set(outcomes) <= {"corrupt", "version"}, outcomes
    assert sum(outcomes.values()) == noticed


@pytest.mark.parametrize("seed", [1, 2])
def test_hostile_graphs_with_a_valid_checksum_do_not_crash(
    seed: int, tiny_artifact: TinyArtifact, tmp_path: Path
) -> None:
    outcomes = fuzz(tiny_artifact, tmp_path, "graphs.bin", "hostile", seed, 600)
    assert set(outcomes) <= REFUSALS | {"opened", "unchanged", "out_of_memory"}, outcomes
    assert outcomes["corrupt"] > 100
    assert outcomes["opened"] > 20
