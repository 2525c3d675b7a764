"""Changes of a server's buckets, one at a time: compiled in the background, tried alternately, kept or reverted, with
back-off."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from llmc.buckets.bucket import Bucket
from llmc.buckets.replanning.proposal import Proposal
from llmc.buckets.replanning.shapes import Limits
from llmc.runtime.binding import Artifact, GraphInfo, LlmcError
from llmc.runtime.replan.decisions import DecisionLog, Kind
from llmc.runtime.replan.options import ReplanOptions
from llmc.runtime.replan.retired import RetiredBuckets, spared
from llmc.runtime.replan.trial import RanSteps, Trial, Verdict
from llmc.runtime.replan.workshop import Workshop
from llmc.runtime.warm_up.cost_tables import bucket_of

LONGEST_BACKOFF_S = 86400.0


class EngineOwner(Protocol):
    """The owner of an engine; thread-safe. take_graphs: adds the new graphs of an artifact to the engine, switched
    off. call_between_steps: runs work between two steps, and waits for it."""

    path: Path
    artifact: Artifact
    engine: Any
    graphs: list[GraphInfo]
    max_num_seqs: int

    def take_graphs(self, path: Path) -> range: ...
    def call_between_steps(self, work: Callable[[], None]) -> None: ...


@dataclass
class _Running:
    """A change on trial. added, retired: graph indices. verdict: of the last window."""

    trial: Trial
    proposal: Proposal
    added: tuple[int, ...]
    retired: tuple[int, ...]
    until_s: float
    on: bool = False
    window_end_s: float = 0.0
    windows: int = 0
    verdict: Verdict | None = None


@dataclass
class _Compiling:
    """Buckets being compiled: for a proposal to be tried or, if None, for the artifact's next start."""

    buckets: tuple[Bucket, ...]
    future: Future[Any]
    proposal: Proposal | None


class Changes:
    """Used by one thread, except `state`, `off` and `close`. say: called with every decision. workshop: None if nothing
    may change. retired: buckets to be off at the next start; None remembers nothing.

    off: indices of graphs that no step may use. compile_s: seconds of the last compilation; None if there was none.
    vain: consecutive changes that were reverted.
    """

    def __init__(
        self, owner: EngineOwner, options: ReplanOptions, limits: Limits, log: DecisionLog, say: Callable[[str], None],
        clock: Callable[[], float], workshop: Workshop | None, pool: Executor | None = None,
        retired: RetiredBuckets | None = None,
    ) -> None:  # fmt: skip
        self._owner, self._options, self._limits, self._clock = owner, options, limits, clock
        self._log, self._tell, self._workshop = log, say, workshop
        self._pool = pool or ThreadPoolExecutor(1, "llmc-replan-compiler")
        self._retired, self._remembered = retired, set[Bucket]()
        self._compiling: _Compiling | None = None
        self._running: _Running | None = None
        self._unpublished: set[Bucket] = set()  # missing in the artifact
        self._blocked: dict[Bucket, float] = {}
        self._held: dict[Bucket, float] = {}
        self._failures: Counter[Bucket] = Counter()
        self.off: set[int] = set()
        self.compile_s: float | None = None
        self.vain = 0

    @property
    def busy(self) -> bool:
        """Whether a change is in progress, so that no other may start."""
        return self._running is not None or self._compiling is not None

    def blocked(self, now_s: float) -> list[Bucket]:
        """Buckets that may not be added yet."""
        return [bucket for bucket, until in list(self._blocked.items()) if until > now_s]

    def held(self, now_s: float) -> list[Bucket]:
        """Buckets that may not be retired yet."""
        return [bucket for bucket, until in list(self._held.items()) if until > now_s]

    def restore(self, never: Collection[int]) -> None:
        """Disables buckets retired before the start, if another bucket in use holds as much. never: indices of graphs
        that must not be enabled."""
        if self._retired is None:
            return
        buckets = {bucket_of(g): index for index, g in enumerate(self._owner.graphs) if index not in never}
        wanted = self._retired.read() & buckets.keys()
        self._remembered = set(spared(wanted, buckets.keys() - wanted, self._limits))
        off = sorted(buckets[bucket] for bucket in self._remembered)
        if not off:
            return
        engine = self._owner.engine
        for index in off:
            self._owner.call_between_steps(partial(engine.enable_graph, index, False))
            self._owner.call_between_steps(partial(engine.release_graph, index))
        self.off.update(off)
        self._say("kept", f"retired before this start, as {self._retired.path} says", (), sorted(self._remembered))

    def begin(self, proposal: Proposal) -> None:
        """Compiles missing buckets, then tries the change. Nothing else may be in progress."""
        fresh = tuple(c.bucket for c in proposal.changes if c.action == "add" and not c.compiled)
        if not fresh:
            self._try(proposal)
            return
        assert self._workshop is not None
        self._compile(_Compiling(fresh, self._pool.submit(self._workshop.add, fresh), proposal))

    def look(self, ran: Sequence[RanSteps], now_s: float) -> None:
        """Advances the change in progress. ran: steps since the previous call."""
        if self._running is not None:
            self._try_on(self._running, ran, now_s)
        elif self._compiling is not None and self._compiling.future.done():
            self._compiled(self._compiling)

    def abandon(self) -> None:
        """Reverts a trial that cannot continue, if the engine still permits."""
        running, self._running = self._running, None
        if running is not None:
            with suppress(Exception):  # the engine itself may have failed
                self._set(running, False)

    def close(self) -> None:
        """Ends a running compilation, and removes the second artifact."""
        if self._workshop is not None:
            self._workshop.end()
        self._pool.shutdown()
        if self._workshop is not None:
            self._workshop.close()

    def state(self, now_s: float) -> dict[str, Any]:
        """Plain values; thread-safe."""
        running, compiling = self._running, self._compiling
        return {
            "compiling": [] if compiling is None else [str(bucket) for bucket in compiling.buckets],
            "trial": None if running is None else _trial_state(running, now_s),
            "blocked": {str(bucket): self._blocked[bucket] - now_s for bucket in self.blocked(now_s)},
        }

    def _compile(self, one: _Compiling) -> None:
        """Continues when the compiler has finished; immediately if it has."""
        self._compiling = one
        if one.future.done():
            self._compiled(one)

    def _compiled(self, one: _Compiling) -> None:
        self._compiling = None
        try:
            made = one.future.result()
            if made is None:  # ended early
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
        self.compile_s = seconds
        self._say("compiled", f"beside serving, in {seconds:.1f} s", fresh, figures={"seconds": seconds})
        began = time.monotonic()
        new = self._owner.take_graphs(path)
        self.off.update(new)
        self._unpublished.update(fresh)
        here = {bucket_of(self._owner.graphs[index]) for index in new}
        took = time.monotonic() - began
        self._say("joined", f"{len(new)} graphs taken over in {took:.2f} s", sorted(here), figures={"seconds": took})
        if set(fresh) <= here:
            return True
        self._refuse(fresh, "the artifact has them already, from elsewhere: the next start will find them")
        return False

    def _refuse(self, fresh: Sequence[Bucket], why: str) -> None:
        self.vain += 1
        self._block(fresh)
        self._say("failed", why, fresh)

    def _try(self, proposal: Proposal) -> None:
        graphs = [bucket_of(graph) for graph in self._owner.graphs]
        index_of = {bucket: index for index, bucket in enumerate(graphs)}
        added = tuple(index_of[bucket] for bucket in proposal.added)
        retired = tuple(index_of[bucket] for bucket in proposal.retired)
        after = [bucket for bucket in (*proposal.before, *proposal.added) if bucket not in proposal.retired]
        options, now_s = self._options, self._clock()
        trial = Trial(
            proposal.before, after, self._limits, options.policy.unit, options.margin, options.least_trial_steps
        )
        self._running = _Running(trial, proposal, added, retired, now_s + options.trial_s)
        self._turn(self._running, now_s)

    def _turn(self, running: _Running, now_s: float) -> None:
        """Starts the next window of a trial, with or without the change."""
        running.on = not running.on
        running.windows += 1
        running.window_end_s = now_s + self._options.window_s
        self._set(running, running.on)

    def _set(self, running: _Running, on: bool) -> None:
        engine = self._owner.engine

        def switch() -> None:
            # Enable first, then disable: at any moment every step has a bucket.
            for index in running.added if on else running.retired:
                engine.enable_graph(index, True)
            for index in running.retired if on else running.added:
                engine.enable_graph(index, False)

        self._owner.call_between_steps(switch)

    def _try_on(self, running: _Running, ran: Sequence[RanSteps], now_s: float) -> None:
        running.trial.add(ran, on=running.on)
        if now_s < running.window_end_s:
            return
        # Only after equally many windows of both kinds, so that a drifting load favours neither.
        late = now_s >= running.until_s
        enough = running.windows % 2 == 0 and running.windows >= self._options.least_windows
        running.verdict = verdict = running.trial.verdict(final=late)
        if verdict.pays is None or not (enough or late):
            self._turn(running, now_s)
        else:
            self._end(running, verdict, now_s)

    def _end(self, running: _Running, verdict: Verdict, now_s: float) -> None:
        pays, proposal = bool(verdict.pays), running.proposal
        self._set(running, pays)
        gone, come = (running.retired, running.added) if pays else (running.added, running.retired)
        for index in gone:  # unused until enabled again
            self._owner.call_between_steps(partial(self._owner.engine.release_graph, index))
        self.off.update(gone)
        self.off.difference_update(come)
        self._running = None
        self.vain = 0 if pays else self.vain + 1
        self._say("kept" if pays else "reverted", verdict.reason, proposal.added, proposal.retired, verdict.figures())
        if not pays:
            self._block((*proposal.added, *proposal.retired))
            return
        self._remember(proposal)
        for bucket in proposal.added:
            self._failures.pop(bucket, None)
            self._held[bucket] = now_s + self._options.backoff_s
        # The buckets retired for these are not restored immediately either.
        for bucket in proposal.retired:
            self._blocked[bucket] = now_s + self._options.backoff_s
        new = tuple(bucket for bucket in proposal.added if bucket in self._unpublished)
        if new:
            assert self._workshop is not None
            self._compile(_Compiling(new, self._pool.submit(self._workshop.publish, new), None))

    def _remember(self, proposal: Proposal) -> None:
        """Remembers what a kept change has retired, for the next start."""
        after = (self._remembered - set(proposal.added)) | set(proposal.retired)
        if self._retired is None or after == self._remembered:
            return
        self._remembered = after
        try:
            self._retired.write(after)
        except OSError as error:
            why = f"{self._retired.path} cannot be written ({error.strerror or error}): the next start has them again"
            self._say("failed", why, (), sorted(after))

    def _block(self, buckets: Iterable[Bucket]) -> None:
        """Blocks buckets for the back-off time, which doubles each time."""
        now_s = self._clock()
        for bucket in buckets:
            wait_s = min(LONGEST_BACKOFF_S, self._options.backoff_s * 2.0 ** min(self._failures[bucket], 32))
            self._failures[bucket] += 1
            self._blocked[bucket] = self._held[bucket] = now_s + wait_s

    def _say(
        self, kind: Kind, reason: str, added: Sequence[Bucket] = (), retired: Sequence[Bucket] = (),
        figures: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        self._tell(self._log.note(kind, reason, added, retired, figures).line())


def _trial_state(running: _Running, now_s: float) -> dict[str, Any]:
    verdict = running.verdict
    told = {} if verdict is None else {"reason": verdict.reason, **verdict.figures()}
    return {
        "added": [str(bucket) for bucket in running.proposal.added],
        "retired": [str(bucket) for bucket in running.proposal.retired],
        "on": running.on, "windows": running.windows, "ends_in_s": max(0.0, running.until_s - now_s),
    } | told  # fmt: skip
