"""Local replicas of the router, as processes that answer only what the router asks for."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llmc.cli import main as cli
from llmc.runtime.deploy.server import Server
from llmc.runtime.router import fleet as fleets
from llmc.runtime.router import run, served_process, spawn
from llmc.runtime.router.config import RouterConfig, SpawnPlan
from llmc.runtime.router.fleet import Fleet
from llmc.runtime.router.run import route
from llmc.runtime.router.served_process import ServedProcess
from llmc.runtime.router.spawn import Spawner
from llmc.runtime.router.upstream import ReplicaLost, Upstream
from llmc.runtime.server.run import ServerError

SERVER = """
import os, socket, sys
artifact = sys.argv[1]
if os.path.exists(artifact + "/broken") and os.path.exists(artifact + "/started"):
    sys.exit("it is broken")
open(artifact + "/started", "w").close()
listener = socket.create_server(("127.0.0.1", 0))
print(f"llmc: ready: m at http://127.0.0.1:{listener.getsockname()[1]}/v1", file=sys.stderr, flush=True)
body = '{"data": [{"id": "m", "artifact": "%s"}]}' % artifact
while True:
    connection, _ = listener.accept()
    connection.recv(4096)
    head = f"HTTP/1.1 200 OK\\r\\ncontent-length: {len(body)}\\r\\nconnection: close\\r\\n\\r\\n"
    connection.sendall((head + body).encode())
    connection.close()
"""


@asynccontextmanager
async def spawned(artifact: Path, count: int) -> AsyncIterator[tuple[Fleet, Spawner]]:
    """Replicas that are ready."""
    fleet = Fleet(RouterConfig(health_interval_s=0.05))
    spawner = Spawner(fleet, lambda _: None)
    spawner.start(SpawnPlan(str(artifact), count, (sys.executable, "-S", "-c", SERVER)))
    try:
        async with asyncio.timeout(120):
            await until(lambda: all(one.ready for one in fleet.replicas.values()))
            yield fleet, spawner
    finally:
        await spawner.close()
        await fleet.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_an_update_that_failed_can_be_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second replica does not start, while the first one that was replaced still has a request."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    (new / "broken").touch()
    for module in (fleets, spawn):
        monkeypatch.setattr(module, "_LOOK_S", 0.01)

    async def run() -> None:
        async with spawned(old, 2) as (fleet, spawner):
            fleet.replicas["r0"].begin()
            await spawner.update(None, str(new))
            await until(lambda: not spawner.updating)
            assert set(fleet.replicas) == {"r0", "r1", "r2"}
            (new / "broken").unlink()
            assert await spawner.update("m", str(new)) == {"updating": ["r1", "r2"]}
            fleet.replicas["r0"].end()
            await until(lambda: not spawner.updating and len(fleet.replicas) == 2)
            assert {one.artifact for one in fleet.replicas.values()} == {str(new)}

    with caplog.at_level(logging.WARNING, "llmc.router"):
        asyncio.run(run())
    # Replicas that were told to stop are not lost.
    assert caplog.messages == [
        "replica r3 is started again: ended with exit code 1; its last line: it is broken",
        "the update ends here: r3 does not start: ended with exit code 1; its last line: it is broken",
    ]


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = ServedProcess.start, list[str]()

    async def refuse_once(process: ServedProcess) -> None:
        if not refused:
            refused.append("fork")
            raise BlockingIOError(11, "Resource temporarily unavailable")
        await start(process)

    monkeypatch.setattr(ServedProcess, "start", refuse_once)

    async def run() -> None:
        async with spawned(tmp_path, 1) as (fleet, _):
            assert refused
            assert fleet.replicas["r0"].ready

    asyncio.run(run())


def test_a_request_that_still_connects_moves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is gone answers no SYN, and Linux tries for two minutes."""

    async def run() -> None:
        loop, connecting = asyncio.get_running_loop(), list[bool]()

        async def never(*_: object, **__: object) -> None:
            connecting.append(True)
            await asyncio.Event().wait()

        monkeypatch.setattr(loop, "create_connection", never)
        upstream = Upstream("http://127.0.0.1:1")
        asked = [asyncio.create_task(upstream.request("GET", b"/", [], b"")) for _ in range(2)]
        await until(lambda: len(connecting) == 2)
        upstream.abort_all()
        upstream.abort_all()
        for one in asked:
            with pytest.raises(ReplicaLost, match="no connection was made in time"):
                await one

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_command_line_that_no_replica_takes_ends_the_router() -> None:
    refuses = "import sys; print('llmc: error: --role up is unknown', file=sys.stderr); sys.exit(2)"
    plan = SpawnPlan("model.llmc", 2, (sys.executable, "-S", "-c", refuses))
    with pytest.raises(
        ServerError, match=r"replica r[01] ended with exit code 2; its last line: .*--role up is unknown"
    ):
        route(RouterConfig(port=0, spawn=(plan,)), say=lambda _: None, on_ready=lambda _: None)


def test_one_that_ends_for_another_reason_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "broken").touch()
    (tmp_path / "started").touch()

    async def run() -> None:
        fleet = Fleet(RouterConfig(health_interval_s=0.05))
        spawner = Spawner(fleet, lambda _: None)
        spawner.start(SpawnPlan(str(tmp_path), 1, (sys.executable, "-S", "-c", SERVER)))
        try:
            async with asyncio.timeout(120):
                await until(lambda: "is started again" in caplog.text)
                assert spawner.refused is None
                (tmp_path / "broken").unlink()
                await until(lambda: fleet.replicas["r0"].ready)
        finally:
            await spawner.close()
            await fleet.close()

    asyncio.run(run())
    assert "it is broken" in caplog.text


@pytest.mark.parametrize(
    ("ignored", "most_s", "how"),
    [(["SIGTERM"], 3600.0, "exit code 3"), (["SIGTERM", "SIGINT"], 0.2, "killed by signal 9")],
)
def test_a_process_that_must_end_at_once(
    ignored: list[str], most_s: float, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second signal comes, and then it is killed."""
    monkeypatch.setattr(served_process, "_HURRY_S", most_s)
    script = f"""
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(3))
for name in {ignored}:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
print("started", file=sys.stderr, flush=True)
time.sleep(3600)
"""

    async def run() -> None:
        started = asyncio.Event()
        process = ServedProcess((sys.executable, "-S", "-c", script), lambda _: started.set(), lambda _: None)
        await process.start()
        ending = asyncio.create_task(process.ended())
        await started.wait()
        await process.stop(3600, lambda: True)
        assert how in await ending

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("flags", ["--access-log-file {}", "--access-log-file={}", "--threads 1"])
def test_a_file_of_the_access_log_is_written(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last of two flags that exclude each other, `llmc serve` takes the value."""
    routed = list[RouterConfig]()
    monkeypatch.setattr(run, "route", lambda config, **options: routed.append(config))
    flags = flags.format(tmp_path / "log")
    assert cli.main(["route", "--spawn", "1", str(tmp_path), "--serve-flags", flags]) == 0
    server = Server(str(tmp_path), flags.split(), "127.0.0.1", None)
    for command in (routed[0].spawn[0].command, server.process._command):
        assert ("--no-access-log" in command) == (str(tmp_path / "log") not in flags)
