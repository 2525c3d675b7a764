"""What a trace meets on several ranks, stages and replicas: each replica runs its requests in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from llmc.buckets.arrangement import Arrangement, DividedModel
from llmc.buckets.trace import Trace
from llmc.runtime.context_limit import DEFAULT_KV_BYTES
from llmc.runtime.simulation.engine import Pipeline
from llmc.runtime.simulation.what_if import Floats, Ladder, Server, WhatIf, percentile

# As of `llmc route`: a replica may have that many times the mean before a prompt goes to one that has not seen it.
_LOAD_BOUND = 1.25
# All requests at once.
_FLOOD = float("inf")

OnRun = Callable[[str, int, int], None]
"""Called with a label, the requests that have ended, and all."""


@dataclass(frozen=True)
class Scaled:
    """A trace on one arrangement. Times are in seconds, NaN for a request that was not served.

    ttft_s, total_s [N]: from the arrival to the first and to the last token. token_s [N]: between two tokens of an
    answer. tokens_per_s: output of all replicas if every request waits from the start. message_share: the part of the
    steps' time that messages between ranks take then, 0 … 1.
    """

    arrangement: Arrangement
    ttft_s: Floats
    total_s: Floats
    token_s: Floats
    tokens_per_s: float
    message_share: float

    def percentile_of(self, name: str, percent: float) -> float:
        """Percentile of one of the times by name, in seconds."""
        return percentile(getattr(self, name), percent)


@dataclass(frozen=True)
class Stages:
    """How stages work together. steps_in_flight: 0 means as many as stages. bus_share: what a stage takes of one memory
    bus of all stages of a replica while it reads; 0: each has a bus of its own."""

    steps_in_flight: int = 0
    bus_share: float = 0.0


def scaled(
    one: WhatIf, ladder: Ladder, model: DividedModel, progress: OnRun | None = None, stages: Stages = Stages()
) -> Scaled:
    """The trace of `one`, whose costs are those of a single rank, on the arrangement of `model`.

    A replica gets the prompts whose beginning it has seen, unless it has more than its share of tokens.
    Raises BucketError and LlmcError.
    """
    model.check()
    costs = model.costs(one.costs)
    in_flight = (stages.steps_in_flight or model.arrangement.stages) if model.arrangement.stages > 1 else 1
    pipeline = Pipeline(
        model.arrangement.stages, in_flight, stages.bus_share, float(model.share_s(np.asarray(_read_s(one, ladder))))
    )
    server = _server_of(one.server, model.arrangement, in_flight)
    parts = share_out(one.trace, model.arrangement.replicas)
    ttft, total, token = (np.full(len(one.trace), np.nan) for _ in range(3))
    done, all_runs = 0, 2 * len(one.trace)
    span = busy = messages = 0.0
    for rows in parts:
        if not len(rows):
            continue
        mine = replace(one, trace=one.trace.rows(rows), server=server, costs=costs, pipeline=pipeline)
        _, ttft[rows], total[rows] = mine.times(ladder)
        token[rows] = (total[rows] - ttft[rows]) / np.maximum(mine.outputs - 1, 1)
        flood = replace(mine, speed=_FLOOD)
        loads, _, all_at = flood.times(ladder)
        span = max(span, float(np.nanmax(all_at, initial=0.0)))
        for load in loads:
            rows_each = load.tokens / load.replays
            each = float(model.messages_s(rows_each, min(load.num_seqs, rows_each)))
            messages, busy = messages + each * load.replays, busy + load.ns / 1e9
        done += 2 * len(rows)
        if progress is not None:
            progress(str(model.arrangement), done, all_runs)
    return Scaled(
        arrangement=model.arrangement,
        ttft_s=ttft,
        total_s=total,
        token_s=np.where(one.outputs > 1, token, np.nan),
        tokens_per_s=float(one.outputs.sum()) / span if span else 0.0,
        message_share=messages / busy if busy else 0.0,
    )


def _read_s(one: WhatIf, ladder: Ladder) -> float:
    """Seconds in which a single rank reads all weights: the quickest step of a single row."""
    return min(
        one.costs.curves(bucket, ladder.tile(index))[0].seconds[0] for index, bucket in enumerate(ladder.buckets)
    )


def _server_of(server: Server, arrangement: Arrangement, in_flight: int) -> Server:
    """The server with KV blocks for the sequences of all steps in flight. A rank holds a part of each block."""
    parts = arrangement.ranks * arrangement.stages
    block_bytes = max(1, server.kv_block_bytes // parts)
    server = replace(server, kv_block_bytes=block_bytes, state_bytes=server.state_bytes // parts)
    if server.num_blocks:
        return server
    blocks = server.max_num_seqs * in_flight * -(-server.max_model_len // server.block_size)
    return replace(server, num_blocks=max(1, min(blocks, DEFAULT_KV_BYTES // block_bytes)))


def share_out(trace: Trace, replicas: int) -> list[npt.NDArray[np.int64]]:
    """Indices of each replica's requests, ascending.

    Approximates a router: it goes by what it has given to each replica, not by what that has still to do.
    """
    given = [0] * replicas
    seen: dict[int, int] = {}
    parts: list[list[int]] = [[] for _ in range(replicas)]
    tokens = (trace.prompt_tokens + trace.output_tokens).tolist()
    for index, size in enumerate(tokens):
        ids = trace.prefix_of(index).tolist()
        known = next((seen[block] for block in reversed(ids) if block in seen), None)
        most = _LOAD_BOUND * (sum(given) + size) / replicas
        replica = known if known is not None and given[known] + size <= most else int(np.argmin(given))
        given[replica] += size
        parts[replica].append(index)
        seen.update(dict.fromkeys(ids, replica))
    return [np.array(part, np.int64) for part in parts]
