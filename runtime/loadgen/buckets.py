"""Buckets used in a run, from an engine's counters before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.runtime.binding.artifact import GraphInfo
from llmc.runtime.binding.statistics import GraphStats

from .http import HttpClient, HttpError

STATE_PATH = "/v1/llmc/state"


@dataclass(frozen=True)
class BucketUse:
    """Replays of a bucket: requested tokens, padding tokens, and seconds."""

    bucket: str
    replays: int
    tokens: int
    padding_tokens: int
    replay_s: float


def of_engine(graphs: Sequence[GraphInfo], stats: Sequence[GraphStats]) -> list[BucketUse]:
    """The counters of an engine in this process."""
    return [
        BucketUse(str(g.bucket), s.replays, s.tokens, s.padded_tokens, s.replay_ns / 1e9)
        for g, s in zip(graphs, stats, strict=False)
    ]


async def of_server(client: HttpClient) -> list[BucketUse] | None:
    """The counters of a server; None if it does not provide them, as servers other than llmc's."""
    try:
        reply = await client.request("GET", STATE_PATH)
        found = json.loads(reply.body)["buckets"] if reply.status == 200 else None
        return None if found is None else [_use(one) for one in found]
    except (HttpError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _use(one: Mapping[str, Any]) -> BucketUse:
    name = f"{one['phase']}:{one['batch']}x{one['seq']}"
    return BucketUse(name, int(one["replays"]), int(one["tokens"]), int(one["padding_tokens"]), float(one["replay_s"]))


def used_between(before: Sequence[BucketUse] | None, after: Sequence[BucketUse] | None) -> list[BucketUse] | None:
    """The increase, in the order of `after`; None if either is unknown."""
    if before is None or after is None:
        return None
    known = {use.bucket: use for use in before}
    gained = []
    for use in after:
        old = known.get(use.bucket, BucketUse(use.bucket, 0, 0, 0, 0.0))
        gained.append(
            BucketUse(
                use.bucket,
                use.replays - old.replays,
                use.tokens - old.tokens,
                use.padding_tokens - old.padding_tokens,
                use.replay_s - old.replay_s,
            )
        )
    return gained
