"""The order in which buckets are warmed up, and the hot ones that a server must not start without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llmc.graphs_format import PHASES

from .bucket import REQUIRED_PHASES, Bucket, BucketError
from .demand import ServerModel, demands
from .trace import Trace
from .usage import Usage, usage

STRATEGIES = ("auto", "traffic", "min_tokens", "max_bs")
HOT_SHARE = 0.95


def ladder_usage(trace: Trace, buckets: Iterable[Bucket]) -> dict[str, Usage]:
    """Use of prefill and decode buckets by the steps of a trace, by phase. Raises BucketError if a phase has no
    bucket."""
    phases: dict[str, list[Bucket]] = {"prefill": [], "decode": []}
    for bucket in buckets:
        phases.setdefault(bucket.phase, []).append(bucket)
    prefill, decode = phases["prefill"], phases["decode"]
    if not prefill or not decode:
        raise BucketError("use by a trace needs prefill and decode buckets: leave the trace out")
    server = ServerModel(
        # A total is for all sequences together.
        max_model_len=max(b.seq // b.batch if b.total else b.seq for b in decode),
        max_num_seqs=max(b.batch for b in decode),
        max_prefill_batch=max(b.batch for b in prefill),
        max_prefill_tokens=max(b.max_tokens for b in prefill),
    )
    asked = demands(trace, server, REQUIRED_PHASES, contexts=any(b.total for b in decode))
    return {phase: usage(demand, phases[phase]) for phase, demand in asked.items()}


def parse_strategies(text: str) -> dict[str, str]:
    """The strategy of each phase: one name for all, or phase=name,… with auto for the phases left out.

    Raises BucketError naming an unknown phase or strategy.
    """
    if "=" not in text:
        return {phase: _known(text) for phase in PHASES}
    chosen = dict.fromkeys(PHASES, "auto")
    named: set[str] = set()
    for part in text.split(","):
        phase, _, strategy = (word.strip() for word in part.partition("="))
        if phase not in PHASES:
            raise BucketError(f"warm-up order {text!r} names the phase {phase!r}: use {', '.join(PHASES)}")
        if phase in named:
            raise BucketError(f"warm-up order {text!r} names {phase} twice: give each phase once")
        named.add(phase)
        chosen[phase] = _known(strategy)
    return chosen


def _known(strategy: str) -> str:
    if strategy not in STRATEGIES:
        raise BucketError(f"warm-up order {strategy!r} is unknown: use one of {', '.join(STRATEGIES)}")
    return strategy


def warm_order(
    buckets: Sequence[Bucket], base: Iterable[int], strategy: str = "auto", used: Mapping[str, Usage] | None = None
) -> tuple[tuple[int, ...], int]:
    """Bucket indices in warm-up order, and the number of leading ones that are hot.

    strategy: as `parse_strategies` reads it.
    base: buckets that together can serve everything; they come first and are hot.
    traffic (auto, with a trace): by a bucket's share of its phase's steps in `used`. Hot are the buckets that serve 95
    % of each such phase.
    min_tokens: fewest tokens first. max_bs: largest batches first.
    auto without a trace: like vLLM on Gaudi, min_tokens for prompts and max_bs for decode. Without shares, prompts come
    before decode.
    Raises BucketError.
    """
    by_phase = parse_strategies(strategy)
    if used is None and "traffic" in by_phase.values():
        raise BucketError("warm-up order traffic needs a trace: give one, or use min_tokens or max_bs")
    counted = {phase for phase, name in by_phase.items() if name == "traffic" or (name == "auto" and used is not None)}
    base = set(base)
    shares = [
        share if bucket.phase in counted else 0.0
        for bucket, share in zip(buckets, _shares(buckets, used or {}), strict=True)
    ]
    order = sorted(
        range(len(buckets)), key=lambda i: (i not in base, -shares[i], *_rank(buckets[i], by_phase[buckets[i].phase]))
    )
    hot, covered = set(base), dict.fromkeys(counted, 0.0)
    for index in base:
        covered[buckets[index].phase] = covered.get(buckets[index].phase, 0.0) + shares[index]
    for index in order:
        phase = buckets[index].phase
        if index not in hot and shares[index] > 0 and covered[phase] < HOT_SHARE:
            hot.add(index)
            covered[phase] += shares[index]
    return tuple(sorted(order, key=lambda i: i not in hot)), len(hot)


def _rank(bucket: Bucket, strategy: str) -> tuple[bool, float, float, int]:
    """Sort key within a strategy: prompts before decode."""
    decode = bucket.phase == "decode"
    if strategy == "max_bs" or (strategy != "min_tokens" and decode):
        return decode, -bucket.batch, bucket.each, 0
    return decode, bucket.batch * bucket.each, bucket.each, bucket.batch


def _shares(buckets: Sequence[Bucket], used: Mapping[str, Usage]) -> list[float]:
    """Each bucket's share of its phase's steps, 0 … 1."""
    share = {use.bucket: use.steps / one.steps for one in used.values() for use in one.uses if one.steps > 0}
    return [share.get(bucket, 0.0) for bucket in buckets]
