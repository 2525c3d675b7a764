"""Python over the C ABI of the runtime: artifacts, the replayer and the engine. Imports neither torch nor tvm."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from ctypes import byref, c_uint32, c_uint64, c_void_p
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from llmc.runtime import abi

IntArray = npt.ArrayLike  # converted to a contiguous int32 array

PHASES = ("prefill", "decode", "mixed")
FAMILIES = ("embedding", "norm", "linear", "rope", "attention", "activation", "gather", "other")
EVENT_KINDS = ("token", "finished", "failed")
FINISH_REASONS = (None, "stop", "length", "cancelled", "error")
MISS_POLICIES = {"larger": 0, "error": 1}
ERROR_NAMES = (
    "ok",
    "invalid_argument",
    "not_found",
    "io",
    "corrupt",
    "version",
    "unsupported_isa",
    "out_of_memory",
    "out_of_range",
    "queue_full",
    "bucket_miss",
    "internal",
)


class LlmcError(Exception):
    """A call of the runtime failed. `code` is the llmc_status, `name` its lower-case name."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.name = ERROR_NAMES[code] if 0 <= code < len(ERROR_NAMES) else str(code)


@dataclasses.dataclass(frozen=True)
class ArtifactInfo:
    num_graphs: int
    num_kernels: int
    num_commands: int
    num_weights: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    isa_level: int
    weight_bytes: int
    code_bytes: int
    max_arena_bytes: int
    kv_block_bytes: int


@dataclasses.dataclass(frozen=True)
class GraphInfo:
    phase: str
    batch: int
    seq: int
    max_tokens: int
    max_seqs: int
    max_samples: int
    max_blocks_per_seq: int
    num_commands: int
    arena_bytes: int


@dataclasses.dataclass(frozen=True)
class ReplayStats:
    """Wall time over all replays; of it, on thread 0, time in kernels (by family) and waiting for other threads."""

    num_threads: int
    num_replays: int
    total_ns: int
    kernel_ns: int
    family_ns: dict[str, int]
    barrier_ns: int


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How a request is sampled; the defaults are those of llmc.h. `seed` None: the engine draws one."""

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = False
    seed: int | None = None
    num_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Event:
    """One token of an output, its end, or the failure of a request. `top_logprobs`: (token id, logprob), best first."""

    kind: str
    request_id: int
    output_index: int
    token_id: int
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    error_code: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    time_ns: int


@dataclasses.dataclass(frozen=True)
class EngineStats:
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_threads: int
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


@functools.cache
def library() -> ctypes.CDLL:
    """The native library, loaded at first use."""
    return abi.load_library()


def version() -> str:
    """Version of the native library."""
    return library().llmc_version().decode()


def _call(name: str, *arguments: Any) -> None:
    error = abi.Error(struct_size=ctypes.sizeof(abi.Error))
    status = getattr(library(), name)(*arguments, byref(error))
    if status != 0:
        raise LlmcError(status, error.message.decode("utf-8", "replace") or f"{name} failed with status {status}")


_Struct = TypeVar("_Struct", bound=ctypes.Structure)


def _sized(struct: type[_Struct]) -> _Struct:
    value = struct()
    value.struct_size = ctypes.sizeof(struct)  # type: ignore[attr-defined]
    return value


def _plain(struct: ctypes.Structure) -> dict[str, Any]:
    names = [field[0] for field in struct._fields_]
    return {name: getattr(struct, name) for name in names if name != "struct_size"}


def _int32(name: str, values: IntArray, ndim: int = 1) -> npt.NDArray[np.int32]:
    array = np.asarray(values)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; pass integers")
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}; pass an array of {ndim} dimensions")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise ValueError(f"{name} does not fit int32")
    return np.ascontiguousarray(array, dtype=np.int32)


class _Handle:
    """An owned native object; close() is idempotent and runs at the end of a with block or at deletion."""

    _destroy = ""

    def __init__(self) -> None:
        self._pointer: c_void_p | None = None

    @property
    def pointer(self) -> c_void_p:
        if not self._pointer:
            raise ValueError(f"this {type(self).__name__} is closed")
        return self._pointer

    def close(self) -> None:
        """Releases the native object; further calls on it raise ValueError."""
        pointer, self._pointer = getattr(self, "_pointer", None), None
        if pointer:
            getattr(library(), self._destroy)(pointer)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


_Self = TypeVar("_Self", bound=_Handle)


class Artifact(_Handle):
    """An opened artifact directory. Engines and replayers made from it stay valid after close()."""

    _destroy = "llmc_artifact_close"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        pointer = c_void_p()
        _call("llmc_artifact_open", os.fsencode(path), byref(pointer))
        self._pointer = pointer

    @property
    def info(self) -> ArtifactInfo:
        info = _sized(abi.ArtifactInfo)
        _call("llmc_artifact_get_info", self.pointer, byref(info))
        return ArtifactInfo(**_plain(info))

    def graphs(self) -> list[GraphInfo]:
        """The graphs of the ladder, by index."""
        return [self._graph(index) for index in range(self.info.num_graphs)]

    def _graph(self, index: int) -> GraphInfo:
        info = _sized(abi.GraphInfo)
        _call("llmc_artifact_get_graph", self.pointer, index, byref(info))
        fields = _plain(info)
        return GraphInfo(**(fields | {"phase": PHASES[fields["phase"]]}))


class Replayer(_Handle):
    """Replays one graph at a time over a KV pool of its own; for tools, tests and benchmarks."""

    _destroy = "llmc_replayer_destroy"

    def __init__(self, artifact: Artifact, num_threads: int = 0, num_blocks: int = 0, pin_threads: bool = True) -> None:
        super().__init__()
        self._vocab_size = artifact.info.vocab_size
        self._max_commands = max(graph.num_commands for graph in artifact.graphs())
        options = abi.ReplayerOptions()
        library().llmc_replayer_options_init(byref(options))
        options.num_threads, options.num_blocks, options.pin_threads = num_threads, num_blocks, int(pin_threads)
        pointer = c_void_p()
        _call("llmc_replayer_create", artifact.pointer, byref(options), byref(pointer))
        self._pointer = pointer

    def run(
        self,
        graph: int,
        input_ids: IntArray,
        positions: IntArray,
        slot_mapping: IntArray,
        block_tables: IntArray,
        context_lens: IntArray,
        query_start: IntArray,
        sample_index: IntArray,
    ) -> npt.NDArray[np.float32]:
        """Runs graph `graph` on packed int32 arrays (FORMAT.md); returns logits [len(sample_index), vocab_size]."""
        arrays = {
            "input_ids": _int32("input_ids", input_ids),
            "positions": _int32("positions", positions),
            "slot_mapping": _int32("slot_mapping", slot_mapping),
            "block_tables": _int32("block_tables", block_tables, ndim=2),
            "context_lens": _int32("context_lens", context_lens),
            "query_start": _int32("query_start", query_start),
            "sample_index": _int32("sample_index", sample_index),
        }
        num_tokens, num_seqs = arrays["input_ids"].size, arrays["context_lens"].size
        lengths = {"positions": num_tokens, "slot_mapping": num_tokens, "query_start": num_seqs + 1}
        for name, length in lengths.items():
            if arrays[name].size != length:
                raise ValueError(f"{name} has {arrays[name].size} elements; this batch needs {length}")
        if arrays["block_tables"].shape[0] != num_seqs:
            raise ValueError(f"block_tables has {arrays['block_tables'].shape[0]} rows for {num_seqs} sequences")
        batch = _sized(abi.Batch)
        batch.num_tokens, batch.num_seqs = num_tokens, num_seqs
        batch.num_samples = arrays["sample_index"].size
        batch.block_table_stride = arrays["block_tables"].shape[1]
        for name, array in arrays.items():
            setattr(batch, name, array.ctypes.data_as(abi.I32P))
        logits = np.empty((batch.num_samples, self._vocab_size), np.float32)
        _call("llmc_replayer_run", self.pointer, graph, byref(batch), logits.ctypes.data_as(abi.F32P), logits.size)
        return logits

    def set_profiling(self, on: bool) -> None:
        """Notes from now on when each thread runs each command, for command_times()."""
        _call("llmc_replayer_set_profiling", self.pointer, int(on))

    def command_times(self, thread: int) -> npt.NDArray[np.uint64]:
        """The last replay on one thread: [commands, 3], nanoseconds since the replay began.

        The columns: the kernel starts, the kernel ends, the thread leaves the barrier behind it (without one: as before).
        """
        times, count = np.empty((3, self._max_commands), np.uint64), c_uint64()
        columns = [column.ctypes.data_as(abi.U64P) for column in times]
        _call("llmc_replayer_get_command_times", self.pointer, thread, *columns, self._max_commands, byref(count))
        return times[:, : count.value].T

    @property
    def stats(self) -> ReplayStats:
        stats = _sized(abi.ReplayStats)
        _call("llmc_replayer_get_stats", self.pointer, byref(stats))
        fields = _plain(stats)
        return ReplayStats(**(fields | {"family_ns": dict(zip(FAMILIES, fields["family_ns"], strict=True))}))


class Engine(_Handle):
    """Continuous batching. submit and cancel may be called from any thread, also during step."""

    _destroy = "llmc_engine_destroy"
    _OPTIONS = frozenset(field[0] for field in abi.EngineOptions._fields_) - {"struct_size"}
    _POLL_CAPACITY = 256

    def __init__(self, artifact: Artifact, **options: Any) -> None:
        """Options are the fields of llmc_engine_options; miss_policy also takes "larger" or "error"."""
        super().__init__()
        self._num_graphs = artifact.info.num_graphs
        native = abi.EngineOptions()
        library().llmc_engine_options_init(byref(native))
        for name, value in options.items():
            if name not in self._OPTIONS:
                raise TypeError(f"unknown engine option {name!r}; known are {', '.join(sorted(self._OPTIONS))}")
            if name == "miss_policy" and isinstance(value, str):
                if value not in MISS_POLICIES:
                    raise ValueError(f"miss_policy is {value!r}; choose one of {', '.join(MISS_POLICIES)}")
                value = MISS_POLICIES[value]
            setattr(native, name, int(value))
        pointer = c_void_p()
        _call("llmc_engine_create", artifact.pointer, byref(native), byref(pointer))
        self._pointer = pointer
        self._events = (abi.Event * self._POLL_CAPACITY)()

    def submit(
        self, prompt_ids: IntArray, params: SamplingParams | None = None, *, priority: int = 0, **sampling: Any
    ) -> int:
        """Queues a request and returns its id. Keyword arguments override fields of `params`."""
        chosen = dataclasses.replace(params or SamplingParams(), **sampling)
        prompt = _int32("prompt_ids", prompt_ids)
        stop = _int32("stop_token_ids", chosen.stop_token_ids)
        bias = (abi.LogitBias * len(chosen.logit_bias))(
            *(abi.LogitBias(token, value) for token, value in chosen.logit_bias.items())
        )
        request = abi.Request()
        library().llmc_request_init(byref(request))
        request.priority = priority
        request.prompt_token_ids = prompt.ctypes.data_as(abi.I32P)
        request.num_prompt_tokens = prompt.size
        native = request.sampling
        for name in _PLAIN_SAMPLING:
            setattr(native, name, getattr(chosen, name))
        native.ignore_eos = int(chosen.ignore_eos)
        native.has_seed = int(chosen.seed is not None)
        native.seed = chosen.seed or 0
        native.num_logprobs = -1 if chosen.num_logprobs is None else chosen.num_logprobs
        native.stop_token_ids, native.num_stop_token_ids = stop.ctypes.data_as(abi.I32P), stop.size
        native.logit_bias, native.num_logit_bias = bias, len(bias)
        request_id = c_uint64()
        _call("llmc_engine_submit", self.pointer, byref(request), byref(request_id))
        return request_id.value

    def cancel(self, request_id: int) -> None:
        """Ends a request; it finishes with reason "cancelled"."""
        _call("llmc_engine_cancel", self.pointer, request_id)

    def step(self) -> bool:
        """One iteration of the engine; False when there was nothing to do."""
        progressed = c_uint32()
        _call("llmc_engine_step", self.pointer, byref(progressed))
        return progressed.value != 0

    def poll(self) -> list[Event]:
        """Takes all events so far, oldest first."""
        events: list[Event] = []
        count = c_uint64(self._POLL_CAPACITY)
        while count.value == self._POLL_CAPACITY:
            self._events[0].struct_size = ctypes.sizeof(abi.Event)
            _call("llmc_engine_poll", self.pointer, self._events, self._POLL_CAPACITY, byref(count))
            events += [_event(self._events[i]) for i in range(count.value)]
        return events

    @property
    def stats(self) -> EngineStats:
        stats = _sized(abi.EngineStats)
        _call("llmc_engine_get_stats", self.pointer, byref(stats))
        return EngineStats(**_plain(stats))

    def graph_use(self) -> list[tuple[int, int]]:
        """Per graph: (replays, valid tokens carried)."""
        replays, tokens = (c_uint64 * self._num_graphs)(), (c_uint64 * self._num_graphs)()
        _call("llmc_engine_get_graph_use", self.pointer, replays, tokens, self._num_graphs)
        return list(zip(replays, tokens, strict=True))

    def check_integrity(self) -> None:
        """Raises LlmcError when reference counts, block tables, free list and prefix index disagree."""
        _call("llmc_engine_check_integrity", self.pointer)


_PLAIN_SAMPLING: Sequence[str] = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _event(native: abi.Event) -> Event:
    top = native.num_top
    return Event(
        kind=EVENT_KINDS[native.kind],
        request_id=native.request_id,
        output_index=native.output_index,
        token_id=native.token_id,
        finish_reason=FINISH_REASONS[native.finish_reason],
        num_prompt_tokens=native.num_prompt_tokens,
        num_cached_tokens=native.num_cached_tokens,
        num_output_tokens=native.num_output_tokens,
        error_code=native.error_code,
        logprob=native.logprob,
        top_logprobs=tuple(zip(native.top_token_ids[:top], native.top_logprobs[:top], strict=True)),
        time_ns=native.time_ns,
    )
