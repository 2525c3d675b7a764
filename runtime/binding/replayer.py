"""Replays graphs one at a time, without a scheduler: for tools, tests and benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from ctypes import byref, c_uint64, c_void_p

import numpy as np
import numpy.typing as npt

from llmc.graphs_format import FAMILIES, ROPE_AXES, STATE_FIELDS
from llmc.runtime.binding import abi
from llmc.runtime.binding.artifact import Artifact
from llmc.runtime.binding.devices import DeviceOption, device_for, device_stats
from llmc.runtime.binding.handle import Handle, IntArray, call, initial, int32, plain, sized


@dataclasses.dataclass(frozen=True)
class ReplayStats:
    """Wall time over all replays; on thread 0, time in kernels (by family) and waiting for other threads."""

    num_threads: int
    num_replays: int
    total_ns: int
    kernel_ns: int
    family_ns: dict[str, int]
    barrier_ns: int


_DIMENSIONS = {"block_tables": 2, "state_slots": 2, "rope_positions": 2}


def _batch(arrays: dict[str, npt.NDArray[np.int32]]) -> abi.Batch:
    """The arrays must outlive the result. Raises ValueError."""
    num_tokens, num_seqs = arrays["input_ids"].size, arrays["context_lens"].size
    lengths = {"positions": num_tokens, "slot_mapping": num_tokens, "query_start": num_seqs + 1}
    for name, length in lengths.items():
        if arrays[name].size != length:
            raise ValueError(f"{name} has {arrays[name].size} elements; this batch needs {length}")
    if arrays["block_tables"].shape[0] != num_seqs:
        raise ValueError(f"block_tables has {arrays['block_tables'].shape[0]} rows for {num_seqs} sequences")
    if "state_slots" in arrays and arrays["state_slots"].shape != (num_seqs, STATE_FIELDS):
        raise ValueError(
            f"state_slots has shape {arrays['state_slots'].shape}; this batch needs {(num_seqs, STATE_FIELDS)}"
        )
    if "rope_positions" in arrays and arrays["rope_positions"].shape != (num_tokens, ROPE_AXES):
        raise ValueError(
            f"rope_positions has shape {arrays['rope_positions'].shape}; this batch needs {(num_tokens, ROPE_AXES)}"
        )
    batch = sized(abi.Batch)
    batch.num_tokens, batch.num_seqs = num_tokens, num_seqs
    batch.num_samples = arrays["sample_index"].size
    batch.block_table_stride = arrays["block_tables"].shape[1]
    for name, array in arrays.items():
        setattr(batch, name, array.ctypes.data_as(abi.I32P))
    return batch


class Replayer(Handle):
    """Replays one graph at a time over its own KV pool; for tools, tests and benchmarks."""

    _destroy = "llmc_replayer_destroy"

    def __init__(
        self,
        artifact: Artifact,
        num_threads: int = 0,
        num_blocks: int = 0,
        *,
        num_states: int = 0,
        pin_threads: bool = True,
        weight_memory: str = "auto",
        **options: DeviceOption | None,
    ) -> None:
        """num_blocks, num_states: as in llmc_replayer_options. weight_memory: one of WEIGHT_MEMORY. Others: as in
        DEVICE_OPTIONS."""
        super().__init__()
        self._width = artifact.info.vector_width or artifact.info.vocab_size
        self._max_commands = max(graph.num_commands for graph in artifact.graphs())
        native = initial("llmc_replayer_options_init", abi.ReplayerOptions)
        native.num_blocks, native.num_states = num_blocks, num_states
        self.has_states = artifact.info.state_bytes > 0
        """Whether steps need `state_slots`."""
        given: dict[str, DeviceOption | None] = {
            **options,
            "num_threads": num_threads,
            "pin_threads": pin_threads,
            "weight_memory": weight_memory,
        }
        pointer = c_void_p()
        with device_for(artifact, None, given) as device:
            call("llmc_replayer_create", device.pointer, artifact.pointer, byref(native), byref(pointer))
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
        state_slots: IntArray | None = None,
        rope_positions: IntArray | None = None,
    ) -> npt.NDArray[np.float32]:
        """Runs graph `graph` on packed int32 arrays (FORMAT.md). Returns logits [len(sample_index), vocab_size], or
        vectors [len(sample_index), vector_width]. state_slots: of a model with states, as `own_slots` makes them.
        rope_positions: of a model whose rotary positions have axes; None: the positions."""
        arrays = {
            "input_ids": int32("input_ids", input_ids),
            "positions": int32("positions", positions),
            "slot_mapping": int32("slot_mapping", slot_mapping),
            "block_tables": int32("block_tables", block_tables, ndim=2),
            "context_lens": int32("context_lens", context_lens),
            "query_start": int32("query_start", query_start),
            "sample_index": int32("sample_index", sample_index),
        }
        if state_slots is not None:
            arrays["state_slots"] = int32("state_slots", state_slots, ndim=2)
        if rope_positions is not None:
            arrays["rope_positions"] = int32("rope_positions", rope_positions, ndim=2)
        batch = _batch(arrays)
        logits = np.empty((batch.num_samples, self._width), np.float32)
        call("llmc_replayer_run", self.pointer, graph, byref(batch), logits.ctypes.data_as(abi.F32P), logits.size)
        return logits

    def begin(self, graph: int, **inputs: IntArray | None) -> None:
        """Sets the inputs of a step, as for `run`; run_command then runs its commands one by one."""
        given = {name: values for name, values in inputs.items() if values is not None}
        batch = _batch({name: int32(name, values, ndim=_DIMENSIONS.get(name, 1)) for name, values in given.items()})
        call("llmc_replayer_begin", self.pointer, graph, byref(batch))

    def own_slots(self, slots: Sequence[int] | range) -> npt.NDArray[np.int32] | None:
        """`state_slots` of sequences that have their states in these slots and keep none; None for a model without
        states."""
        return np.array([(slot, 0, 0) for slot in slots], np.int32) if self.has_states else None

    def copy_state(self, source: int, target: int) -> None:
        """Copies the states of a slot to another one."""
        call("llmc_replayer_copy_state", self.pointer, source, target)

    def run_command(self, command: int) -> None:
        """Runs one command of the graph, after all earlier ones."""
        call("llmc_replayer_run_command", self.pointer, command)

    def read_operand(self, command: int, operand: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The first bytes of a command's operand, which must not be a KV cache pool."""
        data = np.empty(nbytes, np.uint8)
        call("llmc_replayer_read_operand", self.pointer, command, operand, data.ctypes.data_as(c_void_p), nbytes)
        return data

    def set_profiling(self, on: bool) -> None:
        """Starts or stops recording command times of each thread, for command_times()."""
        call("llmc_replayer_set_profiling", self.pointer, int(on))

    def command_times(self, thread: int) -> npt.NDArray[np.uint64]:
        """Times in the last replay on one thread: [commands, 3], nanoseconds since the replay began.

        Columns: kernel start, kernel end, and exit from the following barrier, if any.
        """
        times, count = np.empty((3, self._max_commands), np.uint64), c_uint64()
        columns = [column.ctypes.data_as(abi.U64P) for column in times]
        call("llmc_replayer_get_command_times", self.pointer, thread, *columns, self._max_commands, byref(count))
        return times[:, : count.value].T

    @property
    def stats(self) -> ReplayStats:
        stats = sized(abi.ReplayStats)
        call("llmc_replayer_get_stats", self.pointer, byref(stats))
        fields = plain(stats)
        return ReplayStats(**(fields | {"family_ns": dict(zip(FAMILIES, fields["family_ns"], strict=True))}))

    def device_stats(self) -> dict[str, int]:
        """The device's own counters, by its names."""
        return device_stats("llmc_replayer_get_device_stats", self.pointer)
