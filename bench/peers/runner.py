"""Takes the measurements of a plan, each between two probes of the limit that binds it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.engines.base import Engine, Prepared, Variant
from bench.peers.engines.llmc import LLMC
from bench.peers.environment import Skip, Workspace
from bench.peers.machine_limits import Limits
from bench.peers.plan import Entrant, Key, Settings
from bench.peers.process import Command, PeerError, Worker, end, last_line, server, start
from bench.peers.store import Measurement, Store
from bench.processes import tree_memory

PROBE_S = 0.3
MEMORY_SAMPLES_PER_S = 10
CLIENT_S = 3600


@dataclass(frozen=True)
class Contender:
    """An engine at one precision on one model, ready to be measured."""

    engine: Engine
    variant: Variant
    prepared: Prepared
    limit: str
    """Name of the limit that binds its prefill."""

    def entrant(self) -> Entrant:
        engine, extras = self.engine, []
        if engine.native_start(self.prepared, self.variant) is not None:
            extras.append("start-native")
        if engine.server(self.prepared, self.variant, 0) is not None:
            extras.append("serve")
        if engine.offline:
            extras.append("offline")
        return Entrant(engine.name, self.variant.name, engine.resident_bytes(self.prepared), tuple(extras))


class Runner:
    """Takes measurements and stores them. Close it to end all workers."""

    def __init__(
        self,
        workspace: Workspace,
        settings: Settings,
        store: Store,
        limits: Limits,
        contenders: dict[tuple[str, str, str], Contender],
    ) -> None:
        """contenders: by (model, engine, variant)."""
        self.workspace, self.settings, self.store, self.limits = workspace, settings, store, limits
        self.contenders = contenders
        self._workers: dict[tuple[str, str, str], Worker] = {}
        self._warm: set[tuple[tuple[str, str, str], str]] = set()
        self._group: tuple[object, ...] | None = None

    def run(self, plan: Iterable[tuple[tuple[object, ...], Key]], stop_at: float | None = None,
            progress: Callable[[Key, Measurement | None], None] = lambda key, found: None) -> bool:  # fmt: skip
        """Takes measurements that are not in the store yet; returns False if time.monotonic() passed `stop_at` first.

        progress: called before a measurement with None and after it.
        """
        done = self.store.done()
        for group, key in plan:
            if key in done:
                continue
            if stop_at is not None and time.monotonic() >= stop_at:
                return False
            if group != self._group:
                self.close()
                self._group = group
            progress(key, None)
            found = self.measure(key)
            self.store.add(found)
            progress(key, found)
        return True

    def measure(self, key: Key) -> Measurement:
        """Takes one measurement. A peer's failure is stored in it."""
        contender = self.contenders[key.model, key.engine, key.variant]
        take = {
            "prefill": self._speed,
            "decode": self._speed,
            "start": self._start,
            "start-native": self._start_native,
            "memory": self._memory,
            "serve": self._serve,
            "offline": self._offline,
        }[key.kind]
        try:
            value, limits, details = take(key, contender)
        except PeerError as error:
            return Measurement(key, None, error=str(error), at=time.time())
        return Measurement(key, value, limits, details, at=time.time())

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._warm.clear()

    def _worker(self, key: Key, contender: Contender) -> Worker:
        name = (key.model, key.engine, key.variant)
        worker = self._workers.get(name)
        if worker is None or not worker.alive:
            self._warm = {(other, figure) for other, figure in self._warm if other != name}
            worker = Worker(contender.engine.worker(contender.prepared, contender.variant), self._log(key))
            self._workers[name] = worker
            self._note_version(key, worker)
        return worker

    def _note_version(self, key: Key, worker: Worker) -> None:
        known = self.store.engines.setdefault(key.engine, {})
        if worker.version not in known.setdefault("versions", []):
            known["versions"].append(worker.version)
        known.setdefault("details", {})[key.variant] = worker.details

    def _log(self, key: Key) -> Path:
        return self.workspace.log(f"{key.model}-{key.engine}-{key.variant}")

    def _speed(self, key: Key, contender: Contender) -> tuple[float, dict[str, float], dict[str, Any]]:
        """Measures tok/s of a prompt, or of all sequences of a batch."""
        worker = self._worker(key, contender)
        request: dict[str, Any] = {"op": "prefill", "tokens": key.size}
        limit = contender.limit
        if key.kind == "decode":
            steps = {"context": self.settings.context, "steps": self.settings.steps}
            request, limit = {"op": "decode", "batch": key.size, **steps}, "read"
        warmed = (key.model, key.engine, key.variant), key.figure
        if warmed not in self._warm:
            worker.ask(**request, seed=10_000 + key.size)
            self._warm.add(warmed)
        before = self.limits.measure(limit, PROBE_S)
        answer = worker.ask(**request, seed=key.round * 100 + key.size % 100)
        after = self.limits.measure(limit, PROBE_S)
        assert before is not None
        assert after is not None
        return answer["tokens"] / answer["seconds"], {limit: (before + after) / 2}, {"seconds": answer["seconds"]}

    def _start(self, key: Key, contender: Contender) -> tuple[float, dict[str, float], dict[str, Any]]:
        """Measures seconds from starting a process to its first token, with 16 prompt tokens and a warm page cache."""
        warm_page_cache(contender.prepared.path)
        worker = Worker(contender.engine.worker(contender.prepared, contender.variant), self._log(key), wait=False)
        try:
            worker.send(op="first")
            worker.wait_ready()
            ready = time.perf_counter() - worker.began
            worker.read(600)
            return time.perf_counter() - worker.began, {}, {"ready_s": ready}
        finally:
            worker.close()

    def _start_native(self, key: Key, contender: Contender) -> tuple[float, dict[str, float], dict[str, Any]]:
        """Measures seconds of a whole process without Python that makes one token."""
        warm_page_cache(contender.prepared.path)
        command = contender.engine.native_start(contender.prepared, contender.variant)
        assert command is not None
        return run_to_end(command, self._log(key)), {}, {}

    def _memory(self, key: Key, contender: Contender) -> tuple[float, dict[str, float], dict[str, Any]]:
        """Measures peak bytes of PSS of a worker and its children: loading, 512 prompt tokens and decode at batch 8."""
        worker = Worker(contender.engine.worker(contender.prepared, contender.variant), self._log(key), wait=False)
        peak = 0
        try:
            worker.send(op="prefill", tokens=min(512, max(self.settings.prefills)), seed=1)
            batch = min(8, self.settings.max_batch)
            worker.send(op="decode", batch=batch, context=self.settings.context, steps=8, seed=1)
            answers, deadline = 0, time.monotonic() + 900
            while answers < 3:
                peak = max(peak, tree_memory(worker.process.pid).total)
                if time.monotonic() > deadline:
                    raise PeerError("it gave no answer within 900 s")
                if worker.readable(1 / MEMORY_SAMPLES_PER_S):
                    worker.read(60)
                    answers += 1
            return float(peak), {}, {}
        finally:
            worker.close()

    def _offline(self, key: Key, contender: Contender) -> tuple[float, dict[str, float], dict[str, Any]]:
        """Measures output tok/s of the serving load without HTTP."""
        settings = self.settings
        worker = Worker(contender.engine.worker(contender.prepared, contender.variant), self._log(key))
        self._note_version(key, worker)
        try:
            load = {"streams": settings.streams, "input_len": settings.input_len, "output_len": settings.output_len}
            worker.ask(op="offline", requests=1, **load, seed=9_000 + key.round)
            answer = worker.ask(CLIENT_S, op="offline", requests=settings.requests, **load, seed=key.round)
        finally:
            worker.close()
        return answer["output_tokens"] / answer["seconds"], {}, answer

    def _serve(self, key: Key, contender: Contender) -> tuple[float, dict[str, float], dict[str, Any]]:
        """Measures output tok/s of the server by `llmc bench serve`."""
        settings, port = self.settings, free_port()
        command = contender.engine.server(contender.prepared, contender.variant, port)
        assert command is not None
        url = f"http://127.0.0.1:{port}"
        with server(command, url, self._log(key)), tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            load = [
                "--url", url, "--num-prompts", settings.requests, "--concurrency", settings.streams,
                "--input-len", settings.input_len, "--output-len", settings.output_len, "--strict-in-out-len",
                "--vocab-size", 32000, "--warmup", 2, "--seed", key.round, "--json", "-o", report,
            ]  # fmt: skip
            argv = [*LLMC, "bench", "serve", *map(str, load)]
            try:
                client = subprocess.run(argv, capture_output=True, text=True, timeout=CLIENT_S, check=False)
            except subprocess.TimeoutExpired as error:
                raise PeerError(f"llmc bench serve had no result after {CLIENT_S} s") from error
            if client.returncode:
                said = client.stderr.strip().splitlines() or ["no message"]
                raise PeerError(f"llmc bench serve failed: {said[-1]}")
            found = json.loads(report.read_text())["report"]
        if found["failed"]:
            raise PeerError(f"{found['failed']} of {settings.requests} requests failed: {found['failures']}")
        details = {name: found[name] for name in ("ttft_ms", "tpot_ms", "duration_s") if name in found}
        return found["output_tokens_per_s"], {}, details


def run_to_end(command: Command, log: Path, timeout_s: float = 600.0) -> float:
    """Runs a process and returns its seconds. Raises PeerError if it fails."""
    begin = time.perf_counter()
    process = start(command, log, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        status = process.wait(timeout_s)
        seconds = time.perf_counter() - begin
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"it did not end within {timeout_s:.0f} s") from error
    finally:
        end(process)
    if status:
        raise PeerError(f"it ended with {status}: {last_line(log)}")
    return seconds


def warm_page_cache(path: Path) -> None:
    """Reads a file, or all files of a directory."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(1 << 24):
                    pass


def free_port() -> int:
    """A free port of 127.0.0.1."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def enlist(
    engines: Iterable[Engine],
    models: Iterable[str],
    wanted: Callable[[Engine, Variant], bool],
    supported: frozenset[str],
    store: Store,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> dict[tuple[str, str, str], Contender]:
    """Installs engines and converts models; returns contenders by (model, engine, variant).

    Those that cannot take part are in `store.skipped` with the reason, which `say` prints.
    """
    found: dict[tuple[str, str, str], Contender] = {}

    def skip(name: str, reason: Skip) -> None:
        store.skipped[name] = str(reason)
        say(f"skip {name}: {reason}")

    for engine in engines:
        variants = [variant for variant in engine.variants if wanted(engine, variant)]
        if not variants:
            continue
        try:
            engine.install()
        except Skip as reason:
            skip(engine.name, reason)
            continue
        store.skipped.pop(engine.name, None)
        store.engines.setdefault(engine.name, {})["install_bytes"] = engine.install_bytes()
        for model in models:
            for variant in variants:
                name = f"{model}/{engine.name}/{variant.name}"
                try:
                    prepared = engine.prepare(model, variant)
                except Skip as reason:
                    skip(name, reason)
                    continue
                store.skipped.pop(name, None)
                limit = engine.limit(variant, supported)
                store.prepared[name] = {
                    "weight_bytes": prepared.weight_bytes,
                    "precision": variant.precision,
                    "limit": limit,
                }
                found[model, engine.name, variant.name] = Contender(engine, variant, prepared, limit)
    store.save()
    return found
