"""Replays graphs one command at a time on the host, with guard bytes around all memory, and looks at every byte: a
command writes its outputs and nothing else."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.graphs_format import (
    ADAPTER_TILES,
    GRAPH_INPUTS,
    INPUTS,
    OPERAND_KINDS,
    ROPE_AXES,
    ROPE_POSITIONS,
    STATE_FIELDS,
    STATE_SLOTS,
)
from llmc.graphs_records import Command, OperandRecord
from llmc.manifest import read_manifest
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.graphs_file import read_graphs

from support.kernel_harness import Guarded

IntArray = NDArray[np.int32]
_POOLS = ("k_pool", "v_pool")
_NUM_STATES = 9


class StrayWriteError(AssertionError):
    """A command that wrote where it must not."""


class GuardedReplay:
    """As a Replayer, of an artifact whose code the host runs. fill: of the bytes that no command has written."""

    def __init__(self, path: Path, num_blocks: int, fill: int) -> None:
        # Its checks, and what code of a level needs of the system.
        with Artifact(path) as artifact:
            Replayer(artifact, num_threads=1, num_blocks=1, weight_memory="mapped").close()
        self._tables = read_graphs(path)
        self._ops = [
            (str(k["op"]), dict(json.loads(k["components"]["params"]))) for k in read_manifest(path)["kernels"]
        ]
        self._code = [ctypes.CDLL(str(path / code.name)) for code in self._tables.code]
        self._fill, self._num_blocks = fill, 1 + num_blocks
        self._weights = Guarded(np.fromfile(path / "weights.safetensors", np.uint8))
        layers = {layer: self._tables.kv_layer(layer) for layer in range(self._tables.model.num_layers)}
        self._block_bytes = {("k_pool", layer): of.key_block_bytes for layer, of in layers.items()}
        self._block_bytes |= {("v_pool", layer): of.value_block_bytes for layer, of in layers.items()}
        counts = dict.fromkeys(layers, self._num_blocks) | dict.fromkeys(self._tables.state_layers, _NUM_STATES)
        self._pools = {key: self._memory(counts[key[1]] * size) for key, size in self._block_bytes.items()}
        self.num_commands = 0

    def own_slots(self, slots: Sequence[int]) -> IntArray | None:
        """As Replayer.own_slots."""
        return np.array([(slot, 0, 0) for slot in slots], np.int32) if self._tables.state_layers else None

    def _memory(self, size: int) -> Guarded:
        return Guarded(np.full(size, self._fill, np.uint8))

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
    ) -> NDArray[np.float32]:
        """As Replayer.run. Raises StrayWriteError."""
        found, vocab = self._tables.graphs[graph], self._tables.model.vocab_size
        lengths = np.diff(query_start)
        given = (input_ids, positions, slot_mapping, block_tables, context_lens, query_start, sample_index)
        by_name = dict(zip(INPUTS, (*given, np.repeat(np.arange(len(lengths)), lengths)), strict=True))
        by_name[ADAPTER_TILES] = np.zeros(1, np.int32)  # no row has an adapter, so that no pool is read
        slots = np.zeros((0, STATE_FIELDS), np.int32) if state_slots is None else state_slots
        by_name[STATE_SLOTS] = slots
        by_name[ROPE_POSITIONS] = np.repeat(positions, ROPE_AXES)
        memory: dict[Any, Guarded] = {**self._pools, "weight": self._weights, "arena": self._memory(found.arena_bytes)}
        memory["adapters"] = self._memory(64)
        for index, name in enumerate(GRAPH_INPUTS):
            memory["input", index] = buffer = self._memory(4 * int(np.prod(found.input_shape(index))))
            content = np.asarray(by_name[name], np.int32).ravel()
            buffer.array.view(np.int32)[: content.size] = content
        memory["output"] = self._memory(4 * found.max_samples * vocab)
        scalars = (ctypes.c_int64 * 8)(
            len(input_ids), len(context_lens), len(sample_index), block_tables.shape[1], self._num_blocks, 1
        )
        for number, command in enumerate(self._tables.commands_of(found)):
            before = {key: buffer.array.copy() for key, buffer in memory.items()}
            self._call(command, memory, scalars, 1 + number % 3)
            self._check(command, memory, before, slot_mapping, slots)
            self.num_commands += 1
        return memory["output"].array.view(np.float32)[: len(sample_index) * vocab].reshape(-1, vocab).copy()

    def _place(self, operand: OperandRecord) -> tuple[Any, int]:
        """The memory of an operand, and where it begins there."""
        kind = OPERAND_KINDS[operand.kind]
        match kind:
            case "k_pool" | "v_pool":
                return (kind, operand.index), 0
            case "weight":
                return kind, self._tables.weights[operand.index].file_offset + operand.offset
            case "input":
                return (kind, operand.index), operand.offset
        return kind, operand.offset

    def _call(self, command: Command, memory: dict[Any, Guarded], scalars: Any, num_tasks: int) -> None:
        kernel = self._tables.kernels[command.kernel]
        function = self._code[kernel.code][kernel.symbol]
        function.restype = None
        places = [self._place(operand) for operand in self._tables.operands_of(command)]
        addresses = [ctypes.c_void_p(memory[key].address + offset) for key, offset in places]
        for task in reversed(range(num_tasks)):
            function(*addresses, scalars, ctypes.c_int32(task), ctypes.c_int32(num_tasks))

    def _outputs(self, command: Command) -> Iterator[OperandRecord]:
        """The operands that a command writes, pools not among them: the last one, and what goes before it where a
        kernel has several."""
        op, params = self._ops[command.kernel]
        operands = [o for o in self._tables.operands_of(command) if OPERAND_KINDS[o.kind] not in _POOLS]
        count = len(json.loads(params["program"])["outputs"]) if op == "fused" else 1
        if op == "paged_attention" and params.get("segments"):
            count = 2  # what a segment found, and the result of rows that need no merging
        yield from operands[-count:]

    def _check(
        self,
        command: Command,
        memory: dict[Any, Guarded],
        before: dict[Any, Any],
        slot_mapping: IntArray,
        state_slots: IntArray,
    ) -> None:
        op, _ = self._ops[command.kernel]
        name = self._tables.kernels[command.kernel].symbol
        for key, buffer in memory.items():
            try:
                buffer.check(f"{name}: {key}")
            except AssertionError as error:
                raise StrayWriteError(str(error)) from None
        may = {key: np.zeros(len(content), bool) for key, content in before.items()}
        for operand in self._outputs(command):
            key, offset = self._place(operand)
            may[key][offset : offset + operand.bytes] = True
        block_size = self._tables.model.block_size
        states = {(kind, layer) for kind in _POOLS for layer in self._tables.state_layers}
        for key in states & {(OPERAND_KINDS[o.kind], o.index) for o in self._tables.operands_of(command)}:
            size = self._block_bytes[key]
            for slot in state_slots[:, 0]:
                may[key][slot * size : (slot + 1) * size] = True
        if op == "rope_kv_write":
            for key in ((kind, command.layer) for kind in _POOLS):
                size = self._block_bytes[key]
                for block in set(slot_mapping // block_size):
                    may[key][block * size : (block + 1) * size] = True
        for key, content in before.items():
            written = np.flatnonzero(memory[key].array != content)
            stray = written[~may[key][written]]
            if stray.size:
                raise StrayWriteError(f"{name} wrote {stray.size} bytes of {key} beside its outputs, first {stray[0]}")
            if key in self._block_bytes and key not in states:
                # Where in a block a token lies is the target's business, and how much it takes is not.
                most = len(slot_mapping) * self._block_bytes[key] // block_size
                if written.size > most:
                    raise StrayWriteError(
                        f"{name} wrote {written.size} bytes of {key}, more than the {most} of its rows"
                    )
