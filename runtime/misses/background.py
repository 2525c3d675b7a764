"""--miss-policy background: the graph that a miss lacked is compiled aside and joins the running engine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.buckets.bucket import Bucket

if TYPE_CHECKING:
    from llmc.runtime.binding import GraphInfo
    from llmc.runtime.binding.engine import BucketMiss

MAX_ADDED = 32
"""Graphs that one process adds at most: a ladder that lacks more should be planned."""
AddGraphs = Callable[[Path], int]
"""Has the engine take over the graphs that an artifact has behind its own, warm; returns how many."""

# As low as priorities go: serving comes first, whatever the compiler does.
_COMPILE = """
import contextlib, os, sys
os.nice(19)
with contextlib.suppress(AttributeError, OSError):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
from llmc.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def exact_bucket(miss: BucketMiss, graphs: Sequence[GraphInfo], block_size: int, max_model_len: int) -> Bucket:
    """The bucket that serves a miss: its batch, and the next length of the ladder, so that contexts may grow in it."""
    wanted = miss.num_blocks * block_size if miss.phase == "decode" else -(-miss.num_tokens // miss.num_seqs)
    lengths = sorted(graph.seq for graph in graphs if graph.phase == miss.phase and graph.seq >= wanted)
    longest = -(-max_model_len // block_size) * block_size
    return Bucket(miss.phase, miss.num_seqs, lengths[0] if lengths else min(wanted, longest))


class BackgroundCompiler:
    """Compiles one bucket after the other, the one missed most first, in a process of its own.

    The artifact gets the bucket, too, in one step, and so does the graph cache; where the artifact cannot be written,
    the result lives as long as this object. A bucket that fails is not tried again.
    """

    def __init__(
        self,
        artifact: Path,
        graphs: Callable[[], Sequence[GraphInfo]],
        add: AddGraphs,
        *,
        block_size: int,
        max_model_len: int,
        say: Callable[[str], None],
    ) -> None:
        self._artifact, self._graphs, self._add, self._say = artifact, graphs, add, say
        self._limits = block_size, max_model_len
        self._missed: Counter[Bucket] = Counter()
        self._tried: set[Bucket] = set()
        self._aside: Path | None = None
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmc-background", daemon=True)
        self._thread.start()

    def take(self, misses: Sequence[BucketMiss]) -> None:
        """Notes what was missed; returns at once."""
        graphs = self._graphs()
        with self._lock:
            for miss in misses:
                self._missed[exact_bucket(miss, graphs, *self._limits)] += miss.count
        self._news.set()

    def close(self) -> None:
        """Ends a compilation that runs, which leaves nothing behind."""
        with self._lock:
            self._closing = True
            if self._child is not None:
                self._child.terminate()
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
                    self._compile(bucket)
                except Exception as error:  # serving goes on without the graph
                    self._say(f"warning: bucket {bucket} cannot be added: {' '.join(str(error).split())}")
            if self._closing:
                return

    def _next(self) -> Bucket | None:
        have = {Bucket(graph.phase, graph.batch, graph.seq) for graph in self._graphs()}
        with self._lock:
            if self._closing:
                return None
            found = next((b for b, _ in self._missed.most_common() if b not in have and b not in self._tried), None)
            if found is None or len(self._tried) >= MAX_ADDED:
                return None
            self._tried.add(found)
            return found

    def _compile(self, bucket: Bucket) -> None:
        base = output = self._artifact
        if not os.access(base.resolve().parent, os.W_OK):
            self._aside = self._aside or Path(tempfile.mkdtemp(prefix="llmc-background-"))
            output = self._aside / "artifact"
            base = output if output.exists() else base
        arguments = ["compile", str(base), "--add", str(bucket), "-o", str(output), "--jobs", "1", "--json"]
        with self._lock:
            if self._closing:
                return
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMPILE, *arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        out, err = self._child.communicate()
        with self._lock:
            code, self._child = self._child.returncode, None
            if self._closing:
                return
        if code != 0:
            lines = err.strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"the compiler ended with exit code {code}")
        added = self._add(output)
        seconds = 0.0
        with contextlib.suppress(ValueError, KeyError, AttributeError):
            seconds = sum(json.loads(out)["phase_seconds"].values())
        self._say(f"added bucket {bucket}, compiled aside in {seconds:.1f} s; {added} new graphs serve from now on")
