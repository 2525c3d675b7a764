"""An engine whose device computes nothing: the real scheduler over a trace, in virtual time. Needs no artifact."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.graphs_format import PHASES
from llmc.runtime.binding import abi
from llmc.runtime.binding.engine import Engine
from llmc.runtime.binding.handle import call, plain, sized

Times = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Nanoseconds of a replay as a function of its token rows, plus ns_per_pair for each pair of a new token and a
    token it attends to. Constant before the first point, linear between points, and extrapolated beyond the last."""

    tokens: tuple[int, ...]
    ns: tuple[float, ...]
    ns_per_pair: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedGraph:
    """A graph that need not be compiled. exact: cost of a graph made for exactly the load. max_blocks: KV blocks of all
    sequences together; 0: no such limit."""

    phase: str
    batch: int
    seq: int
    max_tokens: int
    max_seqs: int
    max_samples: int
    max_blocks_per_seq: int
    cost: Curve
    exact: Curve
    max_blocks: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """Replays of graph number `graph` with num_seqs sequences, the longest with `length` tokens.

    length: new tokens in prefill and mixed steps; context in decode steps, rounded up to blocks. In a graph with
    max_blocks it is the total of all contexts. Decode steps of a load have equally many rows, guesses included. tokens,
    contexts, ns, exact_ns, longest and blocks (KV blocks of all sequences) are sums over the replays;
    longest adds each replay's longest sequence, unrounded.
    """

    graph: int
    num_seqs: int
    length: int
    replays: int
    tokens: int
    contexts: int
    ns: float
    exact_ns: float
    longest: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages that have equal parts of each step, and work at the same time on different steps.

    steps_in_flight: 0 means as many as stages. bus_share: what a stage takes of one memory bus of all stages while it
    reads; 0: each has a bus of its own. read_s: seconds of each step in which it reads weights.
    """

    stages: int = 1
    steps_in_flight: int = 0
    bus_share: float = 0.0
    read_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedTrace:
    """Requests in order of arrival, columns [N].

    The prefix ids of request i are prefix_ids[prefix_start[i] : prefix_start[i + 1]]: one for each prefix_block tokens
    at the front of its prompt; equal ids are equal tokens.
    """

    arrival_ns: npt.NDArray[np.uint64]
    prompt_tokens: npt.NDArray[np.uint32]
    output_tokens: npt.NDArray[np.uint32]
    prefix_start: npt.NDArray[np.uint64] | None = None
    prefix_ids: npt.NDArray[np.int64] | None = None
    prefix_block: int = 1


class SimulatedEngine(Engine):
    """A regular engine, except that replays take only virtual time."""

    def __init__(
        self,
        graphs: Sequence[SimulatedGraph],
        *,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        kv_block_bytes: int = 1,
        state_bytes: int = 0,
        step_ns: float = 0.0,
        token_ns: float = 0.0,
        guess_odds: float = 0.0,
        draft_ns: float = 0.0,
        pipeline: Pipeline = Pipeline(),
        **options: Any,
    ) -> None:
        """Options: those of the scheduler and the KV pool in llmc_engine_options. step_ns, token_ns: time of a step
        outside its replay, and of each token it samples. guess_odds: that a guess is right if those before it are; 0:
        guesses are looked up in the made-up text. draft_ns: time in which a draft guesses a token of each sequence.
        state_bytes: of a sequence's states, of a model that has them. Raises LlmcError."""
        super(Engine, self).__init__()
        self._num_graphs = len(graphs)
        native_options = self._native_options(options)
        keep: list[Any] = []
        native = (abi.SimGraph * len(graphs))()
        for target, graph in zip(native, graphs, strict=True):
            target.struct_size = ctypes.sizeof(abi.SimGraph)
            target.phase = PHASES.index(graph.phase)
            for name in ("batch", "seq", "max_tokens", "max_seqs", "max_samples", "max_blocks_per_seq", "max_blocks"):
                setattr(target, name, getattr(graph, name))
            target.cost, target.exact = (_cost(curve, keep) for curve in (graph.cost, graph.exact))
        model = sized(abi.SimModel)
        model.num_graphs, model.graphs = len(graphs), native
        model.block_size, model.max_model_len, model.max_num_seqs = block_size, max_model_len, max_num_seqs
        model.state_bytes = state_bytes
        model.kv_block_bytes, model.step_ns, model.token_ns = kv_block_bytes, step_ns, token_ns
        model.guess_odds, model.draft_ns = guess_odds, draft_ns
        model.stages, model.steps_in_flight = pipeline.stages, pipeline.steps_in_flight
        model.bus_share, model.read_ns = pipeline.bus_share, pipeline.read_s * 1e9
        pointer = c_void_p()
        call("llmc_engine_create_simulated", byref(model), byref(native_options), byref(pointer))
        self._pointer = pointer
        self._events = (abi.Event * self._POLL_CAPACITY)()

    def simulate(self, trace: SimulatedTrace, progress: Callable[[int], None] | None = None) -> tuple[Times, Times]:
        """Runs the trace. Returns the times of each request's first and last token, in nanoseconds [N] each; 0: never.

        progress is called now and then with the number of finished requests; an exception it raises ends the run and is
        raised here. Raises LlmcError for an invalid trace, and for a second run.
        """
        raised: list[BaseException] = []

        def on_progress(_context: int | None, ended: int) -> int:
            try:
                if progress is not None:
                    progress(ended)
            except BaseException as error:  # an interrupt, too, must cross the native frames as a value
                raised.append(error)
            return len(raised)

        def column(values: npt.ArrayLike | None, dtype: type, pointer: Any) -> Any:
            if values is None:
                return None
            array: npt.NDArray[Any] = np.ascontiguousarray(values, dtype)
            keep.append(array)
            return array.ctypes.data_as(pointer)

        keep: list[Any] = []
        native = sized(abi.SimTrace)
        native.num_requests, native.prefix_block = len(trace.arrival_ns), trace.prefix_block
        native.arrival_ns = column(trace.arrival_ns, np.uint64, abi.U64P)
        native.prompt_tokens = column(trace.prompt_tokens, np.uint32, abi.U32P)
        native.output_tokens = column(trace.output_tokens, np.uint32, abi.U32P)
        native.prefix_start = column(trace.prefix_start, np.uint64, abi.U64P)
        native.prefix_ids = column(trace.prefix_ids, np.int64, abi.I64P)
        native.progress = abi.Progress(on_progress)
        first, last = (np.zeros(len(trace.arrival_ns), np.uint64) for _ in range(2))
        pointers = (array.ctypes.data_as(abi.U64P) for array in (first, last))
        call("llmc_engine_simulate", self.pointer, byref(native), *pointers)
        if raised:
            raise raised[0]
        return first, last

    def loads(self) -> list[SimulatedLoad]:
        """Load of the replays, by graph, sequences and length."""
        count = c_uint64()
        call("llmc_engine_get_simulated_loads", self.pointer, None, 0, byref(count))
        native = (abi.SimLoad * max(count.value, 1))()
        native[0].struct_size = ctypes.sizeof(abi.SimLoad)
        call("llmc_engine_get_simulated_loads", self.pointer, native, count.value, byref(count))
        return [SimulatedLoad(**plain(one)) for one in native[: count.value]]


def _cost(curve: Curve, keep: list[Any]) -> Any:
    """A pointer to the curve; `keep` holds what must outlive the call."""
    native = sized(abi.SimCost)
    native.num_points, native.ns_per_pair = len(curve.tokens), curve.ns_per_pair
    tokens, ns = np.array(curve.tokens, np.uint32), np.array(curve.ns, np.float64)
    native.tokens, native.ns = tokens.ctypes.data_as(abi.U32P), ns.ctypes.data_as(abi.F64P)
    keep += [native, tokens, ns]
    return ctypes.pointer(native)
