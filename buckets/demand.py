"""A trace's demand on buckets: how often each step shape (number of sequences, longest length) occurs.

Prefill with one sequence per step: every chunk of a prompt, at most max_prefill_tokens, is one step. Everything else
depends on which requests run together, which `replay` simulates: a continuous-batching server in virtual time. It
follows the engine's policy: first come, first served; prefill and decode steps alternate while both have work.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .bucket import MAX_DIM, BucketError
from .trace import Trace

MAX_REPLAYED = 100_000
_WINDOWS = 10

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ServerModel:
    """The simulated server. Lengths in tokens, times in seconds.

    max_prefill_tokens: 0 means max_model_len. handed_block: prompts of handed_from tokens or more come from a prefill
    server, in whole blocks of that many tokens; 0: none. Raises BucketError for values that are not positive.
    """

    max_model_len: int = 4096
    max_num_seqs: int = 16
    max_prefill_batch: int = 1
    max_prefill_tokens: int = 0
    prefill_tokens_per_s: float = 20_000.0
    decode_step_s: float = 0.02
    prefix_cache: bool = False
    handed_block: int = 0
    handed_from: int = 0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_prefill_batch", "prefill_tokens_per_s", "decode_step_s"):
            if not 0 < getattr(self, name) < math.inf:
                flag = {"prefill_tokens_per_s": "prefill-rate", "decode_step_s": "decode step, in seconds,"}.get(
                    name, name
                )
                raise BucketError(
                    f"{flag.replace('_', '-')} {getattr(self, name)} is out of range: use a positive number"
                )
        if self.max_prefill_tokens < 0:
            raise BucketError(f"max-prefill-tokens {self.max_prefill_tokens} is negative: use 0 for max-model-len")
        for name in ("max_model_len", "max_num_seqs", "max_prefill_batch", "max_prefill_tokens"):
            if getattr(self, name) > MAX_DIM:
                raise BucketError(f"{name.replace('_', '-')} {getattr(self, name)} is too large: use at most {MAX_DIM}")

    @property
    def max_chunk(self) -> int:
        """Most tokens of one prompt in one prefill step."""
        return min(self.max_prefill_tokens or self.max_model_len, self.max_model_len)


@dataclass(frozen=True, slots=True)
class Demand:
    """Steps of one phase, by shape: `weight` steps of `batch` sequences, the longest of `seq` tokens, columns of [P].

    asked [P]: Σ batch × true longest length over those steps, if seq is rounded up; None if seq is exact. total: for
    decode, seq (and asked, unrounded) is the sum of all contexts, each in whole KV blocks. contexts [P]: that sum,
    unrounded, for decode by the longest context; None if unknown.
    """

    phase: str
    batch: Ints
    seq: Ints
    weight: Floats
    asked: Floats | None = None
    total: bool = False
    contexts: Ints | None = None

    @property
    def tokens(self) -> float:
        """Tokens that all steps would compute in buckets of exactly their shape."""
        return float(np.sum(self.asked_each))

    @property
    def asked_each(self) -> Floats:
        """As `tokens`, per shape: [P]."""
        rows = 1 if self.total else self.batch
        return np.asarray(self.weight * rows * self.seq if self.asked is None else self.asked, np.float64)


@dataclass(slots=True)
class Replay:
    """The result of a replay: prefill steps [batch, longest], and runs of decode steps [batch, first longest, steps,
    first total of contexts]."""

    prefill: list[tuple[int, int]] = field(default_factory=list)
    decode: list[tuple[int, int, int, int]] = field(default_factory=list)


def clip(trace: Trace, server: ServerModel) -> tuple[Ints, Ints, Ints]:
    """(prompt to compute, context after it, tokens to decode) of every request, clipped to max_model_len: [N] each.

    Prefill yields the first output token, so a request of n output tokens decodes n - 1 times.
    """
    context = np.minimum(trace.prompt_tokens, server.max_model_len)
    decodes = np.maximum(np.minimum(trace.output_tokens, server.max_model_len - context + 1) - 1, 0)
    prompt = context
    if server.prefix_cache:
        prompt = np.maximum(context - np.minimum(trace.cached_tokens(), context - 1), 1)
    if server.handed_block:
        rest = (context - 1) % server.handed_block + 1
        prompt = np.where(context >= server.handed_from, np.minimum(prompt, rest), prompt)
    return prompt, context, decodes


def demands(trace: Trace, server: ServerModel, phases: tuple[str, ...], *, contexts: bool = False) -> dict[str, Demand]:
    """The demand of each phase.

    A trace of more than MAX_REPLAYED requests is replayed in ten stretches spread over it, and scaled up; prefill of
    one sequence per step counts every request. contexts: give each decode step its total of contexts, which takes a row
    for every step. Raises BucketError if a phase has no steps.
    """
    prompt, context, decodes = clip(trace, server)
    result = {}
    exact_prefill = "prefill" in phases and server.max_prefill_batch == 1
    if exact_prefill:
        result["prefill"] = _chunks(prompt, server.max_chunk)
    if "decode" in phases or ("prefill" in phases and not exact_prefill):
        run, scale = _replay_windows(trace.arrival_s, prompt, context, decodes, server)
        if "prefill" in phases and not exact_prefill:
            result["prefill"] = _prefill_demand(run, scale)
        if "decode" in phases:
            if not run.decode:
                raise BucketError(f"trace {trace.name} has no request that decodes: plan only prefill")
            result["decode"] = _decode_steps(run, scale) if contexts else _decode_demand(run, scale)
    return result


def replay(arrival_s: Floats, prompt: Ints, context: Ints, decodes: Ints, server: ServerModel) -> Replay:
    """Serves the requests in virtual time.

    Contexts grow by a token per decode step, so a stretch without arrivals and finishes is one entry of
    `Replay.decode`. The work is a few heap operations per request.
    """
    run = Replay()
    arrivals, prompts = arrival_s.tolist(), prompt.tolist()
    contexts, remaining = context.tolist(), decodes.tolist()
    waiting: deque[int] = deque()
    finishing: list[tuple[int, int]] = []  # heap of (decode step after which a sequence finishes, its context then)
    longest: list[tuple[int, int]] = []  # (-(context - first step), finish): context at step d is -key + d + 1
    now, step, next_arrival, total = 0.0, 0, 0, 0
    while next_arrival < len(arrivals) or waiting or finishing:
        if not waiting and not finishing:
            now = max(now, arrivals[next_arrival])
        while next_arrival < len(arrivals) and arrivals[next_arrival] <= now:
            waiting.append(next_arrival)
            next_arrival += 1
        slots = server.max_num_seqs - len(finishing)
        steps = 0
        if waiting and slots > 0:
            taken, tokens = _admit(waiting, prompts, slots, server, run)
            now += tokens / server.prefill_tokens_per_s
            # Sequences that ran before this prefill get one decode step next; new ones join it.
            steps = 1
            for request in taken:
                if remaining[request] > 0:
                    heapq.heappush(finishing, (step + remaining[request], contexts[request] + remaining[request]))
                    total += contexts[request]
                    heapq.heappush(longest, (step - contexts[request], step + remaining[request]))
        if finishing:
            if steps == 0:
                steps = finishing[0][0] - step
                if next_arrival < len(arrivals) and slots > 0:
                    until = (arrivals[next_arrival] - now) / server.decode_step_s
                    steps = max(1, min(steps, int(until) + 1 if until < steps else steps))
            while longest[0][1] <= step:
                heapq.heappop(longest)
            batch = len(finishing)
            run.decode.append((batch, step - longest[0][0] + 1, steps, total + batch))
            step, total = step + steps, total + batch * steps
            now += steps * server.decode_step_s
            while finishing and finishing[0][0] <= step:
                total -= heapq.heappop(finishing)[1]
    return run


def _admit(
    waiting: deque[int], prompts: list[int], slots: int, server: ServerModel, run: Replay
) -> tuple[list[int], int]:
    """Moves the head of the queue into prefill steps: one chunked prompt, or as many prompts as fit one step."""
    head = waiting.popleft()
    taken, length, tokens = [head], prompts[head], prompts[head]
    limit = server.max_chunk
    while length > limit:
        run.prefill.append((1, limit))
        length -= limit
    if prompts[head] <= limit:
        budget = server.max_prefill_tokens or server.max_model_len
        most = min(slots, server.max_prefill_batch)
        while waiting and len(taken) < most:
            padded = max(length, prompts[waiting[0]]) * (len(taken) + 1)
            if padded > budget:
                break
            length = max(length, prompts[waiting[0]])
            tokens += prompts[waiting[0]]
            taken.append(waiting.popleft())
    run.prefill.append((len(taken), length))
    return taken, tokens


def _replay_windows(
    arrival_s: Floats, prompt: Ints, context: Ints, decodes: Ints, server: ServerModel
) -> tuple[Replay, float]:
    total = len(arrival_s)
    if total <= MAX_REPLAYED:
        return replay(arrival_s, prompt, context, decodes, server), 1.0
    size = MAX_REPLAYED // _WINDOWS
    run = Replay()
    for window in range(_WINDOWS):
        start = window * (total - size) // (_WINDOWS - 1)
        part = slice(start, start + size)
        piece = replay(arrival_s[part], prompt[part], context[part], decodes[part], server)
        run.prefill += piece.prefill
        run.decode += piece.decode
    return run, total / (size * _WINDOWS)


def _chunks(prompt: Ints, chunk: int) -> Demand:
    lengths, counts = np.unique(prompt % chunk, return_counts=True)
    lengths, weight = np.append(lengths, chunk), np.append(counts, np.sum(prompt // chunk)).astype(np.float64)
    some = (lengths > 0) & (weight > 0)
    return Demand("prefill", np.ones(np.count_nonzero(some), np.int64), lengths[some], weight[some])


def _prefill_demand(run: Replay, scale: float) -> Demand:
    shapes, counts = np.unique(np.array(run.prefill, np.int64), axis=0, return_counts=True)
    return Demand("prefill", shapes[:, 0], shapes[:, 1], counts.astype(np.float64) * scale)


def _decode_demand(run: Replay, scale: float) -> Demand:
    """Each run of decode steps adds one to every context length that it passes, batch by batch.

    The number of runs passing a length changes only where a run begins or ends.
    """
    runs = np.array(run.decode, np.int64)
    batches, seqs, weights = [], [], []
    for batch in np.unique(runs[:, 0]):
        mine = runs[runs[:, 0] == batch]
        first, end = mine[:, 1], mine[:, 1] + mine[:, 2]
        edges = np.unique(np.concatenate((first, end)))
        change = np.zeros(len(edges), np.int64)
        np.add.at(change, np.searchsorted(edges, first), 1)
        np.add.at(change, np.searchsorted(edges, end), -1)
        counts, sizes = np.cumsum(change)[:-1], np.diff(edges)
        sizes[counts == 0] = 0
        starts = np.cumsum(sizes) - sizes
        lengths = np.arange(int(sizes.sum())) + np.repeat(edges[:-1] - starts, sizes)
        batches.append(np.full(len(lengths), batch))
        seqs.append(lengths)
        weights.append(np.repeat(counts, sizes).astype(np.float64) * scale)
    return Demand("decode", np.concatenate(batches), np.concatenate(seqs), np.concatenate(weights))


def _decode_steps(run: Replay, scale: float) -> Demand:
    """Every decode step by itself, with its total of contexts: each of them grows by one a step."""
    batch, first, steps, total = np.array(run.decode, np.int64).T
    since = np.arange(int(steps.sum())) - np.repeat(np.cumsum(steps) - steps, steps)
    each = np.repeat(batch, steps)
    contexts = np.repeat(total, steps) + each * since
    weight = np.full(len(since), scale)
    return Demand("decode", each, np.repeat(first, steps) + since, weight, contexts=contexts)
