"""The engine: continuous batching over the graphs of an artifact. Imports neither torch nor tvm."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_float, c_int32, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from llmc.buckets.bucket import Bucket
from llmc.graphs_format import PHASES
from llmc.runtime.binding import abi
from llmc.runtime.binding.adapter_matrices import AdapterMatrix, NativeMatrices
from llmc.runtime.binding.artifact import Artifact
from llmc.runtime.binding.devices import OPTION_NAMES, Device, device_for, device_stats
from llmc.runtime.binding.events import Event, event_of
from llmc.runtime.binding.handle import Handle, IntArray, call, initial, int32, named, plain, sized, whole
from llmc.runtime.binding.placed_rows import NativePlacedRows, PlacedRows
from llmc.runtime.binding.sampling import NativeSampling, SamplingParams
from llmc.runtime.binding.statistics import MARK_KINDS, BucketMiss, EngineStats, GraphStats, RequestMark, StepShape

MISS_POLICIES = {"larger": 0, "error": 1, "split": 2}
_FOREVER = 2**64 - 1


@dataclasses.dataclass(frozen=True)
class Ready:
    """Result of wait. events: there are events to poll. work: there is work to step. Both false after a timeout."""

    events: bool
    work: bool


class Engine(Handle):
    """Continuous batching. submit, cancel, set_token_mask, wait and statistics are thread-safe, also during step; poll
    from one thread at a time."""

    _destroy = "llmc_engine_destroy"
    _FIELDS: ClassVar[Mapping[str, Any]] = {field[0]: field[1] for field in abi.EngineOptions._fields_}
    _OPTIONS = frozenset(_FIELDS) - {"struct_size", "reserved", "reserved2", "reserved3", "draft"}
    _NAMED: ClassVar[Mapping[str, Mapping[str, int]]] = {"miss_policy": MISS_POLICIES}
    _POLL_CAPACITY = 256

    def __init__(
        self, artifact: Artifact, *, device: Device | None = None, draft: Artifact | None = None, **options: Any
    ) -> None:
        """Options are the fields of llmc_engine_options; miss_policy may also be a name of MISS_POLICIES.

        device: None opens one of the artifact's kind, with the options among OPTION_NAMES. draft: a draft model for
        speculation; it may be closed afterwards.
        """
        super().__init__()
        self._num_graphs = artifact.info.num_graphs
        native = self._native_options({name: value for name, value in options.items() if name not in OPTION_NAMES})
        pointer = c_void_p()
        native.draft = None if draft is None else draft.pointer
        with device_for(artifact, device, options) as opened:
            call("llmc_engine_create", opened.pointer, artifact.pointer, byref(native), byref(pointer))
            self.ranks = opened.ranks
        self._pointer = pointer
        self._events = (abi.Event * self._POLL_CAPACITY)()
        self._adapter_linears = artifact.adapter_linears()
        self._states_width = artifact.info.states_width
        self._gives_vectors = artifact.info.vector_width > 0
        self.block_size = artifact.info.block_size
        self.handed_block_bytes = 8 + 4 * self.block_size + artifact.info.kv_block_bytes
        """Bytes of a block that is handed over."""
        self.handed_state_bytes = 8 + artifact.info.state_bytes if artifact.info.state_bytes else 0
        """Bytes of the states behind the last block; 0 for a model without states."""
        self.speculate_tokens = int(native.speculate_tokens)
        """Most guesses of a sequence in a step."""
        self.has_draft = draft is not None
        self._vectors: dict[int, npt.NDArray[np.float32]] = {}
        """Arrays that the engine may still write to."""
        self._vectors_lock = threading.Lock()

    @classmethod
    def _native_options(cls, options: Mapping[str, Any]) -> abi.EngineOptions:
        native = initial("llmc_engine_options_init", abi.EngineOptions)
        for name, value in options.items():
            if name not in cls._OPTIONS:
                known = ", ".join(sorted(cls._OPTIONS | OPTION_NAMES))
                raise TypeError(f"unknown engine option {name!r}; known are {known}")
            if name in cls._NAMED and isinstance(value, str):
                value = named(name, value, cls._NAMED[name])
            setattr(native, name, whole(name, value, cls._FIELDS[name]))
        return native

    def submit(
        self,
        prompt_ids: IntArray,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        guided: bool = False,
        num_prompt_logprobs: int | None = None,
        deadline_ns: int = 0,
        vector: npt.NDArray[np.float32] | None = None,
        adapter: int = 0,
        num_output_tokens: int = 0,
        output_index: int = 0,
        placed: Sequence[PlacedRows] = (),
        **sampling: Any,
    ) -> int:
        """Queues a request and returns its id. Other keyword arguments override fields of `params`.

        guided: each token needs a mask (set_token_mask).
        num_prompt_logprobs: None, or 0 … 20 alternatives for each prompt token.
        deadline_ns: on time.monotonic_ns(); the request then ends with reason "timeout"; 0 for never.
        vector: for a model that returns vectors: array of vector_width floats, filled before "finished" and referenced
        until then.
        adapter: from load_adapter; 0 for none.
        num_output_tokens: this many tokens at the end of prompt_ids were drawn elsewhere, as continuation output_index
        of a request with the same seed. What follows has the bits that it would have had there.
        placed: rows that take the place of tokens, ascending and apart; not of the last one.
        Raises LlmcError.
        """
        chosen = dataclasses.replace(params or SamplingParams(), **sampling)
        prompt, native = int32("prompt_ids", prompt_ids), NativeSampling(chosen)
        request = initial("llmc_request_init", abi.Request)
        request.priority = priority
        request.prompt_token_ids = prompt.ctypes.data_as(abi.I32P)
        request.num_prompt_tokens = prompt.size
        request.guided, request.deadline_ns, request.adapter = int(guided), deadline_ns, adapter
        request.num_output_tokens, request.output_index = num_output_tokens, output_index
        request.num_prompt_logprobs = -1 if num_prompt_logprobs is None else num_prompt_logprobs
        request.sampling = native.pointer
        rows = NativePlacedRows(placed, self._states_width)
        request.placed, request.num_placed = rows.array, len(placed)
        request_id = c_uint64()
        if vector is None:
            call("llmc_engine_submit", self.pointer, byref(request), byref(request_id))
            return request_id.value
        if vector.dtype != np.float32 or vector.ndim != 1 or not vector.flags.c_contiguous:
            raise TypeError(f"vector is {vector.dtype} of shape {vector.shape}; pass a float32 array of 1 dimension")
        request.vector, request.vector_capacity = vector.ctypes.data_as(POINTER(c_float)), vector.size
        # Locked, so that the request's last event cannot be polled before its array is registered.
        with self._vectors_lock:
            call("llmc_engine_submit", self.pointer, byref(request), byref(request_id))
            self._vectors[request_id.value] = vector
        return request_id.value

    def cancel(self, request_id: int) -> None:
        """Ends a request; it finishes with reason "cancelled"."""
        call("llmc_engine_cancel", self.pointer, request_id)

    def load_adapter(self, matrices: Sequence[AdapterMatrix]) -> int:
        """Loads an adapter into a free slot, also during a step; returns its number for requests.

        Layers without a matrix stay unchanged. Raises LlmcError ("queue_full" if every slot is taken), and IndexError
        or ValueError for matrices that do not fit the artifact.
        """
        native = NativeMatrices(matrices, self._adapter_linears)
        number = c_uint64()
        call("llmc_engine_load_adapter", self.pointer, native.array, len(native.array), byref(number))
        return number.value

    def unload_adapter(self, adapter: int) -> None:
        """Stops new requests from using it; its slot is freed when running ones end. Raises LlmcError."""
        call("llmc_engine_unload_adapter", self.pointer, adapter)

    def set_token_mask(self, request_id: int, output_index: int, words: npt.ArrayLike) -> None:
        """The tokens that a guided continuation may take next.

        words: uint32 [1 … ceil(vocab_size / 32)]; bit t % 32 of word t / 32 allows token t. Each mask serves one token;
        see llmc.h. Raises LlmcError.
        """
        array = np.ascontiguousarray(words)
        if array.dtype not in (np.uint32, np.int32) or array.ndim != 1:
            raise TypeError(f"words is {array.dtype} of shape {array.shape}; pass uint32 of one dimension")
        pointer = array.ctypes.data_as(abi.U32P)
        call("llmc_engine_set_token_mask", self.pointer, request_id, output_index, pointer, array.size)

    def set_token_masks(
        self, request_id: int, output_index: int, words: Sequence[npt.NDArray[np.uint32]], guesses: Sequence[int]
    ) -> None:
        """Sets the mask of the next token, then one after each guess, so that a step may verify these guesses.

        Tokens beyond the end of a mask are forbidden. Guesses never change the result. Raises LlmcError.
        """
        if len(words) != len(guesses) + 1:
            raise ValueError(f"there are {len(words)} masks for {len(guesses)} guesses; pass one more than guesses")
        masks, tokens = np.zeros((len(words), max(map(len, words))), np.uint32), int32("guesses", guesses)
        for mask, given in zip(masks, words, strict=True):
            mask[: len(given)] = given
        call(
            "llmc_engine_set_token_masks",
            *(self.pointer, request_id, output_index, masks.ctypes.data_as(abi.U32P), masks.shape[1]),
            *(tokens.ctypes.data_as(abi.I32P), tokens.size),
        )

    def guesses(self, request_id: int, output_index: int) -> list[int]:
        """Likely next tokens of a guided continuation that "needs_mask": those worth computing masks for. Raises
        LlmcError."""
        if self.speculate_tokens == 0:
            return []
        tokens, count = (c_int32 * self.speculate_tokens)(), c_uint64()
        call(
            "llmc_engine_get_guesses",
            *(self.pointer, request_id, output_index, tokens, self.speculate_tokens, byref(count)),
        )
        return tokens[: count.value]

    def wait(self, timeout_s: float | None = None) -> Ready:
        """Blocks, with the GIL released, until there are events or work, or for timeout_s (None: no limit)."""
        if self.ranks is not None:
            self.ranks.check()
        ready = c_uint32()
        timeout_ns = _FOREVER if timeout_s is None else max(0, int(timeout_s * 1e9))
        call("llmc_engine_wait", self.pointer, timeout_ns, byref(ready))
        return Ready(events=bool(ready.value & 1), work=bool(ready.value & 2))

    def check_device(self, timeout_s: float) -> None:
        """Asks the device for a sign of life while nothing runs; takes microseconds. Raises LlmcError if it is lost, or
        does not answer within timeout_s."""
        call("llmc_engine_check_device", self.pointer, max(0, int(timeout_s * 1e9)))

    def warm_graph(self, graph: int) -> int:
        """Replays graph `graph` with dummy tokens, without side effects; returns its wall time in nanoseconds."""
        ns = c_uint64()
        call("llmc_engine_warm_graph", self.pointer, graph, byref(ns))
        return ns.value

    def warm_load(self, graph: int, num_seqs: int, tokens_each: int, context: int) -> int:
        """As `warm_graph`, with num_seqs sequences of tokens_each new tokens, and `context` tokens each afterwards.

        0 means the graph's capacity. Raises LlmcError for a load beyond it.
        """
        load, ns = sized(abi.WarmLoad), c_uint64()
        load.num_seqs, load.tokens_each, load.context = num_seqs, tokens_each, context
        call("llmc_engine_warm_load", self.pointer, graph, byref(load), byref(ns))
        return ns.value

    def walk_graph(self, graph: int) -> int:
        """Calls every kernel of graph `graph` with zero rows, so that nothing is computed; returns its wall time in
        nanoseconds."""
        ns = c_uint64()
        call("llmc_engine_walk_graph", self.pointer, graph, byref(ns))
        return ns.value

    def warm_draft(self) -> int:
        """Warms all graphs of the draft; returns their total wall time in nanoseconds. Raises LlmcError without a
        draft."""
        ns = c_uint64()
        call("llmc_engine_warm_draft", self.pointer, byref(ns))
        return ns.value

    def enable_graph(self, graph: int, on: bool) -> None:
        """Allows or forbids requests to use graph `graph`; larger graphs replace one that is off. Changes no result.
        Waits for a step in flight."""
        call("llmc_engine_enable_graph", self.pointer, graph, int(on))

    def release_graph(self, graph: int) -> None:
        """Frees the memory used only by graph `graph`, which must be off. When on again, its first step allocates it
        anew."""
        call("llmc_engine_release_graph", self.pointer, graph)

    def add_graphs(self, artifact: Artifact) -> range:
        """Takes over the graphs of `artifact` that follow the engine's own, and returns their indices; they are off.

        `artifact` must be the engine's with buckets added. Changes no result; waits for a step in flight. Raises
        LlmcError, and then changes nothing.
        """
        before, count = self._num_graphs, artifact.info.num_graphs
        self._num_graphs = max(before, count)  # first: otherwise statistics of new graphs would overflow the buffer
        call("llmc_engine_add_graphs", self.pointer, artifact.pointer)
        return range(before, count)

    def step(self) -> bool:
        """Runs one iteration; False if there was nothing to do."""
        progressed = c_uint32()
        call("llmc_engine_step", self.pointer, byref(progressed))
        return progressed.value != 0

    def poll(self, most: int | None = None) -> list[Event]:
        """Takes all pending events, oldest first, or at most `most`."""
        events: list[Event] = []
        while True:
            wanted = self._POLL_CAPACITY if most is None else min(most - len(events), self._POLL_CAPACITY)
            count = c_uint64()
            self._events[0].struct_size = ctypes.sizeof(abi.Event)
            call("llmc_engine_poll", self.pointer, self._events, wanted, byref(count))
            taken = [event_of(self._events[i]) for i in range(count.value)]
            self._release_vectors(taken)
            events += taken
            if count.value < wanted or len(events) == most:
                return events

    def _release_vectors(self, events: Sequence[Event]) -> None:
        """Drops references to the arrays of finished requests."""
        ended = [event.request_id for event in events if event.kind in ("finished", "failed")]
        if ended and self._gives_vectors:
            with self._vectors_lock:
                for request_id in ended:
                    self._vectors.pop(request_id, None)

    @property
    def stats(self) -> EngineStats:
        stats = sized(abi.EngineStats)
        call("llmc_engine_get_stats", self.pointer, byref(stats))
        return EngineStats(**plain(stats), device=self.device_stats())

    def device_stats(self) -> dict[str, int]:
        """The device's own counters, by its names."""
        return device_stats("llmc_engine_get_device_stats", self.pointer)

    def graph_stats(self) -> list[GraphStats]:
        """Replays of each graph, by index."""
        native = (abi.GraphStats * self._num_graphs)()
        native[0].struct_size = ctypes.sizeof(abi.GraphStats)
        count = c_uint64()
        call("llmc_engine_get_graph_stats", self.pointer, native, self._num_graphs, byref(count))
        return [GraphStats(**plain(one)) for one in native[: count.value]]

    def bucket_misses(self) -> list[BucketMiss]:
        """The shapes that missed, in order of first occurrence; at most 1024."""
        native = (abi.BucketMiss * abi.MAX_BUCKET_MISSES)()
        native[0].struct_size = ctypes.sizeof(abi.BucketMiss)
        count = c_uint64()
        call("llmc_engine_get_bucket_misses", self.pointer, native, abi.MAX_BUCKET_MISSES, byref(count))
        return [
            BucketMiss(
                PHASES[m.phase],
                m.num_seqs,
                m.num_tokens,
                m.num_blocks,
                m.count,
                m.graph if m.graph >= 0 else None,
                wanted=Bucket(PHASES[m.phase], m.wanted_batch, m.wanted_seq),
            )
            for m in native[: count.value]
        ]

    def take_step_shapes(self) -> tuple[list[StepShape], int]:
        """(loads of steps since the previous call, number of steps that did not fit the table of loads).

        The first call returns nothing and starts counting.
        """
        native = (abi.StepShape * abi.MAX_STEP_SHAPES)()
        native[0].struct_size = ctypes.sizeof(abi.StepShape)
        count, lost = c_uint64(), c_uint64()
        call("llmc_engine_take_step_shapes", self.pointer, native, len(native), byref(count), byref(lost))
        shapes = [StepShape(**plain(one) | {"phase": PHASES[one.phase]}) for one in native[: count.value]]
        return shapes, lost.value

    def take_request_marks(self) -> tuple[list[RequestMark], bool]:
        """(marks of requests in steps since the previous call, whether they are complete).

        The first call starts recording; it stops at 4096 marks that nobody takes.
        """
        native = (abi.RequestMark * abi.MAX_REQUEST_MARKS)()
        native[0].struct_size = ctypes.sizeof(abi.RequestMark)
        count, complete = c_uint64(), c_uint32()
        call("llmc_engine_take_request_marks", self.pointer, native, len(native), byref(count), byref(complete))
        marks = [RequestMark(**plain(one) | {"kind": MARK_KINDS[one.kind]}) for one in native[: count.value]]
        return marks, bool(complete.value)

    def evictions(self) -> dict[int, int]:
        """Preempted sequences by their own priority, evicted for higher priorities; the first 64 priorities."""
        native, count = (abi.EvictionCount * abi.MAX_EVICTED_PRIORITIES)(), c_uint64()
        native[0].struct_size = ctypes.sizeof(abi.EvictionCount)
        call("llmc_engine_get_evictions", self.pointer, native, len(native), byref(count))
        return {one.priority: one.count for one in native[: count.value]}

    def graph_use(self) -> list[tuple[int, int]]:
        """Per graph: (replays, valid tokens carried)."""
        return [(graph.replays, graph.tokens) for graph in self.graph_stats()]

    def check_integrity(self) -> None:
        """Raises LlmcError if reference counts, block tables, free list and prefix index disagree."""
        call("llmc_engine_check_integrity", self.pointer)
