"""Handles an engine's misses: records them, and compiles what they lacked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmc.runtime.misses.background import BackgroundCompiler, log_news
from llmc.runtime.misses.options import MissOptions
from llmc.runtime.misses.record import MissRecorder
from llmc.runtime.misses.watch import LOOK_S, MissWatch, OnMisses

if TYPE_CHECKING:
    from llmc.runtime.binding import GraphInfo


class EngineOwner(Protocol):
    """The owner of an engine, such as `LLM` and the server's engine. add_graphs: thread-safe."""

    path: Path
    artifact: Any
    engine: Any
    graphs: list[GraphInfo]

    def add_graphs(self, path: Path) -> int: ...


class MissHandling:
    """Starts immediately. Close it before the engine."""

    def __init__(self, owner: EngineOwner, options: MissOptions, look_s: float = LOOK_S) -> None:
        self._compiler: BackgroundCompiler | None = None
        self._watch: MissWatch | None = None
        observers: list[OnMisses] = []
        if options.record is not None:
            block_size = int(owner.artifact.info.block_size)
            observers.append(MissRecorder(options.record, lambda: owner.graphs, block_size).take)
        if options.policy == "background":
            tell = options.on_bucket_news or log_news
            self._compiler = BackgroundCompiler(owner.path, lambda: owner.graphs, owner.add_graphs, tell)
            observers.append(self._compiler.take)
        if observers:  # most engines need no thread for this
            self._watch = MissWatch(owner.engine, observers, look_s)

    def close(self) -> None:
        """Records the remaining misses, and ends a running compilation; idempotent."""
        if self._watch is not None:
            self._watch.close()
        if self._compiler is not None:
            self._compiler.close()
