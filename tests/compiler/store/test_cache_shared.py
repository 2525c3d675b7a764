"""A cache directory shared by many processes, and the artifacts in a cache."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from llmc.cli.main import main
from llmc.compiler.store import cache as module
from llmc.compiler.store.cache import CacheError, GraphCache, key_of
from llmc.compiler.store.cached_artifacts import cached_artifacts, mark_used
from llmc.compiler.store.collect import collect
from llmc.held_artifact import hold, lock_file, move_unless_held
from llmc.model_artifact import given_artifact
from llmc.regular_file import read_regular

PROCESSES = 16
COPY = """
import sys
from pathlib import Path
from llmc.compiler.store.cache import GraphCache
source, target = map(Path, sys.argv[1:3])
print("ready", flush=True)
sys.stdin.read(1)
report = GraphCache(target).copy_from(GraphCache(source))
print(len(report.added))
"""


def put(cache: GraphCache, number: int, size: int = 5000) -> str:
    components = {"kind": "kernel", "op": "linear", "number": str(number)}
    key = key_of(components)
    cache.put(key, bytes([number % 251]) * size, components, {"symbol": f"linear_{number}"})
    return key


def holds(cache: Path, least: int) -> bool:
    return len(list(cache.rglob("*.entry"))) >= least


def begin(source: Path, target: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", COPY, source, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"x")
    process.stdin.flush()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for a minute"
        time.sleep(0.001)


def test_sixteen_processes_write_each_entry_once(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    keys = set()
    for index in range(PROCESSES):
        cache = GraphCache(tmp_path / str(index))
        # Neighbours have half of their entries in common.
        keys |= {put(cache, number) for number in range(index * 10, index * 10 + 20)}
    running = [begin(tmp_path / str(index), shared) for index in range(PROCESSES)]
    for process in running:
        go(process)
    added = [int(process.communicate()[0]) for process in running]
    assert [process.returncode for process in running] == [0] * PROCESSES
    assert {entry.key for entry in GraphCache(shared).entries()} == keys
    assert sum(added) == len(keys)
    report = GraphCache(shared).verify()
    assert (report.checked, report.damaged, report.unreadable) == (len(keys), (), ())
    assert [file.name for file in shared.rglob(".tmp-*")] == []


def test_killed_processes_leave_whole_entries_and_no_lock(tmp_path: Path) -> None:
    """Of sixteen that fill one cache every second is killed in the midst of it; the others finish."""
    source, shared = tmp_path / "source", tmp_path / "shared"
    keys = {put(GraphCache(source), number, 1 << 16) for number in range(400)}
    running = [begin(source, shared) for _ in range(PROCESSES)]
    killed, spared = running[::2], running[1::2]
    for process in killed:
        go(process)
    written = 0
    for process in killed:
        # Each dies some entries after the one before.
        wait_for(partial(holds, shared, written + 1))
        process.send_signal(signal.SIGKILL)
        written = len(list(shared.rglob("*.entry")))
    assert [process.wait() for process in killed] == [-signal.SIGKILL] * len(killed)
    assert 0 < len(GraphCache(shared).entries()) < len(keys)
    assert GraphCache(shared).verify().damaged == ()
    # Whoever comes next neither waits for the dead nor trips over what they left.
    for process in spared:
        go(process)
    for process in spared:
        process.communicate()
    assert [process.returncode for process in spared] == [0] * len(spared)
    assert {entry.key for entry in GraphCache(shared).entries()} == keys
    assert GraphCache(shared).verify().damaged == ()
    for stale in shared.rglob(".tmp-*"):
        os.utime(stale, (0, 0))
    collect(GraphCache(shared), older_than=1e9)
    assert [file.name for file in shared.rglob(".tmp-*")] == []
    assert len(GraphCache(shared).entries()) == len(keys)


def test_damage_is_not_passed_on_but_mended(tmp_path: Path) -> None:
    here, shared = GraphCache(tmp_path / "here"), GraphCache(tmp_path / "shared")
    keys = [put(here, number) for number in range(3)]
    shared.copy_from(here)
    for cache, key in ((here, keys[0]), (shared, keys[1])):
        path = next(cache.root.rglob(f"{key}.entry"))
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    report = shared.copy_from(here)
    assert (report.added, report.present) == ((keys[1],), (keys[2],)) or set(report.added) == {keys[1]}
    assert shared.verify().damaged == ()
    with pytest.raises(CacheError, match="is missing or damaged"):
        GraphCache(tmp_path / "other").copy_from(here, [keys[0]])


def test_an_entry_that_cannot_be_read_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = GraphCache(tmp_path)
    bad, good = put(cache, 1), put(cache, 2)

    def broken(path: Path, most: int) -> bytes:
        if path.name.startswith(bad):
            raise OSError(5, "Input/output error")
        return read_regular(path, most)

    monkeypatch.setattr(module, "read_regular", broken)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_unlink", lambda _: False)
        report = cache.verify()
        assert (report.damaged, report.unreadable) == ((), (bad,))
    report = cache.verify()
    assert (report.checked, report.damaged, report.unreadable) == (2, (bad,), ())
    assert [entry.key for entry in cache.entries()] == [good]


def make_artifact(root: Path, number: int, size: int, age_s: float) -> Path:
    path = root / "artifacts" / f"{number:064x}"
    path.mkdir(parents=True)
    (path / "graphs.bin").write_bytes(b"x" * size)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_artifacts_are_listed_and_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = GraphCache(tmp_path)
    key = put(cache, 1)
    old, used = make_artifact(tmp_path, 1, 70_000, 1e6), make_artifact(tmp_path, 2, 50_000, 1e6)
    (tmp_path / "artifacts" / "notes").write_text("mine")
    mark_used(used)
    assert [a.path for a in cached_artifacts(tmp_path)] == [old, used]
    assert main(["cache", "ls", "--cache-dir", str(tmp_path)]) == 0
    assert "2 artifacts, 117.2 KiB" in capsys.readouterr().out
    assert main(["cache", "ls", "--cache-dir", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["artifacts"]) == 2
    assert set(collect(cache, older_than=1e5, dry_run=True).removed) == {old.name}
    assert old.exists()
    held = (old / "graphs.bin").open("rb")
    report = collect(cache, older_than=1e5)
    assert (report.removed, report.kept) == ((old.name,), 2)
    assert not old.exists()
    assert len(held.read()) == 70_000
    held.close()
    assert cache.entry(key) is not None
    report = collect(cache, max_size=10_000)
    assert report.removed == (used.name,) or key in report.removed
    assert not used.exists()
    assert [file.name for file in (tmp_path / "artifacts").iterdir()] == ["notes"]


def exchange(artifact: Path, other: Path) -> None:
    """As `llmc compile --add` does in place."""
    former = artifact.with_name("former")
    artifact.rename(former)
    other.rename(artifact)
    shutil.rmtree(former)


HOLD = "from llmc.held_artifact import hold; print(hold(Path(sys.argv[1])))"
# As `llmc serve` with the path that `llmc cache ls` shows.
GIVEN = "from llmc.model_artifact import given_artifact; print(given_artifact(Path(sys.argv[1])) is not None)"


@pytest.mark.parametrize("use", [HOLD, GIVEN])
@pytest.mark.parametrize("exchanged", [False, True])
def test_an_artifact_in_use_is_left_until_its_process_ends(tmp_path: Path, exchanged: bool, use: str) -> None:
    artifact, unused = make_artifact(tmp_path, 1, 10, 1e6), make_artifact(tmp_path, 2, 10, 1e6)
    code = f"import sys; from pathlib import Path; {use}"
    users = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", f"{code}; sys.stdout.flush(); sys.stdin.read()", str(artifact)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for user in users:
        assert user.stdout is not None
        assert user.stdout.readline() == "True\n"
    if exchanged:
        exchange(artifact, make_artifact(tmp_path, 3, 10, 1e6))
    report = collect(GraphCache(tmp_path), max_size=0)
    assert (report.removed, report.kept, report.kept_bytes) == ((unused.name,), 1, 10)
    for user in users:
        user.communicate()
    assert collect(GraphCache(tmp_path), max_size=0).removed == (artifact.name,)
    assert not hold(artifact)
    assert list((tmp_path / "artifacts").iterdir()) == []


def test_a_link_holds_the_cached_artifact_that_it_leads_to(tmp_path: Path) -> None:
    artifact, link = make_artifact(tmp_path, 1, 10, 1e6), tmp_path / "served.llmc"
    link.symlink_to(artifact)
    assert given_artifact(link) == link
    assert collect(GraphCache(tmp_path), max_size=0).removed == ()
    assert artifact.exists()


def test_a_given_artifact_elsewhere_gets_no_lock(tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path, 1, 10, 0).rename(tmp_path / "mine.llmc")
    assert given_artifact(artifact) == artifact
    assert given_artifact(tmp_path) is None
    assert not lock_file(artifact).exists()


@pytest.mark.parametrize("locked", ["beside", "inside"])
def test_what_a_collection_is_about_to_move_cannot_be_held(
    locked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """inside: the cache cannot be written, so there is no lock beside the artifact."""
    artifact, found = make_artifact(tmp_path, 1, 10, 0), list[bool]()
    flock, asks, open_ = fcntl.flock, threading.Event(), os.open

    def noted(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH:
            asks.set()
        flock(descriptor, operation)

    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return open_(path, flags, mode)

    with lock_file(artifact).open("w") if locked == "beside" else (artifact / "graphs.bin").open("rb") as collected:
        fcntl.flock(collected, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", noted)
        if locked == "inside":
            monkeypatch.setattr(os, "open", read_only)
        holder = threading.Thread(target=lambda: found.append(hold(artifact)), daemon=True)
        holder.start()
        assert asks.wait(60)
        assert not found
        artifact.rename(tmp_path / "going")
    holder.join()
    assert found == [False]


def test_a_collection_that_comes_second_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has opened the lock that the first one then removes, and the artifact is compiled and held again."""
    artifact, flock = make_artifact(tmp_path, 1, 10, 0), fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        assert move_unless_held(artifact, tmp_path / "first")
        assert hold(make_artifact(tmp_path, 1, 10, 0))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert not move_unless_held(artifact, tmp_path / "second")
    assert not move_unless_held(artifact, tmp_path / "third")


def test_an_artifact_is_held_by_one_descriptor(tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path, 1, 10, 0)
    for path in (artifact, artifact, artifact.parent / ".." / "artifacts" / artifact.name):
        before = len(os.listdir("/proc/self/fd"))
        assert hold(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_is_held_and_left(tmp_path: Path) -> None:
    elsewhere = make_artifact(tmp_path / "elsewhere", 1, 10, 0)
    link = make_artifact(tmp_path, 2, 10, 0).with_name(elsewhere.name)
    link.symlink_to(elsewhere)
    assert hold(link)
    assert not move_unless_held(link, tmp_path / "going")


def test_what_may_not_be_seen_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = make_artifact(tmp_path, 1, 10, 0)

    def refuse(path: Path, **_: object) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    assert not hold(artifact)


def test_a_full_disk_can_be_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, unused = make_artifact(tmp_path, 1, 10, 0), make_artifact(tmp_path, 2, 10, 0)
    assert hold(held)
    open_ = os.open

    def full(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and not path.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_(path, flags, mode)

    monkeypatch.setattr(os, "open", full)
    assert not move_unless_held(held, tmp_path / "going")
    assert move_unless_held(unused, tmp_path / "gone")


def test_a_held_artifact_is_left_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, a lock that others may not share needs a file that is open for writing."""
    flock, open_ = fcntl.flock, os.open

    def nfs(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    artifact, *unused = (make_artifact(tmp_path, number, 10, 0) for number in range(1, 4))
    assert hold(artifact)
    monkeypatch.setattr(fcntl, "flock", nfs)
    assert not move_unless_held(artifact, tmp_path / "going")
    assert move_unless_held(unused[0], tmp_path / "first")

    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "Read-only file system")
        return open_(path, flags, mode)

    # What cannot be written is left: nobody can tell whether it is held.
    monkeypatch.setattr(os, "open", read_only)
    for path in (artifact, unused[1]):
        assert not move_unless_held(path, tmp_path / "going")
    monkeypatch.setattr(fcntl, "flock", flock)
    assert not move_unless_held(artifact, tmp_path / "going")
    assert move_unless_held(unused[1], tmp_path / "second")


def test_what_interrupted_collections_and_compilations_left(tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path, 1, 10, 0)
    going = tmp_path / "artifacts" / ".going-0123456789abcdef"
    going.mkdir()
    (going / "kernels.so").write_bytes(b"x")
    staging = artifact.with_name(f"{artifact.name}.tmp-01234567")
    staging.mkdir()
    lock_file(artifact.with_name(f"{2:064x}")).touch()  # of one that was removed by hand
    assert collect(GraphCache(tmp_path), older_than=1e9).removed == ()
    assert [file.name for file in (tmp_path / "artifacts").iterdir()] == [artifact.name]


def test_the_commands_share_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, there, shared = tmp_path / "here", tmp_path / "there", tmp_path / "shared"
    keys = [put(GraphCache(here), number) for number in range(3)]
    shared.mkdir()
    assert main(["cache", "export", str(shared), keys[0], "--cache-dir", str(here), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["added"] == [keys[0]]
    assert main(["cache", "export", str(shared), "--cache-dir", str(here)]) == 0
    assert "2 entries added, 1 were there already" in capsys.readouterr().out
    assert main(["cache", "import", str(shared), "--cache-dir", str(there)]) == 0
    assert {entry.key for entry in GraphCache(there).entries()} == set(keys)
    # The shared directory is a cache.
    assert main(["cache", "verify", "--cache-dir", str(shared)]) == 0
