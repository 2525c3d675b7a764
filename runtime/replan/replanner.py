"""Watches what a server runs, proposes buckets, and with `auto` tries them and keeps those that pay.

One thread does all of it but wait for the compiler: it reads the engine's steps once a second, plans now and then, and
between two steps turns graphs on and off. Whatever it does changes no answer: each graph gives the same bits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from llmc.buckets.bucket import Bucket, BucketError
from llmc.buckets.replanning.costs import learn
from llmc.buckets.replanning.histogram import StepHistogram
from llmc.buckets.replanning.proposal import Ladder, Proposal, propose
from llmc.runtime.binding import Artifact, GraphInfo, LlmcError
from llmc.runtime.replan.decisions import DecisionLog, Kind
from llmc.runtime.replan.options import ReplanOptions
from llmc.runtime.replan.steps import CountingEngine, LadderFacts, StepReader, counted
from llmc.runtime.replan.trial import RanSteps, Trial, Verdict
from llmc.runtime.replan.workshop import Workshop
from llmc.runtime.warm_up.cost_tables import bucket_of

log = logging.getLogger("llmc.replan")
LOOK_S = 1.0
_LONGEST_BACKOFF_S = 86400.0
_TOP_SHAPES, _SHOWN = 64, 8


class EngineOwner(Protocol):
    """Who has the engine. Any thread may call it. take_graphs: the graphs that an artifact has behind those of the
    engine are there from then on, and off. call_between_steps: runs work between two steps, and waits for it."""

    path: Path
    artifact: Artifact
    engine: Any
    graphs: list[GraphInfo]
    max_num_seqs: int

    def take_graphs(self, path: Path) -> range: ...
    def call_between_steps(self, work: Callable[[], None]) -> None: ...


@dataclass
class _Running:
    """A change on trial. added, retired: graphs by index."""

    trial: Trial
    proposal: Proposal
    added: tuple[int, ...]
    retired: tuple[int, ...]
    until_s: float
    on: bool = False
    window_end_s: float = 0.0
    windows: int = 0
    verdict: Verdict | None = None  # of the last window


@dataclass
class _Compiling:
    """Buckets that are being compiled: for a proposal that is to be tried, or, None, for the artifact's next start."""

    buckets: tuple[Bucket, ...]
    future: Future[Any]
    proposal: Proposal | None


class Replanner:
    """may_act: whether graphs may be turned on and off by now, as the warm-up does it, too. never: graphs by index that
    nobody may turn on. tell: takes a line for people. clock: seconds that never go back."""

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
    ) -> None:
        self._owner, self._options, self._may_act, self._clock = owner, options, may_act, clock
        self._engine: CountingEngine = owner.engine
        self._never = frozenset(never)
        self._tell = tell or (lambda line: log.info("%s", line))
        info = owner.artifact.info
        self._facts = facts or LadderFacts.of_artifact(owner.path, info, owner.max_num_seqs)
        self._reader = StepReader(self._engine, owner.graphs, info.block_size)
        self._lock = threading.Lock()  # of the histogram
        self._histogram = StepHistogram(options.half_life_s)
        self._most = options.most_graphs + len(owner.graphs) - len(self._never)
        self._workshop = workshop
        if workshop is None and options.mode == "auto":
            self._workshop = Workshop(owner.path, memory_bytes=options.memory_bytes, cpu_s=options.cpu_s)
        self._pool = pool or ThreadPoolExecutor(1, "llmc-replan-compiler")
        self._compiling: _Compiling | None = None
        self.decisions = DecisionLog()
        self._off: set[int] = set()
        self._unpublished: set[Bucket] = set()  # that the artifact lacks
        self._blocked: dict[Bucket, float] = {}
        self._failures: Counter[Bucket] = Counter()
        self._held: dict[Bucket, float] = {}
        self._running: _Running | None = None
        self._proposal: Proposal | None = None
        self._proposed_s = clock()
        self._next_s = self._proposed_s + options.interval_s
        self._compile_s: float | None = None  # that the last compilation took
        self._vain = 0  # changes in a row that did not stay
        self._told: tuple[object, ...] = ()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to watch, on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="llmc-replan", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Before the engine is closed; ends a compilation that runs. May be called twice."""
        self._closing.set()
        if self._workshop is not None:
            self._workshop.end()
        if self._thread is not None:
            self._thread.join()
        self._pool.shutdown()
        if self._workshop is not None:
            self._workshop.close()

    @property
    def proposal(self) -> Proposal | None:
        """The last one; None before the first look."""
        return self._proposal

    def tick(self) -> None:
        """One look: what ran is taken, and what is due is done."""
        ran, missed = self._reader.read()
        now_s = self._clock()
        with self._lock:
            self._histogram.add([*counted(ran), *missed], now_s)
        if self._compiling is not None and self._compiling.future.done():
            self._compiled(self._compiling)
        if self._running is not None:
            self._try_on(self._running, ran, now_s)
        elif self._compiling is None and now_s >= self._next_s:
            self._plan(now_s)
            self._wait(self._clock())

    def _wait(self, now_s: float) -> None:
        """Predictions that do not come true become rare: each costs a compilation, and turns of a trial."""
        wait_s = min(_LONGEST_BACKOFF_S, self._options.interval_s * 2.0 ** min(self._vain, 32))
        self._next_s = now_s + wait_s

    def state(self, *, steps: bool = False) -> dict[str, Any]:
        """Of plain values, from any thread. steps: with the histogram."""
        now_s, running, proposal, compiling = self._clock(), self._running, self._proposal, self._compiling
        with self._lock:
            uses, observed_s = self._histogram.uses(), self._histogram.observed_s
            forgotten = self._histogram.forgotten
        ladder = self._facts.ladder(*self._graphs())
        limits = ladder.limits
        return {
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
            "compiling": [] if compiling is None else [str(bucket) for bucket in compiling.buckets],
            "trial": None if running is None else self._trial_state(running, now_s),
            "blocked": {str(b): max(0.0, until - now_s) for b, until in list(self._blocked.items()) if until > now_s},
            "decisions": [one.as_dict() for one in self.decisions.last()],
            "counts": self.decisions.counts(),
            "top_shapes": _rows(sorted(uses, key=lambda use: (-use.steps, use.shape))[:_TOP_SHAPES]),
        } | ({"steps": _rows(uses), "graphs": _graph_rows(ladder)} if steps else {})

    def summary(self) -> dict[str, Any]:
        """The little that a page shows once a second; from any thread."""
        proposal, running = self._proposal, self._running
        return {
            "mode": self._options.mode,
            "line": None if proposal is None else proposal.line(),
            "changes": [] if proposal is None else [change.as_dict() for change in proposal.changes],
            "trial": None if running is None else self._trial_state(running, self._clock()),
            "decisions": [one.as_dict() for one in self.decisions.last()[-_SHOWN:]],
        }

    def _run(self) -> None:
        # A window of a trial may be shorter than a look.
        look_s = min(LOOK_S, self._options.window_s)
        while not self._closing.wait(look_s):
            try:
                self.tick()
            except Exception as error:  # a fault here is no reason to stop serving, or looking
                log.exception("planning buckets failed")
                self._abandon()
                self._say("failed", " ".join(str(error).split()) or type(error).__name__)
                self._next_s = self._clock() + self._options.interval_s

    def _abandon(self) -> None:
        """A trial that cannot go on ends as it began, if the engine still takes that."""
        running, self._running = self._running, None
        if running is not None:
            with suppress(Exception):  # what ended the trial may be the end of the engine
                self._set(running, False)

    # ---- planning --------------------------------------------------------------------------------------------------

    def _plan(self, now_s: float) -> None:
        options = self._options
        with self._lock:
            uses, observed_s = self._histogram.uses(), self._histogram.observed_s
        facts, ladder = self._facts, self._facts.ladder(*self._graphs())
        try:
            times = learn(uses, facts.table, facts.limits, padding=facts.padding, tiles=facts.tiles)
        except BucketError:  # costs that contradict one another
            times = None
        blocked = [bucket for bucket, until in self._blocked.items() if until > now_s]
        blocked += [bucket_of(self._owner.graphs[index]) for index in self._never]
        keep = [bucket for bucket, until in self._held.items() if until > now_s]
        policy = replace(options.policy, max_graphs=min(options.policy.max_graphs, self._most))
        if self._compile_s is not None:
            policy = replace(policy, once_s=self._compile_s, graph_s=0.0)
        self._proposal = found = propose(
            uses, ladder, policy, times=times, observed_s=observed_s, blocked=blocked, keep=keep
        )
        self._proposed_s = now_s
        changes = (found.added, found.retired)
        if found.changes and changes != self._told:
            self._say("proposed", found.line(), *changes, figures={"saving": found.saving})
        self._told = changes
        if found.changes and options.mode == "auto" and self._may_act():
            self._act(found)

    def _graphs(self) -> tuple[list[GraphInfo], frozenset[int]]:
        """Those that a plan may know, and which of them are off. A graph that nobody may turn on is none."""
        graphs = list(self._owner.graphs)
        known = [index for index in range(len(graphs)) if index not in self._never]
        running = self._running
        off = set(self._off)
        if running is not None:
            off |= set(running.added)
            off -= set(running.retired)
        return [graphs[index] for index in known], frozenset(n for n, index in enumerate(known) if index in off)

    # ---- acting -----------------------------------------------------------------------------------------------------

    def _act(self, proposal: Proposal) -> None:
        fresh = tuple(c.bucket for c in proposal.changes if c.action == "add" and not c.compiled)
        if not fresh:
            self._try(proposal)
            return
        assert self._workshop is not None
        self._compile(_Compiling(fresh, self._pool.submit(self._workshop.add, fresh), proposal))

    def _compile(self, one: _Compiling) -> None:
        """Goes on when the compiler has ended; at once if it has."""
        self._compiling = one
        if one.future.done():
            self._compiled(one)

    def _compiled(self, one: _Compiling) -> None:
        self._compiling = None
        try:
            made = one.future.result()
            if made is None:  # ended
                return
            if one.proposal is None:
                self._unpublished.difference_update(one.buckets)
                self._say("published", f"{self._owner.path} has them from its next start on", one.buckets)
            elif self._join(one.buckets, *made):
                self._try(one.proposal)
        except (RuntimeError, OSError, LlmcError) as error:
            why = " ".join(str(error).split())
            if one.proposal is None:
                self._say("failed", f"not added to {self._owner.path}: {why}", one.buckets)
            else:
                self._refuse(one.buckets, why)

    def _join(self, fresh: tuple[Bucket, ...], path: Path, seconds: float) -> bool:
        """Whether the graphs of these buckets are in the engine, off. Raises LlmcError."""
        self._compile_s = seconds
        self._say("compiled", f"beside serving, in {seconds:.1f} s", fresh, figures={"seconds": seconds})
        began = time.monotonic()
        new = self._owner.take_graphs(path)
        self._off.update(new)
        self._unpublished.update(fresh)
        here = {bucket_of(self._owner.graphs[index]) for index in new}
        took = time.monotonic() - began
        self._say("joined", f"{len(new)} graphs taken over in {took:.2f} s", sorted(here), figures={"seconds": took})
        if set(fresh) <= here:
            return True
        self._refuse(fresh, "the artifact has them already, from elsewhere: the next start will find them")
        return False

    def _refuse(self, fresh: Sequence[Bucket], why: str) -> None:
        self._vain += 1
        self._block(fresh)
        self._wait(self._clock())
        self._say("failed", why, fresh)

    def _try(self, proposal: Proposal) -> None:
        index_of = {bucket_of(graph): index for index, graph in enumerate(self._owner.graphs)}
        added = tuple(index_of[bucket] for bucket in proposal.added)
        retired = tuple(index_of[bucket] for bucket in proposal.retired)
        before = self._facts.ladder(*self._graphs()).on
        after = [bucket for bucket in (*before, *proposal.added) if bucket not in proposal.retired]
        options, now_s = self._options, self._clock()
        trial = Trial(before, after, self._facts.limits, options.policy.unit, options.margin, options.least_trial_steps)
        self._running = _Running(trial, proposal, added, retired, now_s + options.trial_s)
        self._turn(self._running, now_s)

    def _turn(self, running: _Running, now_s: float) -> None:
        """The next window of a trial: with the change, or without it."""
        running.on = not running.on
        running.windows += 1
        running.window_end_s = now_s + self._options.window_s
        self._set(running, running.on)

    def _set(self, running: _Running, on: bool) -> None:
        def switch() -> None:
            # First on, then off: whoever looks in between finds a bucket for every step.
            for index in running.added if on else running.retired:
                self._engine.enable_graph(index, True)
            for index in running.retired if on else running.added:
                self._engine.enable_graph(index, False)

        self._owner.call_between_steps(switch)

    def _try_on(self, running: _Running, ran: Sequence[RanSteps], now_s: float) -> None:
        running.trial.add(ran, on=running.on)
        if now_s < running.window_end_s:
            return
        # Only after as many windows of one kind as of the other: a drift of the load is no merit of either.
        even = running.windows % 2 == 0
        verdict = running.verdict = running.trial.verdict(final=now_s >= running.until_s)
        if verdict.pays is None or not (even or now_s >= running.until_s):
            self._turn(running, now_s)
        else:
            self._end(running, verdict, now_s)

    def _end(self, running: _Running, verdict: Verdict, now_s: float) -> None:
        pays = bool(verdict.pays)
        self._set(running, pays)
        # Until they are on again, nothing of them is needed.
        for index in running.retired if pays else running.added:
            self._owner.call_between_steps(partial(self._engine.release_graph, index))
        gone, come = (running.retired, running.added) if pays else (running.added, running.retired)
        self._off.update(gone)
        self._off.difference_update(come)
        self._running = None
        proposal = running.proposal
        buckets = (proposal.added, proposal.retired)
        self._say("kept" if pays else "reverted", verdict.reason, *buckets, figures=verdict.figures())
        self._vain = 0 if pays else self._vain + 1
        self._wait(now_s)
        if not pays:
            self._block((*proposal.added, *proposal.retired))
            return
        for bucket in proposal.added:
            self._failures.pop(bucket, None)
            self._held[bucket] = now_s + self._options.backoff_s
        # What was retired for these does not come back at once, either.
        for bucket in proposal.retired:
            self._blocked[bucket] = now_s + self._options.backoff_s
        new = tuple(bucket for bucket in proposal.added if bucket in self._unpublished)
        if new:
            assert self._workshop is not None
            self._compile(_Compiling(new, self._pool.submit(self._workshop.publish, new), None))

    def _block(self, buckets: Iterable[Bucket]) -> None:
        """Not again before the back-off has passed, which doubles each time."""
        now_s = self._clock()
        for bucket in buckets:
            wait_s = min(_LONGEST_BACKOFF_S, self._options.backoff_s * 2.0 ** self._failures[bucket])
            self._failures[bucket] += 1
            self._blocked[bucket] = self._held[bucket] = now_s + wait_s

    def _say(
        self, kind: Kind, reason: str, added: Sequence[Bucket] = (), retired: Sequence[Bucket] = (),
        figures: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        self._tell(self.decisions.note(kind, reason, added, retired, figures).line())

    @staticmethod
    def _trial_state(running: _Running, now_s: float) -> dict[str, Any]:
        verdict = running.verdict
        told = {} if verdict is None else {"reason": verdict.reason, **verdict.figures()}
        return {
            "added": [str(bucket) for bucket in running.proposal.added],
            "retired": [str(bucket) for bucket in running.proposal.retired],
            "on": running.on, "windows": running.windows, "ends_in_s": max(0.0, running.until_s - now_s),
        } | told  # fmt: skip


def _rows(uses: Iterable[Any]) -> list[dict[str, Any]]:
    return [
        {
            "phase": use.shape.phase, "sequences": use.shape.sequences, "tokens": use.shape.tokens,
            "samples": use.shape.samples, "context": use.shape.context,
            "bucket": None if use.bucket is None else str(use.bucket), "steps": use.steps, "seconds": use.seconds,
        }
        for use in uses
    ]  # fmt: skip


def _graph_rows(ladder: Ladder) -> list[dict[str, Any]]:
    return [
        {
            "bucket": str(bucket), "arena_bytes": ladder.arena_bytes[bucket],
            "command_bytes": ladder.command_bytes[bucket], "row_tile": ladder.tiles.get(bucket),
        }
        for bucket in (*ladder.on, *ladder.off)
    ]  # fmt: skip
