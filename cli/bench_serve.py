"""`llmc bench serve`: from options to a workload, a run and its report."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.cli.render.bench import print_report, write_result
from llmc.output_path import check_outputs
from llmc.runtime.address import Address
from llmc.runtime.loadgen.answer import Outcome
from llmc.runtime.loadgen.arrivals import arrivals
from llmc.runtime.loadgen.buckets import BucketUse, of_server, used_between
from llmc.runtime.loadgen.dataset import Source, read_dataset
from llmc.runtime.loadgen.error import BenchError
from llmc.runtime.loadgen.http import HttpClient
from llmc.runtime.loadgen.load import LoadConfig, ServerFacts, ask_once, run_load, server_facts
from llmc.runtime.loadgen.measure import GOODPUT_METRICS, report
from llmc.runtime.loadgen.workload import FIRST_ID, GivenPrompts, Lengths, RandomTokens, Workload
from llmc.runtime.report.page import write_page

_DEFAULT_PROMPTS = 200
_DEFAULT_VOCAB = 256
_LATE_MS = 20.0


@dataclass(frozen=True)
class ServeOptions:
    """The command's options, named like its flags. num_prompts: None for 200, or for all prompts of a file."""

    url: str
    endpoint: str = "completions"
    model: str | None = None
    api_key: str | None = None
    dataset: str = "random"
    num_prompts: int | None = None
    input_len: int = 256
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    rate: float = math.inf
    burstiness: float = 1.0
    concurrency: int = 0
    time_scale: float = 1.0
    ignore_eos: bool = False
    strict: bool = False
    goodput: tuple[str, ...] = ()
    max_model_len: int | None = None
    vocab_size: int | None = None
    extra_body: str | None = None
    warmup: int = 1
    timeout_s: float = 3600.0
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """Requests and the times at which they are sent: arrival_s float64 [len(workload)], from the start of the run.

    notes: remarks without which the figures would mislead.
    """

    workload: Workload
    arrival_s: npt.NDArray[np.float64]
    notes: tuple[str, ...]


def bench_serve(
    options: ServeOptions, output: Path | None, *, quiet: bool, as_json: bool, html: Path | None = None
) -> int:
    """Runs the benchmark and returns the exit code: 1 when no request completed. Raises BenchError, WorkloadError or
    ValueError."""
    check_outputs({"--output": output, "--html": html})
    limits = parse_goodput(options.goodput)
    extra = parse_extra(options.extra_body)
    if options.time_scale <= 0 or not math.isfinite(options.time_scale):
        raise BenchError(f"--time-scale {options.time_scale:g} is not above 0: 0.1 is ten times faster")
    if not options.timeout_s > 0:
        raise BenchError(f"--timeout {options.timeout_s:g} is not above 0: give seconds")
    # Read before the server is asked: a wrong file is refused at once.
    source = read_dataset(options.dataset)
    facts, plan, outcomes, buckets = asyncio.run(_run(options, source, extra, quiet=quiet or as_json))
    found = report(outcomes, limits)
    notes = list(plan.notes)
    if found.tokens_counted:
        notes.append(f"{found.tokens_counted} answers had no usage: their output tokens are counted by events")
    if found.lag_ms is not None and options.concurrency == 0 and found.lag_ms.p99 > _LATE_MS:
        notes.append(f"requests were sent late, p99 {found.lag_ms.p99:.0f} ms: this client is too slow for the rate")
    settings = asdict(options)
    # Result files are shared, keys must not be.
    del settings["api_key"]
    settings["rate"] = None if math.isinf(options.rate) else options.rate
    result: dict[str, Any] = {
        "settings": settings,
        "server": asdict(facts),
        "notes": notes,
        "report": found.as_dict(),
        "buckets": None if buckets is None else [asdict(use) for use in buckets],
    }
    if output is not None:
        write_result(output, {**result, "requests": [_record(o, outcomes[0].start_ns) for o in outcomes]})
    if html is not None:
        from llmc.runtime.loadgen.html import bench_html

        lead = f"{facts.model} at {options.url}: {found.requests:,} requests in {found.duration_s:.2f} s."
        write_page(
            bench_html(
                "How a server answers", lead, result, result["report"], outcomes, [f"{note}." for note in notes]
            ),
            html,
        )
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_report(found, notes)
        if html is not None:
            print(f"\nwrote {html}")
    return 0 if found.completed else 1


async def _run(
    options: ServeOptions, source: Source, extra: dict[str, Any], *, quiet: bool
) -> tuple[ServerFacts, Plan, list[Outcome], list[BucketUse] | None]:
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    client = HttpClient(Address.parse(options.url), headers, options.timeout_s)
    try:
        facts = await server_facts(client, options.model)
        plan = make_plan(options, source, facts)
        config = LoadConfig(
            options.endpoint, facts.model, options.concurrency, options.ignore_eos, options.strict, extra
        )
        for number in range(options.warmup):
            await ask_once(client, _warmup_ask(options, plan, facts, number), config)
        before = await of_server(client)
        with _progress(len(plan.workload), quiet) as on_end:
            outcomes = await run_load(client, plan.workload, plan.arrival_s.tolist(), config, on_end)
        return facts, plan, outcomes, None if before is None else used_between(before, await of_server(client))
    finally:
        await client.close()


def make_plan(options: ServeOptions, source: Source, facts: ServerFacts) -> Plan:
    """Requests and arrival times for the options. Raises BenchError, WorkloadError or ValueError."""
    notes = []
    longest = options.max_model_len or facts.max_model_len
    if isinstance(source, list):
        if options.strict:
            raise BenchError("--strict-in-out-len needs random tokens or a trace: only then are lengths known")
        count = options.num_prompts or len(source)
        workload: Workload = GivenPrompts(source, count, options.output_len)
    else:
        if source is None:
            count = options.num_prompts or _DEFAULT_PROMPTS
            lengths = Lengths.uniform(count, options.input_len, options.output_len, options.range_ratio, options.seed)
        else:
            count = min(options.num_prompts or len(source), len(source))
            lengths = Lengths(source.prompt_tokens[:count], source.output_tokens[:count])
        lengths = lengths.clipped(longest)
        if lengths.num_clipped:
            notes.append(f"{lengths.num_clipped} of {count} requests were cut to the model's {longest} tokens")
        vocab = options.vocab_size or facts.vocab_size or _DEFAULT_VOCAB
        blocks = [] if source is None or not len(source.prefix_ids) else [source.prefix_of(i) for i in range(count)]
        block_len = 512 if source is None else source.prefix_block
        workload = RandomTokens(lengths, vocab, options.seed, options.prefix_len, blocks, block_len)
        if options.endpoint == "chat":
            if options.strict:
                raise BenchError("--strict-in-out-len needs --endpoint completions: chat prompts are text")
            notes.append("prompt lengths are words, not tokens: the chat endpoint takes no token ids")
    if source is None or isinstance(source, list):
        try:
            arrival_s = arrivals(count, options.rate, options.burstiness, options.seed)
        except ValueError as error:
            raise BenchError(str(error)) from error
    elif math.isinf(options.rate):
        arrival_s = source.arrival_s[:count] * options.time_scale
    else:
        raise BenchError("a trace has arrival times of its own: scale them with --time-scale instead of --rate")
    return Plan(workload, arrival_s, tuple(notes))


def _warmup_ask(options: ServeOptions, plan: Plan, facts: ServerFacts, number: int) -> Any:
    """A request like those of the run, but with other tokens: it must not fill the prefix cache for the run."""
    first = plan.workload.ask(0)
    if not isinstance(plan.workload, RandomTokens):
        return first
    vocab = options.vocab_size or facts.vocab_size or _DEFAULT_VOCAB
    draw = np.random.default_rng([options.seed, 6, number])
    return replace(first, prompt=draw.integers(FIRST_ID, vocab, len(first.prompt)).tolist())


def parse_goodput(texts: tuple[str, ...]) -> dict[str, float]:
    """Limits in ms by metric: ("ttft:500,tpot:50",) gives {"ttft": 500.0, "tpot": 50.0}. Raises BenchError."""
    limits: dict[str, float] = {}
    for part in " ".join(texts).replace(",", " ").split():
        name, _, text = part.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = -1.0
        if name not in GOODPUT_METRICS or not 0 < limit < math.inf:
            known = ", ".join(GOODPUT_METRICS)
            raise BenchError(f"--goodput {part!r} is not METRIC:MS: metrics are {known}, as in ttft:500")
        if name in limits:
            raise BenchError(f"--goodput has two limits of {name}: give one")
        limits[name] = limit
    return limits


def parse_extra(text: str | None) -> dict[str, Any]:
    """The object of --extra-body. Raises BenchError."""
    if text is None:
        return {}
    try:
        extra = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BenchError(f'--extra-body is not JSON: {error}; give an object, such as {{"top_k": 40}}') from error
    if not isinstance(extra, dict):
        raise BenchError(f"--extra-body must be a JSON object, not {text[:40]!r}")
    return extra


def _record(outcome: Outcome, zero_ns: int) -> dict[str, Any]:
    """A request in the result file; times in ms, token_ms relative to sending. zero_ns: start of the run."""
    return {
        "index": outcome.index,
        "start_ms": (outcome.start_ns - zero_ns) / 1e6,
        "lag_ms": (outcome.start_ns - outcome.due_ns) / 1e6,
        "end_ms": (outcome.end_ns - zero_ns) / 1e6,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "output_tokens": outcome.output_tokens,
        "finish_reason": outcome.finish_reason,
        "failure": outcome.failure,
        "detail": outcome.detail,
        "token_ms": [round((time_ns - outcome.start_ns) / 1e6, 3) for time_ns in outcome.token_ns],
    }


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; nothing when quiet or stderr is no terminal."""
    from llmc.cli.render.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda num_ended: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    # Drawn only when a request ends, not by a thread: CPUs are left to the server.
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bars:
        task = bars.add_task("bench", total=total)
        step = max(1, total // 100)

        def update(num_ended: int) -> None:
            if num_ended % step == 0 or num_ended == total:
                bars.update(task, completed=num_ended, refresh=True)

        yield update
