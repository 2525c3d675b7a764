"""An engine of bench/peers that takes no time: a worker and a server with made-up figures, and made-up limits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

from bench.peers.engines.base import WORKERS, Engine, Prepared, Variant
from bench.peers.environment import Skip
from bench.peers.process import Command

from support.paths import ROOT

# Every request is a line of `log`; op "prefill" of `fails` tokens fails, of `dies` tokens ends the process.
WORKER = f"""
import os, sys, time
sys.path.insert(0, {str(WORKERS)!r})
import worker

class Fake(worker.Model):
    def __init__(self, settings):
        if settings.get("broken"):
            raise ValueError("no weights here")
        self.settings, self.version, self.details = settings, "1.0", {{"kind": "fake"}}
        print("chatter on stdout")
        self.note("load")

    def note(self, *words):
        with open(self.settings["log"], "a") as log:
            print(self.settings["name"], *words, file=log)

    def prefill(self, tokens, seed):
        self.note("prefill", tokens)
        if tokens == self.settings.get("fails"):
            raise MemoryError("too long")
        if tokens == self.settings.get("dies"):
            os._exit(7)
        return tokens / self.settings["speed"]

    def decode(self, batch, context, steps, seed):
        self.note("decode", batch)
        return steps / self.settings["speed"], batch * steps

    def offline(self, requests, streams, input_len, output_len, seed):
        self.note("offline", requests)
        return {{"seconds": 2.0, "output_tokens": requests * output_len}}

worker.serve(Fake)
"""

SERVER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from support.stub_server import Stub

async def run():
    server = await asyncio.start_server(Stub().serve, "127.0.0.1", int(sys.argv[2]))
    await server.serve_forever()

asyncio.run(run())
"""


class Fake(Engine):
    """speed: tok/s of prompts, steps/s of decode. options go to the worker."""

    name: ClassVar[str] = "fake"
    variants: ClassVar[tuple[Variant, ...]] = (Variant("plain", "16-bit", ("bf16", "f32")),)
    speed: float = 100.0
    options: ClassVar[dict[str, Any]] = {}
    memory_base = 1000
    memory_factor = 1.0
    no_install = ""
    no_model = ""
    serves = False

    @property
    def log(self) -> Path:
        return self.workspace.root / "requests.log"

    def install(self) -> None:
        if self.no_install:
            raise Skip(self.no_install)
        self.workspace.root.mkdir(parents=True, exist_ok=True)
        (self.workspace.root / "worker.py").write_text(WORKER)
        (self.workspace.root / "server.py").write_text(SERVER)

    def install_bytes(self) -> int:
        return 5 << 20

    def prepare(self, model: str, variant: Variant) -> Prepared:
        if self.no_model:
            raise Skip(self.no_model)
        path = self.workspace.model(model)
        path.mkdir(parents=True, exist_ok=True)
        return Prepared(path, 2_000_000)

    def worker(self, prepared: Prepared, variant: Variant) -> Command:
        script = str(self.workspace.root / "worker.py")
        options = {"log": str(self.log), "name": self.name, "speed": self.speed, **self.options}
        command = self.command(Path(sys.executable), script, prepared, **options)
        return Command((command.argv[0], script, command.argv[2]), ready_s=60)

    def server(self, prepared: Prepared, variant: Variant, port: int) -> Command | None:
        script = str(self.workspace.root / "server.py")
        return (
            Command((sys.executable, script, str(ROOT / "tests"), str(port)), ready_s=60, ready_path="/v1/models")
            if self.serves
            else None
        )


class ReadOff:
    """Limits that rise by one a measurement: 1e9, 2e9, … operations or bytes a second."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def measure(self, limit: str, seconds: float) -> float | None:
        assert seconds > 0
        self.asked.append(limit)
        return len(self.asked) * 1e9
