"""Engine statistics: totals, per graph, per missed shape, and per load of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from llmc.buckets.bucket import Bucket


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """llmc_engine_stats of llmc.h: present state, and counts and times since the engine was created.

    device: the device's own counters.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    max_request_tokens: int
    num_steps: int
    num_prefill_steps: int
    num_decode_steps: int
    num_preemptions: int
    num_finished: int
    num_bucket_misses: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    scheduled_tokens: int
    padded_tokens: int
    step_ns: int
    replay_ns: int
    sample_ns: int
    schedule_ns: int
    prepare_ns: int
    kernel_ns: int
    barrier_ns: int
    decode_step_ns: int
    decode_kernel_ns: int
    decode_barrier_ns: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_mixed_steps: int
    num_missed_shapes: int
    num_evictions: int
    num_promotions: int
    num_speculative_steps: int
    drafted_tokens: int
    accepted_tokens: int
    num_draft_blocks: int
    num_free_draft_blocks: int
    draft_ns: int
    num_ahead_steps: int
    num_thrown_rows: int
    judged_tokens: int
    num_states: int
    num_free_states: int
    num_kept_states: int
    mask_wait_ns: int
    device: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class GraphStats:
    """Replays of one graph: valid tokens, padding, wall time. launched: 1 if it has no recording to replay, so that its
    steps launch kernels one by one."""

    replays: int
    tokens: int
    padded_tokens: int
    replay_ns: int
    launched: int = 0


@dataclasses.dataclass(frozen=True)
class BucketMiss:
    """Steps that no graph of their phase held. num_blocks: KV blocks of the longest sequence. graph: the one that ran
    them; None if split or failed. wanted: the bucket to add."""

    phase: str
    num_seqs: int
    num_tokens: int
    num_blocks: int
    count: int
    graph: int | None = None
    wanted: Bucket = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class StepShape:
    """`count` steps of equal load in graph `graph`. phase: of the load. num_blocks: KV blocks of the longest sequence.
    all_blocks: of decodes, of all sequences together; else 0.
    replay_ns, replay_ns_squared: sums over the steps."""

    phase: str
    graph: int
    num_seqs: int
    num_tokens: int
    num_samples: int
    num_blocks: int
    all_blocks: int
    count: int
    replay_ns: int
    replay_ns_squared: float


MARK_KINDS = {1: "prefill", 2: "preempted"}


@dataclasses.dataclass(frozen=True)
class RequestMark:
    """A mark of a continuation in a step. kind: "prefill" or "preempted".

    "prefill": tokens [start, start + count) were computed in graph `graph`. Times are on time.monotonic_ns().
    """

    kind: str
    request_id: int
    output_index: int
    graph: int
    start: int
    count: int
    begin_ns: int
    end_ns: int
