"""Runs all ranks of an artifact in one process, command by command: kernels by the host, what ranks do together by
numpy, in the order of the ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.graphs_format import ADDS_BIAS, ADDS_RESIDUAL, COLLECTIVES, GRAPH_INPUTS, INPUTS, OPERAND_KINDS, PHASES
from llmc.graphs_records import CollectiveRecord, Command, OperandRecord
from llmc.runtime.graphs_file import read_graphs

from support.kernel_harness import Guarded

Floats = NDArray[np.float32]


@dataclass
class _Rank:
    """The memory of one rank, by kind of operand and index."""

    number: int
    memory: dict[Any, Guarded] = field(default_factory=dict)


class Lockstep:
    """As a Replayer, of any number of ranks."""

    def __init__(self, path: Path, num_blocks: int) -> None:
        self._tables, self._num_blocks = read_graphs(path), 1 + num_blocks
        model = self._tables.model
        self._code = [ctypes.CDLL(str(path / code.name)) for code in self._tables.code]
        self._weights = Guarded(np.fromfile(path / "weights.safetensors", np.uint8))
        self._ranks = [_Rank(number) for number in range(max(1, model.num_ranks))]
        for rank in self._ranks:
            for layer in range(model.num_layers):
                of = self._tables.kv_layer(layer)
                for kind, size in (("k_pool", of.key_block_bytes), ("v_pool", of.value_block_bytes)):
                    rank.memory[kind, layer] = Guarded(np.zeros(self._num_blocks * size, np.uint8))

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    def graph(self, phase: str) -> int:
        """The first graph of a phase."""
        return next(i for i, graph in enumerate(self._tables.graphs) if PHASES[graph.phase] == phase)

    def own_slots(self, slots: Sequence[int]) -> None:
        """As Replayer.own_slots."""

    def run(
        self,
        graph: int,
        input_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        slot_mapping: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        query_start: NDArray[np.int32],
        sample_index: NDArray[np.int32],
        state_slots: None = None,
    ) -> Floats:
        """As Replayer.run, of a model without states; all ranks must give the same bits."""
        found, vocab = self._tables.graphs[graph], self._tables.model.vocab_size
        lengths = np.diff(query_start)
        given = (input_ids, positions, slot_mapping, block_tables, context_lens, query_start, sample_index)
        by_name = dict(zip(INPUTS, (*given, np.repeat(np.arange(len(lengths)), lengths)), strict=True))
        for rank in self._ranks:
            rank.memory["arena"] = Guarded(np.full(found.arena_bytes, 0xFF, np.uint8))
            rank.memory["output"] = Guarded(np.full(4 * found.max_samples * vocab, 0xFF, np.uint8))
            for index, name in enumerate(GRAPH_INPUTS):
                buffer = Guarded(np.zeros(4 * int(np.prod(found.input_shape(index))), np.uint8))
                content = np.asarray(by_name.get(name, 0), np.int32).ravel()
                buffer.array.view(np.int32)[: content.size] = content
                rank.memory["input", index] = buffer
        rows = len(input_ids), len(sample_index)
        scalars = (ctypes.c_int64 * 8)(rows[0], len(context_lens), rows[1], block_tables.shape[1], self._num_blocks, 1)
        for command in self._tables.commands_of(found):
            if command.collective is None:
                for rank in self._ranks:
                    self._call(command, rank, scalars)
            else:
                record = self._tables.collectives[command.collective]
                self._together(command, record, rows[record.rows])
        outputs = [rank.memory["output"].array.view(np.float32)[: rows[1] * vocab] for rank in self._ranks]
        for output in outputs[1:]:
            np.testing.assert_array_equal(output.view(np.int32), outputs[0].view(np.int32))
        return outputs[0].reshape(-1, vocab).copy()

    def _place(self, operand: OperandRecord, rank: _Rank) -> tuple[Guarded, int]:
        kind = OPERAND_KINDS[operand.kind]
        if kind == "weight":
            weight = self._tables.weights_of(rank.number)[operand.index]
            return self._weights, weight.file_offset + operand.offset
        if kind in ("k_pool", "v_pool", "input"):
            return rank.memory[kind, operand.index], operand.offset
        return rank.memory[kind], operand.offset

    def _call(self, command: Command, rank: _Rank, scalars: Any) -> None:
        kernel = self._tables.kernels[command.kernel]
        function = self._code[kernel.code][kernel.symbol]
        function.restype = None
        places = [self._place(operand, rank) for operand in self._tables.operands_of(command)]
        addresses = [ctypes.c_void_p(memory.address + offset) for memory, offset in places]
        function(*addresses, scalars, ctypes.c_int32(0), ctypes.c_int32(1))

    def _rows(self, operand: OperandRecord, rank: _Rank, rows: int, width: int) -> Floats:
        memory, offset = self._place(operand, rank)
        found: Floats = memory.array[offset : offset + 4 * rows * width].view(np.float32).reshape(rows, width)
        return found

    def _together(self, command: Command, record: CollectiveRecord, rows: int) -> None:
        operands = list(self._tables.operands_of(command))
        part, *added, out = operands
        reduces = COLLECTIVES[record.op] == "all_reduce"
        width = record.width if reduces else record.width // self.num_ranks
        parts = [self._rows(part, rank, rows, width).copy() for rank in self._ranks]
        for rank in self._ranks:
            rest = iter(added)
            if reduces:
                made = parts[0]
                for other in parts[1:]:
                    made = made + other
                if record.adds & ADDS_BIAS:
                    made = made + self._rows(next(rest), rank, 1, width)
                if record.adds & ADDS_RESIDUAL:
                    made = made + self._rows(next(rest), rank, rows, width)
            else:
                made = np.concatenate(parts, axis=1)
            self._rows(out, rank, rows, record.width)[:] = made
