"""Files that others wrote: whatever is in them, and whatever they are, only the reader's own error comes out.

`python -m bench.fuzz_files` does the same for as long as one likes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.fuzz_files import Kind, fuzz, kinds
from llmc.buckets.bucket import BucketError
from llmc.buckets.model_config import read_config
from llmc.compiler.store.cache import GraphCache, key_of
from llmc.runtime.loadgen.dataset import read_dataset
from llmc.runtime.loadgen.error import BenchError
from llmc.runtime.misses.record import prepare_record
from llmc.runtime.server.api_keys import KeysError, read_keys

from support.artifacts import TinyArtifact

KINDS = (
    "manifest", "bundle", "tables", "costs", "misses", "trace", "trace-gzip", "trace-azure", "trace-mooncake", "ladder",
    "ladder-toml", "ladder-gaudi", "metrics", "prompts", "chat", "cache-archive", "cache-entry", "gguf",
    "gguf-pieces", "onnx",
)  # fmt: skip
ROUNDS = 300


@pytest.fixture(scope="module")
def known(tiny_artifact: TinyArtifact, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    found = dict(kinds(tiny_artifact.artifact, tmp_path_factory.mktemp("kinds")))
    assert tuple(found) == KINDS
    return found


@pytest.mark.parametrize("name", KINDS)
def test_only_the_declared_error_comes_out(name: str, known: dict[str, Kind], tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    # Some mutations change nothing that matters: the sound file is one that is taken.
    found = fuzz(name, known[name], ROUNDS, 1, tmp_path)
    assert found["taken"] > 0
    assert len(found) > 1 or name == "cache-entry"


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("manifest", "tables", "cache-entry")])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_at_once(name: str, make: Callable[[Path], None], known: dict[str, Kind],
                                            tmp_path: Path) -> None:  # fmt: skip
    path = tmp_path / f"x{known[name].suffix}"
    make(path)
    with pytest.raises(known[name].errors, match=r"it is a (pipe|directory), not a regular file"):
        known[name].read(path)


def test_pipes_elsewhere(tmp_path: Path) -> None:
    for name in ("x", "config.json", "set.jsonl"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(KeysError, match="it is a pipe"):
        read_keys(tmp_path / "x")
    with pytest.raises(BucketError, match="it is a pipe"):
        read_config(tmp_path)
    with pytest.raises(BenchError, match="it is a pipe"):
        read_dataset(str(tmp_path / "set.jsonl"))
    with pytest.raises(BucketError, match="is not a regular file"):
        prepare_record(tmp_path / "x")


def test_a_pipe_in_the_cache_is_a_miss(tmp_path: Path) -> None:
    cache, components = GraphCache(tmp_path), {"kind": "kernel"}
    key = key_of(components)
    cache.put(key, b"payload", components, {})
    (entry,) = tmp_path.rglob("*.entry")
    entry.unlink()
    os.mkfifo(entry)
    assert cache.get(key) is None
    assert cache.entries() == []
    assert cache.verify().damaged == (key,)
    cache.put(key, b"payload", components, {})
    assert cache.get(key) == b"payload"
