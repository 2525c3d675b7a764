"""Watches a server's steps, proposes buckets and, with `auto`, tries them and keeps those that pay.

One thread does everything except waiting for the compiler. It reads the engine's steps once a second, plans
occasionally, and switches graphs between two steps. It never changes an answer: all graphs give the same bits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from llmc.buckets.bucket import BucketError
from llmc.buckets.replanning.costs import learn
from llmc.buckets.replanning.evenness import Evenness
from llmc.buckets.replanning.histogram import StepHistogram
from llmc.buckets.replanning.proposal import Ladder, Proposal, planned_uses, propose
from llmc.runtime.replan.changes import LONGEST_BACKOFF_S, Changes, EngineOwner
from llmc.runtime.replan.decisions import DecisionLog
from llmc.runtime.replan.options import ReplanOptions
from llmc.runtime.replan.retired import RetiredBuckets
from llmc.runtime.replan.steps import LadderFacts, StepReader, counted
from llmc.runtime.replan.workshop import Workshop
from llmc.runtime.warm_up.cost_tables import bucket_of

log = logging.getLogger("llmc.replan")
LOOK_S = 1.0
_TOP_SHAPES, _SHOWN = 64, 8


class Replanner:
    """may_act: whether graphs may be switched yet, since the warm-up does so too. never: indices of graphs that must
    not be enabled. tell: receives lines for people. clock: monotonic seconds. retired: what `auto` remembers across
    starts."""

    def __init__(
        self,
        owner: EngineOwner,
        options: ReplanOptions,
        *,
        may_act: Callable[[], bool] = lambda: True,
        never: Iterable[int] = (),
        tell: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        facts: LadderFacts | None = None,
        workshop: Workshop | None = None,
        pool: Executor | None = None,
        retired: RetiredBuckets | None = None,
    ) -> None:
        self._owner, self._options, self._may_act, self._clock = owner, options, may_act, clock
        self._never = frozenset(never)
        self._tell = tell or (lambda line: log.info("%s", line))
        info = owner.artifact.info
        self._facts = facts or LadderFacts.of_artifact(owner.path, info, owner.max_num_seqs)
        self._reader = StepReader(owner.engine, owner.graphs, info.block_size)
        self._lock = threading.Lock()  # of the histogram
        self._histogram = StepHistogram(options.half_life_s)
        self._most = options.most_graphs + len(owner.graphs) - len(self._never)
        if workshop is None and options.mode == "auto":
            workshop = Workshop(owner.path, memory_bytes=options.memory_bytes, cpu_s=options.cpu_s)
        self.decisions = DecisionLog()
        self._changes = Changes(
            owner, options, self._facts.limits, self.decisions, self._tell, clock, workshop, pool, retired
        )
        self._restored = options.mode != "auto"
        self._proposal: Proposal | None = None
        self._evenness: Evenness | None = None
        self._proposed_s = clock()
        self._next_s = self._proposed_s + options.interval_s
        self._told: tuple[object, ...] = ()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts watching, on its own thread."""
        self._thread = threading.Thread(target=self._run, name="llmc-replan", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Call it before closing the engine; ends a running compilation. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._changes.close()

    @property
    def proposal(self) -> Proposal | None:
        """The last proposal; None before the first."""
        return self._proposal

    def tick(self) -> None:
        """One iteration: reads new steps, and does what is due."""
        if not self._restored and self._may_act():
            self._restored = True
            self._changes.restore(self._never)
        ran, missed = self._reader.read()
        now_s = self._clock()
        with self._lock:
            self._histogram.add([*counted(ran), *missed], now_s)
        if self._changes.busy:
            self._changes.look(ran, now_s)
            self._wait()
        elif now_s >= self._next_s:
            self._plan(now_s)
            self._wait()

    def state(self, *, steps: bool = False) -> dict[str, Any]:
        """Plain values; thread-safe. steps: include the histogram."""
        now_s, proposal = self._clock(), self._proposal
        with self._lock:
            uses, observed_s = self._histogram.uses(), self._histogram.observed_s
            forgotten = self._histogram.forgotten
        ladder = self._ladder()
        limits = ladder.limits
        state = {
            "mode": self._options.mode,
            "unit": self._options.policy.unit,
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "block_size": limits.block_size,
            "padding": ladder.padding,
            "observed_s": observed_s,
            "num_steps": sum(use.steps for use in uses),
            "num_shapes": len(uses),
            "lost_steps": self._reader.lost + forgotten,
            "on": [str(bucket) for bucket in ladder.on],
            "off": [str(bucket) for bucket in ladder.off],
            "proposal": None if proposal is None else proposal.as_dict() | {"line": proposal.line()},
            "proposed_s_ago": now_s - self._proposed_s,
            "decisions": [one.as_dict() for one in self.decisions.last()],
            "counts": self.decisions.counts(),
            "contexts": Evenness.of(uses).as_dict(ladder.padding),
            "top_shapes": _rows(sorted(uses, key=lambda use: (-use.steps, use.shape))[:_TOP_SHAPES]),
        } | self._changes.state(now_s)
        return state | ({"steps": _rows(uses), "graphs": _graph_rows(ladder)} if steps else {})

    def summary(self) -> dict[str, Any]:
        """The summary that a page polls every second; thread-safe."""
        proposal, evenness = self._proposal, self._evenness
        return {
            "mode": self._options.mode,
            "line": None if proposal is None else proposal.line(),
            "changes": [] if proposal is None else [change.as_dict() for change in proposal.changes],
            "trial": self._changes.state(self._clock())["trial"],
            "contexts": None if evenness is None else evenness.as_dict(self._facts.padding),
            "decisions": [one.as_dict() for one in self.decisions.last()[-_SHOWN:]],
        }

    def _run(self) -> None:
        # A trial's window may be shorter than a poll.
        look_s = min(LOOK_S, self._options.window_s)
        while not self._closing.wait(look_s):
            try:
                self.tick()
            except Exception as error:  # a fault here is no reason to stop serving, or looking
                log.exception("planning buckets failed")
                self._changes.abandon()
                reason = " ".join(str(error).split()) or type(error).__name__
                self._tell(self.decisions.note("failed", reason).line())
                self._wait()

    def _wait(self) -> None:
        """Time until the next plan. Mispredictions make plans rarer: each costs a compilation and a trial."""
        wait_s = self._options.interval_s * 2.0 ** min(self._changes.vain, 32)
        self._next_s = self._clock() + min(LONGEST_BACKOFF_S, wait_s)

    def _plan(self, now_s: float) -> None:
        options, facts, changes = self._options, self._facts, self._changes
        with self._lock:
            uses, observed_s = self._histogram.uses(), self._histogram.observed_s
        self._evenness = Evenness.of(uses)
        policy = replace(options.policy, max_graphs=min(options.policy.max_graphs, self._most))
        ladder = self._ladder()
        planned = planned_uses(uses, ladder, policy.unit)
        try:
            times = learn(planned, facts.table, facts.limits, padding=facts.padding, tiles=facts.tiles)
        except BucketError:  # contradictory costs
            times = None
        if changes.compile_s is not None:
            policy = replace(policy, once_s=changes.compile_s, graph_s=0.0)
        blocked = [*changes.blocked(now_s), *(bucket_of(self._owner.graphs[index]) for index in self._never)]
        self._proposal = found = propose(
            planned, ladder, policy, times=times, observed_s=observed_s, blocked=blocked, keep=changes.held(now_s)
        )
        self._proposed_s = now_s
        buckets = (found.added, found.retired)
        if found.changes and buckets != self._told:
            noted = self.decisions.note("proposed", found.line(), *buckets, figures={"saving": found.saving})
            self._tell(noted.line())
        self._told = buckets
        if found.changes and options.mode == "auto" and self._may_act():
            changes.begin(found)

    def _ladder(self) -> Ladder:
        """The ladder for planning, without graphs that must not be enabled."""
        graphs, off = list(self._owner.graphs), set(self._changes.off)
        known = [index for index in range(len(graphs)) if index not in self._never]
        return self._facts.ladder(
            [graphs[index] for index in known], (n for n, index in enumerate(known) if index in off)
        )


def _rows(uses: Iterable[Any]) -> list[dict[str, Any]]:
    return [
        {
            "phase": use.shape.phase, "sequences": use.shape.sequences, "tokens": use.shape.tokens,
            "samples": use.shape.samples, "context": use.shape.context, "total": use.shape.total,
            "bucket": None if use.bucket is None else str(use.bucket), "steps": use.steps, "seconds": use.seconds,
        }
        for use in uses
    ]  # fmt: skip


def _graph_rows(ladder: Ladder) -> list[dict[str, Any]]:
    return [
        {
            "bucket": str(bucket), "arena_bytes": ladder.arena_bytes[bucket],
            "command_bytes": ladder.command_bytes[bucket], "row_unit": ladder.tiles.get(bucket),
        }
        for bucket in (*ladder.on, *ladder.off)
    ]  # fmt: skip
