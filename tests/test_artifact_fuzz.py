"""Damaged bytes of a real artifact: opening it is refused or succeeds, and the process never crashes.

Everything runs in child processes, so that a crash is seen as one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TinyArtifact

# argv: artifact directory (a copy, changed in place), kind of damage, seed, number of rounds. Prints the outcomes.
CHILD = r"""
import collections, json, random, resource, struct, sys, zlib
from pathlib import Path
from llmc.runtime.binding import Artifact, Engine, LlmcError

root, kind, seed, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
random.seed(seed)
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))  # absurd sizes are to be refused, not served
name = {"weights": "weights.safetensors", "kernels": "kernels.so"}.get(kind, "graphs.bin")
path = root / name
good = path.read_bytes()
SPECIAL = (0, 1, 2, 11, 12, 13, 63, 64, 65, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFC0, 1 << 24, 1 << 28)

def fixed(data):
    if len(data) >= 64:
        struct.pack_into("<QII", data, 16, len(data), *struct.unpack_from("<I", data, 24), zlib.crc32(data[64:]))
    return data

def damaged(round_):
    data = bytearray(good)
    if kind == "flip":
        for _ in range(random.choice((1, 1, 2, 8))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == "truncate":
        del data[random.choice((0, 1, 7, 8, 63, 64, 65, 100, len(data) - 1, random.randrange(len(data)))):]
    elif kind == "fixed":
        # What CRC-32 does not catch: a wrong writer. Whole fields get hostile values.
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            at = random.choice((random.randrange(64, 232), random.randrange(64, len(data)))) & ~3
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
    elif kind == "weights":
        header = 8 + int.from_bytes(good[:8], "little")
        choice = round_ % 4
        if choice == 0:
            del data[random.choice((0, 7, 8, 64, header, len(data) - 1, random.randrange(len(data)))):]
        elif choice == 1:
            struct.pack_into("<Q", data, 0, random.choice((0, 1, 1 << 31, (1 << 64) - 1, (1 << 64) - 8, len(data))))
        elif choice == 2:
            data[random.randrange(header)] ^= 1 << random.randrange(8)
        else:
            at = random.randrange(header, len(data))
            data[at:at + 64] = random.randbytes(len(data[at:at + 64]))
    elif kind == "kernels":
        del data[random.choice((0, 1, 16, 63, 64, 4096, len(data) - 1, random.randrange(len(data)))):]
    return bytes(data)

def serve(artifact):
    with Engine(artifact, num_threads=1, num_blocks=4) as engine:
        engine.submit([5, 6, 7], temperature=0.0, max_tokens=3)
        for _ in range(20):
            if not engine.step():
                break
        engine.poll()

outcomes = collections.Counter()
for round_ in range(rounds):
    data = damaged(round_)
    (root / "last").write_bytes(data)
    # A new file: what an earlier round mapped stays as it was.
    path.unlink()
    path.write_bytes(data)
    try:
        with Artifact(root) as artifact:
            artifact.graphs()
            if kind != "fixed" or data == good:
                serve(artifact)
            else:
                # A table whose checksum was made to fit may say anything that is in range; it is not replayed.
                Engine(artifact, num_threads=1, num_blocks=4).close()
        outcomes["opened" if data != good else "unchanged"] += 1
    except LlmcError as error:
        text = str(error)
        assert text and "\n" not in text and len(text) < 1016, text
        outcomes[error.name] += 1
path.unlink()
path.write_bytes(good)
with Artifact(root) as artifact:
    serve(artifact)
print(json.dumps(outcomes))
"""

REFUSALS = {"corrupt", "version", "unsupported_isa"}


def fuzz(tiny: TinyArtifact, folder: Path, kind: str, seed: int, rounds: int) -> dict[str, int]:
    artifact = shutil.copytree(tiny.artifact, folder / "artifact")
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, artifact, kind, str(seed), str(rounds)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        check=False,
    )
    # The bytes of the round that crashed are in the file "last".
    assert done.returncode == 0, f"{kind} of seed {seed} in {artifact}: exit {done.returncode}\n{done.stderr}"
    outcomes: dict[str, int] = json.loads(done.stdout)
    assert sum(outcomes.values()) == rounds
    return outcomes


@pytest.mark.parametrize(("kind", "rounds"), [("flip", 400), ("truncate", 100)])
def test_damaged_graphs_are_refused(kind: str, rounds: int, tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    outcomes = fuzz(tiny_artifact, tmp_path, kind, 1, rounds)
    # The checksum covers everything but the header, whose reserved bytes mean nothing.
    assert sum(count for name, count in outcomes.items() if name in REFUSALS) >= rounds * 0.95, outcomes
    assert set(outcomes) <= REFUSALS | {"opened", "unchanged"}


@pytest.mark.parametrize("seed", [1, 2])
def test_hostile_graphs_with_a_valid_checksum_do_not_crash(
    seed: int, tiny_artifact: TinyArtifact, tmp_path: Path
) -> None:
    outcomes = fuzz(tiny_artifact, tmp_path, "fixed", seed, 600)
    assert set(outcomes) <= REFUSALS | {"opened", "unchanged", "out_of_memory"}, outcomes
    assert outcomes["corrupt"] > 100
    assert outcomes["opened"] > 20


def test_damaged_weights(tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    outcomes = fuzz(tiny_artifact, tmp_path, "weights", 1, 200)
    assert set(outcomes) <= {"corrupt", "opened", "unchanged"}, outcomes
    # Truncated files and lengths past the end are refused; other values of weights are another model.
    assert outcomes["corrupt"] >= 50
    assert outcomes["opened"] >= 50


def test_truncated_kernels(tiny_artifact: TinyArtifact, tmp_path: Path) -> None:
    outcomes = fuzz(tiny_artifact, tmp_path, "kernels", 1, 60)
    assert set(outcomes) == {"corrupt"}, outcomes
