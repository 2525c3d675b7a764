"""Shared by `llmc warmup` and `llmc serve`: plan of a warm-up, memory budget, progress, and cost table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmc.buckets.bucket import BucketError
from llmc.buckets.warm_order import ladder_usage, parse_strategies, warm_order
from llmc.cache_root import cost_folder
from llmc.cli.options.warm_flags import REPLAY_S
from llmc.cli.render.warm_log import WarmLog, bucket_lines
from llmc.mpi_loader import mpi_rank
from llmc.runtime.warm_up.budget import Budget, BudgetError, BudgetOptions, base_graphs, budget_of, plan_budget
from llmc.runtime.warm_up.cost_tables import CostRecorder, bucket_of
from llmc.runtime.warm_up.warm_up import WarmPlan

if TYPE_CHECKING:
    from llmc.buckets.usage import Usage
    from llmc.runtime.binding import GraphInfo
    from llmc.runtime.warm_up.warm_up import OnWarmStep, WarmStep

READY_AFTER = ("all", "hot")
MEASURE_WITHIN_S = 2.0
"""Limit of measurements that a server makes unasked, on an idle machine; approximate seconds."""


@dataclass(frozen=True)
class WarmOptions:
    """trace: traffic that orders the graphs. ready_after: all or hot. measure: measure costs that are unknown or
    untrusted; None: only if that takes at most MEASURE_WITHIN_S on an idle machine. again: also measure known costs.
    measure_s: approximate seconds to measure one load. replay_s: approximate seconds of replays; the rest is walked
    through. skip: no warm-up. budget: None for no budget. must_keep: it is an error if costs cannot be kept."""

    trace: Path | None = None
    strategy: str = "auto"
    ready_after: str = "all"
    measure: bool | None = True
    again: bool = False
    measure_s: float = 0.1
    cost_folder: Path | None = None
    replay_s: float = REPLAY_S
    skip: bool = False
    budget: BudgetOptions | None = None
    must_keep: bool = False

    def __post_init__(self) -> None:
        try:
            by_phase = parse_strategies(self.strategy)
        except BucketError as error:
            raise typer.BadParameter(str(error)) from error
        if self.skip and self.ready_after != "all":
            raise typer.BadParameter("--skip-warmup leaves no graph to wait for: leave --ready-after out")
        if self.skip and self.measure:
            raise typer.BadParameter("--skip-warmup and --measure-costs exclude each other: leave one of them out")
        if self.ready_after not in READY_AFTER:
            raise typer.BadParameter(f"--ready-after {self.ready_after!r} is unknown: use {' or '.join(READY_AFTER)}")
        if "traffic" in by_phase.values() and self.trace is None:
            raise typer.BadParameter(
                "a warm-up ordered by traffic needs a trace: give one, or use min_tokens or max_bs"
            )


def budget_options(
    utilization: float | None,
    graph_reserved: float | None,
    prompt_ratio: float | None,
    kv_bytes: int,
    *,
    max_num_seqs: int = 0,
    num_states: int = 0,
) -> BudgetOptions | None:
    """The budget requested by the flags; None without --memory-utilization. Raises BadParameter."""
    try:
        return budget_of(
            utilization, graph_reserved, prompt_ratio, kv_bytes, max_num_seqs=max_num_seqs, num_states=num_states
        )
    except BudgetError as error:
        raise typer.BadParameter(str(error)) from error


class WarmUpPlanner:
    """Plans the warm-up of an artifact and keeps its cost table. `budget` is computed at once, with one line per
    step."""

    def __init__(
        self,
        artifact: Path,
        options: WarmOptions,
        device: Mapping[str, Any] | None = None,
        draft: Path | None = None,
        images: Path | None = None,
    ) -> None:
        """device: options that choose the device. draft: artifact of a draft model, images: of what encodes images;
        both are part of the budget.

        Raises BucketError, BudgetError, ManifestError, RanksError for an invalid option of ranks, and LlmcError if an
        artifact cannot be opened.
        """
        from llmc.runtime.binding import Artifact

        self._artifact, self._options = artifact, options
        with Artifact(artifact) as opened:
            info, graphs = opened.info, opened.graphs()
        self._vocab_size = info.vocab_size
        for line in bucket_lines(graphs):
            say(line)
        self._used = self._usage(graphs) if options.trace is not None else None
        self._order, self._num_hot = self._order_of(graphs, base_graphs(graphs))
        self.budget: Budget | None = None
        if options.budget is not None:
            from llmc.machine import available_memory
            from llmc.runtime.drafts import draft_memory
            from llmc.runtime.warm_up.cut_steps import least_cut_rows
            from llmc.runtime.warm_up.device_budget import device_room, plan_on_device
            from llmc.runtime.warm_up.tower_memory import tower_memory

            room = device_room(info, device or {})
            beside, tower = draft_memory(draft), tower_memory(images)
            if room is None:
                cut_rows = least_cut_rows(artifact, info, device or {})
                free = available_memory()
                self.budget = plan_budget(info, graphs, self._order, free, options.budget, beside, cut_rows, tower)
            else:
                self.budget = plan_on_device(info, graphs, self._order, room, options.budget, beside, tower)
            for line in self.budget.lines:
                say(f"memory: {line}")
        self._recorder: CostRecorder | None = None

    def plan(self, graphs: Sequence[GraphInfo], num_threads: int) -> WarmPlan:
        """The plan for an engine of num_threads threads."""
        options = self._options
        dropped = frozenset(self.budget.dropped if self.budget is not None else ())
        order, num_hot = self._order, self._num_hot
        if dropped:
            kept = [i for i in range(len(graphs)) if i not in dropped]
            base = base_graphs([graphs[i] for i in kept])
            order, num_hot = self._order_of(graphs, [kept[i] for i in base], dropped)
        measure: frozenset[int] = frozenset()
        # Nothing is measured behind traffic: measuring would be slow, and its results wrong.
        if options.measure is not False and options.ready_after == "all" and not options.skip:
            try:
                self._recorder = CostRecorder(self._artifact, cost_folder(options.cost_folder), graphs, num_threads)
                measure = frozenset(order) if options.again else self._recorder.unknown()
                if options.must_keep:
                    self._recorder.check_writable()
            except BucketError as error:
                if options.must_keep:
                    raise
                say(f"warning: costs are not measured: {error}")
        if options.skip:
            say("the warm-up is skipped: the first requests pay for what graphs touch first")
        return WarmPlan(
            order,
            num_hot if options.ready_after == "hot" else len(order),
            measure & frozenset(order),
            dropped,
            options.measure_s,
            MEASURE_WITHIN_S if options.measure is None else None,
            options.replay_s,
            options.skip,
        )

    def log(self) -> WarmLog:
        """Summary of a warm-up."""
        return WarmLog(self._vocab_size)

    def doubtful(self) -> frozenset[int]:
        """Indices of graphs whose measured costs are not trusted."""
        self.flush()
        return frozenset() if self._recorder is None else self._recorder.unknown()

    def take(self, step: WarmStep) -> None:
        """Records the measurements of a step."""
        if self._recorder is not None:
            self._keep(lambda recorder: recorder.take(step))

    def take_overhead(self, step_s: float, token_s: float) -> None:
        """Records the time of a step around its replay, and per sampled token."""
        if self._recorder is not None:
            self._keep(lambda recorder: recorder.take_overhead(step_s, token_s))

    def flush(self) -> CostRecorder | None:
        """Writes what is pending. Returns the recorder, or None if nothing is measured."""
        if self._recorder is not None:
            self._keep(CostRecorder.flush)
        return self._recorder

    def _keep(self, write: Callable[[CostRecorder], None]) -> None:
        """Failure to write a table must not stop a server."""
        assert self._recorder is not None
        try:
            write(self._recorder)
        except BucketError as error:
            if self._options.must_keep:
                raise
            self._recorder = None
            say(f"warning: costs are not kept: {error}")

    def _usage(self, graphs: Sequence[GraphInfo]) -> dict[str, Usage]:
        from llmc.buckets.trace import read_trace

        assert self._options.trace is not None
        return ladder_usage(read_trace(self._options.trace), map(bucket_of, graphs))

    def _order_of(
        self, graphs: Sequence[GraphInfo], base: Sequence[int], dropped: frozenset[int] = frozenset()
    ) -> tuple[tuple[int, ...], int]:
        kept = [i for i in range(len(graphs)) if i not in dropped]
        buckets = [bucket_of(graphs[i]) for i in kept]
        order, num_hot = warm_order(buckets, [kept.index(i) for i in base], self._options.strategy, self._used)
        return tuple(kept[i] for i in order), num_hot


@contextmanager
def warm_up_progress(planner: WarmUpPlanner) -> Iterator[OnWarmStep]:
    """Shows the warm-up on stderr, as a bar on a terminal, else one line per graph, and records its measurements."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from llmc.cli.render.console import Console

    console = Console(stderr=True)
    columns = (TextColumn("[warm-up]", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bars = Progress(*columns, TextColumn("{task.description}"), console=console)
    task = bars.add_task("", total=None)
    log = planner.log()

    def show(step: WarmStep) -> None:
        planner.take(step)
        log.take(step)
        draw(step)
        if step.done == step.total:
            planner.flush()
            for line in (*log.lines(), *((f"note: {step.note}",) if step.note else ())):
                say(line)

    def draw(step: WarmStep) -> None:
        if not console.is_terminal:
            print(step.line(), file=sys.stderr, flush=True)
            return
        if step.done == 1:
            bars.start()
        what = f"{step.graph.phase} {step.graph.batch}x{step.graph.bucket.length}"
        left = f"{step.remaining_s:.0f} s left, {step.memory_left / 2**30:.1f} GiB free"
        bars.update(task, total=step.total, completed=step.done, description=f"{left}, {what}")
        if step.done == step.total:
            end()

    def end() -> None:
        # Without a terminal, or when stopped twice, rich writes an empty line.
        if bars.live.is_started:
            bars.stop()

    try:
        yield show
    finally:
        end()
        planner.flush()


def say(message: str) -> None:
    """Prints a line on stderr, from one process only if mpirun started several."""
    mpi = mpi_rank()
    if mpi is None or mpi.rank == 0:
        print(f"llmc: {message}", file=sys.stderr, flush=True)
