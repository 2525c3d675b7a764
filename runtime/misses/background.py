"""The miss policy `background`: compiles the missing graph in another process, then adds it to the running engine."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets.bucket import Bucket

from .aside import CompilerAside

if TYPE_CHECKING:
    from llmc.runtime.binding import GraphInfo
    from llmc.runtime.binding.statistics import BucketMiss

log = logging.getLogger("llmc.misses")
MAX_ADDED = 32
"""Most graphs added by one process; a ladder that lacks more should be planned."""
AddGraphs = Callable[[Path], int]
"""Lets the engine take over the new graphs of an artifact, warmed; returns their number."""


@dataclass(frozen=True)
class BucketNews:
    """The fate of a missed bucket: num_graphs new graphs are in use, compiled in `seconds`; or the reason why it cannot
    be added."""

    bucket: Bucket
    num_graphs: int = 0
    seconds: float = 0.0
    error: str | None = None

    def line(self) -> str:
        """One sentence for a log."""
        if self.error is not None:
            return f"warning: bucket {self.bucket} cannot be added: {self.error}"
        took = f"compiled aside in {self.seconds:.1f} s"
        return f"added bucket {self.bucket}, {took}; {self.num_graphs} new graphs serve from now on"


OnBucketNews = Callable[[BucketNews], None]
"""Called on a separate thread; serving continues meanwhile."""


def log_news(news: BucketNews) -> None:
    """The default callback: logs a warning for a failure, else information."""
    log.log(logging.INFO if news.error is None else logging.WARNING, "%s", news.line())


class BackgroundCompiler:
    """Compiles one bucket at a time, the most missed first, in a separate process.

    The bucket is also added to the artifact, atomically, and to the graph cache. If the artifact is not writable, the
    result lives as long as this object. A failed bucket is not retried.
    """

    def __init__(
        self, artifact: Path, graphs: Callable[[], Sequence[GraphInfo]], add: AddGraphs, tell: OnBucketNews
    ) -> None:
        self._artifact, self._graphs, self._add, self._tell = artifact, graphs, add, tell
        self._missed: Counter[Bucket] = Counter()
        self._tried: set[Bucket] = set()
        self._aside: Path | None = None
        self._compiler = CompilerAside()
        self._lock = threading.Lock()
        self._closing = False
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmc-background", daemon=True)
        self._thread.start()
        # No compilation is left behind even if close is forgotten.
        atexit.register(self.close)

    def take(self, misses: Sequence[BucketMiss]) -> None:
        """Records misses; returns immediately."""
        with self._lock:
            for miss in misses:
                self._missed[miss.wanted] += miss.count
        self._news.set()

    def close(self) -> None:
        """Ends a running compilation without leftovers; idempotent."""
        atexit.unregister(self.close)
        with self._lock:
            self._closing = True
        self._compiler.end()
        self._news.set()
        self._thread.join()
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)

    def _run(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            while (bucket := self._next()) is not None:
                try:
                    news = self._compile(bucket)
                except Exception as error:  # serving continues without the graph
                    news = BucketNews(bucket, error=" ".join(str(error).split()))
                if news is not None:
                    self._say(news)
            if self._closing:
                return

    def _say(self, news: BucketNews) -> None:
        try:
            self._tell(news)
        except Exception:  # a listener's failure must not stop compilation
            log.exception("a listener to news of buckets failed")

    def _next(self) -> Bucket | None:
        have = {graph.bucket for graph in self._graphs()}
        with self._lock:
            if self._closing:
                return None
            found = next((b for b, _ in self._missed.most_common() if b not in have and b not in self._tried), None)
            if found is None or len(self._tried) >= MAX_ADDED:
                return None
            self._tried.add(found)
            return found

    def _compile(self, bucket: Bucket) -> BucketNews | None:
        """None if ended early. Raises the engine's errors, and RuntimeError with the compiler's message."""
        base = output = self._artifact
        if not os.access(base.resolve().parent, os.W_OK):
            self._aside = self._aside or Path(tempfile.mkdtemp(prefix="llmc-background-"))
            output = self._aside / "artifact"
            base = output if output.exists() else base
        seconds = self._compiler.add(base, [bucket], output)
        if seconds is None:
            return None
        return BucketNews(bucket, self._add(output), seconds)
