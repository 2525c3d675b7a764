"""The content-addressed cache: keys, damage, concurrency, interruption, collection, archives."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from llmc.cache_root import cache_root
from llmc.cli.main import build_app
from llmc.compiler.store.cache import CacheError, GraphCache, key_of
from llmc.compiler.store.collect import collect
from llmc.manifest import ManifestError

COMPONENTS = {"kind": "kernel", "op": "linear", "ir": "abc", "target": "znver4", "tvm": "0.27.0"}


def put(cache: GraphCache, payload: bytes = b"code", **changes: str) -> str:
    components = {**COMPONENTS, **changes}
    key = key_of(components)
    cache.put(key, payload, components, {"symbol": "linear_0"})
    return key


def file_of(cache: GraphCache, key: str) -> Path:
    return next(cache.root.rglob(f"{key}.entry"))


def run_python(code: str, *args: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen([sys.executable, "-c", code, *args], env=env, stdout=subprocess.PIPE)


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app("cache"), ["cache", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_a_key_is_made_of_components_only() -> None:
    assert key_of(COMPONENTS) == key_of(dict(reversed(COMPONENTS.items())))
    keys = {key_of({**COMPONENTS, name: "other"}) for name in COMPONENTS} | {key_of(COMPONENTS)}
    assert len(keys) == len(COMPONENTS) + 1
    assert key_of({"a": "b:c"}) != key_of({"a:b": "c"})


def test_a_key_is_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(COMPONENTS)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.chdir(tmp_path)
    code = f"from llmc.compiler.store.cache import key_of; print(key_of({COMPONENTS!r}))"
    output, _ = run_python(code).communicate()
    assert output.decode().strip() == before == key_of(COMPONENTS)


@pytest.mark.parametrize("bad", [{}, {"a": 1}, {1: "a"}])
def test_a_bad_component_is_refused(bad: dict[str, str]) -> None:
    with pytest.raises(CacheError):
        key_of(bad)


def test_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LLMC_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "llmc"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == tmp_path / ".cache" / "llmc"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "llmc"
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    assert cache_root(tmp_path / "given") == tmp_path / "given"


def test_put_and_get(tmp_path: Path) -> None:
    cache = GraphCache(tmp_path / "c")
    assert cache.get(key_of(COMPONENTS)) is None
    assert cache.entries() == []
    key = put(cache, b"\0code" * 100)
    assert cache.get(key) == b"\0code" * 100
    entry = cache.entry(key)
    assert entry is not None
    assert (entry.components, entry.meta, entry.payload_bytes) == (COMPONENTS, {"symbol": "linear_0"}, 500)
    assert cache.entries() == [entry] or cache.entries()[0].key == key
    assert cache.resolve(key[:9]) == key
    put(cache, b"")
    assert cache.get(key) == b""


def test_a_key_must_fit_its_components(tmp_path: Path) -> None:
    cache = GraphCache(tmp_path)
    with pytest.raises(CacheError, match="not the hash"):
        cache.put("0" * 64, b"x", COMPONENTS, {})
    with pytest.raises(CacheError, match="not a cache key"):
        cache.get("../../etc/passwd")
    with pytest.raises(CacheError, match="plain JSON"):
        cache.put(key_of(COMPONENTS), b"x", COMPONENTS, {"path": tmp_path})
    assert list(tmp_path.rglob("*.entry")) == []


@given(st.integers(0, 10_000), st.integers(1, 255), st.booleans())
def test_damage_is_a_miss_and_dropped(position: int, flip: int, truncate: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        cache = GraphCache(Path(folder))
        key = put(cache)
        path = file_of(cache, key)
        data = bytearray(path.read_bytes())
        position %= len(data)
        if truncate:
            del data[position:]
        else:
            data[position] ^= flip
        path.write_bytes(data)
        cache.entries()
        assert cache.get(key) is None
        assert not path.exists()
        put(cache)
        assert cache.get(key) == b"code"


def test_junk_in_the_directory_is_ignored(tmp_path: Path) -> None:
    cache = GraphCache(tmp_path)
    key = put(cache)
    shard = file_of(cache, key).parent
    (tmp_path / "v1" / "readme").write_text("hello")
    (shard / "notes.txt").write_text("hello")
    (shard / ("f" * 64 + ".entry")).write_text("misplaced")
    (shard / f"{key[:2]}{'0' * 62}.entry").mkdir()
    (shard / f"{key[:2]}{'1' * 62}.entry").write_bytes(b"LLMCENT1\xff\xff\xff\xff")
    (shard / f"{key[:2]}{'2' * 62}.entry").symlink_to("/nonexistent")
    assert [e.key for e in cache.entries()] == [key]
    assert cache.get(f"{key[:2]}{'0' * 62}") is None
    assert cache.why({**COMPONENTS, "ir": "x"}) is not None
    assert f"{key[:2]}{'1' * 62}" in cache.verify().damaged
    collect(cache, max_size=10**9)
    assert cache.export(None, tmp_path / "x.tar") == 1
    assert cache.get(key) == b"code"


def test_the_root_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = GraphCache(tmp_path / "file")
    assert cache.get(key_of(COMPONENTS)) is None
    assert cache.entries() == []
    with pytest.raises(CacheError, match="cannot write cache entry"):
        put(cache)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = GraphCache(tmp_path)
    old = put(cache, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CacheError, match="No space left"):
            put(cache, b"new")
        with pytest.raises(CacheError, match="No space left"):
            put(cache, b"new", ir="other")
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [f"{old}.entry"]
    assert cache.get(old) == b"old"


_WRITER = """
import sys
from pathlib import Path
from llmc.compiler.store.cache import GraphCache, key_of
cache = GraphCache(Path(sys.argv[1]))
print("ready", flush=True)
for i in range(int(sys.argv[2])):
    components = {"kind": "kernel", "ir": str(i % 20)}
    payload = str(i % 20).encode() * 20000
    cache.put(key_of(components), payload, components, {})
    assert cache.get(key_of(components)) == payload
"""


def test_concurrent_writers(tmp_path: Path) -> None:
    writers = [run_python(_WRITER, str(tmp_path), "60") for _ in range(4)]
    for writer in writers:
        writer.communicate(timeout=120)
    assert [w.returncode for w in writers] == [0] * 4
    cache = GraphCache(tmp_path)
    assert len(cache.entries()) == 20
    assert cache.verify().damaged == ()
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".entry"] == []


def test_a_killed_writer_leaves_whole_entries(tmp_path: Path) -> None:
    for delay in (0.01, 0.03, 0.06):
        writer = run_python(_WRITER, str(tmp_path), "1000000")
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        assert writer.returncode == -signal.SIGKILL
    cache = GraphCache(tmp_path)
    report = cache.verify()
    assert report.damaged == ()
    assert report.checked == len(cache.entries())


def test_collection_is_by_last_use(tmp_path: Path) -> None:
    cache = GraphCache(tmp_path)
    keys = [put(cache, bytes(1000), ir=str(i)) for i in range(4)]
    for age, key in zip((400, 300, 200, 100), keys, strict=True):
        os.utime(file_of(cache, key), (time.time() - age,) * 2)
    assert cache.get(keys[0]) is not None
    size = cache.entries()[0].file_bytes
    dry = collect(cache, max_size=3 * size + 10, dry_run=True)
    assert dry.removed == (keys[1],)
    assert len(cache.entries()) == 4
    assert collect(cache, max_size=3 * size + 10) == dry
    assert collect(cache, older_than=150.0).removed == (keys[2],)
    assert {e.key for e in cache.entries()} == {keys[0], keys[3]}
    assert collect(cache, max_size=0).kept == 0


def test_leftovers_of_killed_writers_are_collected(tmp_path: Path) -> None:
    cache = GraphCache(tmp_path)
    shard = file_of(cache, put(cache)).parent
    old, young = shard / ".tmp-1-a", shard / ".tmp-1-b"
    old.write_text("")
    young.write_text("")
    os.utime(old, (1, 1))
    collect(cache, older_than=1e9)
    assert (old.exists(), young.exists()) == (False, True)


def test_why_names_what_differs(tmp_path: Path) -> None:
    cache = GraphCache(tmp_path)
    assert cache.why(COMPONENTS) is None
    near = put(cache, target="haswell")
    put(cache, target="haswell", ir="x", op="norm")
    found = cache.why({**COMPONENTS, "llvm": "22"})
    assert found is not None
    assert found.entry.key == near
    assert [(d.name, d.old, d.new) for d in found.differences] == [
        ("llvm", None, "22"),
        ("target", "haswell", "znver4"),
    ]
    exact = cache.why({**COMPONENTS, "target": "haswell"})
    assert exact is not None
    assert exact.differences == ()


def test_export_and_import(tmp_path: Path) -> None:
    cache, other = GraphCache(tmp_path / "a"), GraphCache(tmp_path / "b")
    keys = sorted(put(cache, bytes([i]), ir=str(i)) for i in range(3))
    assert cache.export(None, tmp_path / "all.tar") == 3
    assert cache.export(keys[:1], tmp_path / "one.tar") == 1
    assert other.import_(tmp_path / "one.tar").added == (keys[0],)
    report = other.import_(tmp_path / "all.tar")
    assert (report.added, report.present) == (tuple(keys[1:]), (keys[0],))
    assert all(other.get(key) == cache.get(key) for key in keys)
    with pytest.raises(CacheError, match="missing or damaged"):
        cache.export(["0" * 64], tmp_path / "none.tar")
    assert not (tmp_path / "none.tar").exists()


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "x/../" + "0" * 64 + ".entry", "0" * 64 + ".entry", "link"])
def test_a_bad_archive_adds_nothing(tmp_path: Path, name: str) -> None:
    source, cache = GraphCache(tmp_path / "a"), GraphCache(tmp_path / "b")
    put(source)
    source.export(None, tmp_path / "x.tar")
    with tarfile.open(tmp_path / "x.tar", "a") as tar:
        info = tarfile.TarInfo(name if name != "link" else "0" * 64 + ".entry")
        if name == "link":
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(info)
        else:
            info.size = 4
            tar.addfile(info, io.BytesIO(b"evil"))
    with pytest.raises(CacheError):
        cache.import_(tmp_path / "x.tar")
    assert cache.entries() == []
    assert not (tmp_path / "evil").exists()


@given(st.binary(max_size=2000))
def test_junk_is_no_archive(junk: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.tar")
        path.write_bytes(junk)
        cache = GraphCache(Path(folder, "c"))
        try:
            cache.import_(path)
        except CacheError as error:
            assert "\n" not in str(error)  # noqa: PT017
        assert cache.entries() == []


def test_commands(tmp_path: Path) -> None:
    cache = GraphCache(tmp_path / "c")
    at = ("--cache-dir", str(cache.root))
    assert "0 entries" in invoke("ls", *at)[1]
    key = put(cache)
    assert key[:16] in invoke("ls", *at)[1]
    assert json.loads(invoke("ls", "--json", *at)[1])["entries"][0]["key"] == key
    assert "znver4" in invoke("show", key[:8], *at)[1]
    assert json.loads(invoke("show", key, "--json", *at)[1])["components"] == COMPONENTS
    assert invoke("verify", *at)[0] == 0
    archive = str(tmp_path / "x.tar")
    assert "1 entries" in invoke("export", archive, key[:8], *at)[1]
    assert "would remove 1" in invoke("gc", "--max-size", "0", "--dry-run", *at)[1]
    assert json.loads(invoke("gc", "--older-than", "0s", "--json", *at)[1])["removed"] == [key]
    assert "1 entries added" in invoke("import", archive, *at)[1]
    path = file_of(cache, key)
    path.write_bytes(path.read_bytes()[:-1])
    code, output = invoke("verify", *at)
    assert code == 1
    assert key in output


@pytest.mark.parametrize(
    "arguments", [["gc"], ["gc", "--max-size", "big"], ["gc", "--older-than", "-3d"], ["ls", "-x"]]
)
def test_usage_errors_exit_with_2(arguments: list[str]) -> None:
    assert invoke(*arguments)[0] == 2


def test_why_of_an_artifact(tmp_path: Path) -> None:
    cache = GraphCache(tmp_path / "c")
    at = ("--cache-dir", str(cache.root))
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    kernels = [
        {"symbol": name, "key": key_of(c), "components": c}
        for name, c in (("linear_0", COMPONENTS), ("linear_1", {**COMPONENTS, "target": "znver5"}))
    ]
    (artifact / "manifest.json").write_text(json.dumps({"kernels": kernels}))
    assert "the cache is empty" in invoke("why", str(artifact), *at)[1]
    put(cache)
    code, output = invoke("why", str(artifact), *at)
    assert code == 0
    assert "1 of 2 entries are in the cache" in output
    assert "target: znver4 → znver5" in output
    answers = json.loads(invoke("why", str(artifact), "--json", *at)[1])
    assert answers[0]["cached"]
    assert answers[1]["differences"] == [{"name": "target", "old": "znver4", "new": "znver5"}]
    with pytest.raises(CacheError, match="neither an artifact"):
        invoke("why", str(tmp_path), *at)
    for broken in ({"kernels": 3}, {"kernels": [{"symbol": "x"}]}, {"kernels": [{"symbol": "x", "components": {}}]}):
        (artifact / "manifest.json").write_text(json.dumps(broken))
        with pytest.raises(ManifestError, match=r"manifest\.json does not describe an artifact of this llmc \(kernels"):
            invoke("why", str(artifact), *at)
