"""Replays a graph one command at a time on the host, and keeps what each command writes.

For looking, not for speed: one thread, numpy's memory. The native library opens the artifact first: it checks tables,
checksums and instruction sets, and asks the operating system for what kernels need.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.graphs_format import ALIGNMENT, INPUTS, OPERAND_KINDS, PHASES
from llmc.graphs_records import Command, Graph, OperandRecord
from llmc.manifest import read_manifest
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.debug.values import Floats, ValueLayout, written_values
from llmc.runtime.graphs_file import read_graphs

_NUM_SCALARS = 8
_DECODE = PHASES.index("decode")


class DebugError(ValueError):
    """What was asked for cannot be replayed; the message is one sentence."""


@dataclass(frozen=True)
class Value:
    """A tensor that a command wrote. command: its place in the graph; op: of its kernel; name: the weight that it read
    first, else the op's own; layer: whose cache it touches, −1 for none; array: float32 [rows, …]."""

    command: int
    op: str
    kernel: str
    name: str
    layer: int
    array: Floats


class _Memory:
    """Bytes that begin a cache line."""

    def __init__(self, size: int) -> None:
        raw = np.zeros(size + ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT
        self.bytes = raw[skip : skip + size]

    def address(self, offset: int = 0) -> int:
        return int(self.bytes.ctypes.data) + offset


class CommandReplay:
    """One sequence on an artifact, step by step."""

    def __init__(self, path: Path, length: int) -> None:
        """length: tokens that the sequence will have at most. Raises LlmcError, FormatError, ManifestError and
        DebugError."""
        self.path = Path(path)
        # Their checks, and what code of a level needs of the system: the kernels are called from here after that.
        with Artifact(self.path) as artifact:
            Replayer(artifact, num_threads=1, num_blocks=1, weight_memory="mapped").close()
        self._tables, manifest = read_graphs(self.path), read_manifest(self.path)
        model = self._tables.model
        if length > model.max_model_len:
            raise DebugError(f"{length} tokens are more than the {model.max_model_len} that {path} holds; give fewer")
        self._kernels = [(str(k["op"]), str(k["components"]["params"])) for k in manifest["kernels"]]
        if len(self._kernels) != len(self._tables.kernels):
            raise DebugError(f"manifest.json of {path} lists other kernels than graphs.bin; compile the model again")
        self._libraries = [ctypes.CDLL(str(self.path / code.name)) for code in self._tables.code]
        self._weights = np.memmap(self.path / "weights.safetensors", np.uint8, "r")
        self._num_blocks = 1 + -(-length // model.block_size)
        self._pools = {
            kind: [_Memory(self._num_blocks * block_bytes) for _ in range(model.num_layers)]
            for kind, block_bytes in (("k_pool", model.key_block_bytes), ("v_pool", model.value_block_bytes))
        }
        self._done = 0

    @property
    def vocab_size(self) -> int:
        return self._tables.model.vocab_size

    def step(self, tokens: Sequence[int]) -> tuple[str, Iterator[Value]]:
        """Runs the next tokens of the sequence in the smallest graph that holds them: the graph's name, and what each
        command writes, as it is run. Raises DebugError."""
        graph = self._graph(len(tokens))
        values = self._run(graph, np.asarray(tokens, np.int32), self._done)
        self._done += len(tokens)
        return graph.name, values

    def _graph(self, count: int) -> Graph:
        model, last = self._tables.model, self._done + count
        fitting = [
            graph
            for graph in self._tables.graphs
            if graph.max_tokens >= count
            and graph.max_blocks_per_seq * model.block_size >= last
            and (graph.phase == _DECODE) == (count == 1 and self._done > 0)
        ]
        if not fitting:
            most = max((g.max_tokens for g in self._tables.graphs if g.phase != _DECODE), default=0)
            raise DebugError(f"{self.path} has no graph for {count} new tokens at once, at most {most}; give fewer")
        return min(fitting, key=lambda graph: (graph.max_tokens, graph.max_blocks_per_seq))

    def _run(self, graph: Graph, tokens: NDArray[np.int32], start: int) -> Iterator[Value]:
        model, count = self._tables.model, len(tokens)
        positions = np.arange(start, start + count, dtype=np.int32)
        blocks = np.arange(1, self._num_blocks, dtype=np.int32)  # block 0 is the dummy one
        stride = min(len(blocks), graph.max_blocks_per_seq)
        slots = blocks[positions // model.block_size] * model.block_size + positions % model.block_size
        given = {
            "input_ids": tokens,
            "positions": positions,
            "slot_mapping": slots,
            "block_tables": blocks[:stride],
            "context_lens": [start + count],
            "query_start": [0, count],
            "sample_index": [count - 1],
            "token_seq": np.zeros(count, np.int32),
        }
        inputs = []
        for index, name in enumerate(INPUTS):
            shape = graph.input_shape(index)
            memory = _Memory(4 * int(np.prod(shape)))
            content = np.asarray(given[name], np.int32)
            memory.bytes.view(np.int32)[: len(content)] = content
            inputs.append(memory)
        arena, output = _Memory(graph.arena_bytes), _Memory(4 * graph.max_samples * model.output_width)
        scalars = (ctypes.c_int64 * _NUM_SCALARS)(count, 1, 1, stride, self._num_blocks, 1)

        def place(operand: OperandRecord, layer: int) -> NDArray[np.uint8]:
            """The bytes of an operand; of a pool, all of them."""
            kind = OPERAND_KINDS[operand.kind]
            if kind in self._pools:
                return self._pools[kind][layer].bytes
            if kind == "weight":
                at = self._tables.weights[operand.index].file_offset + operand.offset
                return self._weights[at : at + operand.bytes]
            memory = {"arena": arena, "output": output}.get(kind) or inputs[operand.index]
            return memory.bytes[operand.offset : operand.offset + operand.bytes]

        for index, command in enumerate(self._tables.commands_of(graph)):
            operands = [place(operand, operand.index) for operand in self._tables.operands_of(command)]
            kernel = self._tables.kernels[command.kernel]
            function = getattr(self._libraries[kernel.code], kernel.symbol)
            function.restype = None
            function(*(ctypes.c_void_p(data.ctypes.data) for data in operands), scalars, 0, 1)
            op, parameters = self._kernels[command.kernel]
            for value in written_values(op, parameters):
                yield self._value(index, command, op, value, operands, count)

    def _value(
        self, index: int, command: Command, op: str, value: ValueLayout, operands: list[NDArray[np.uint8]], count: int
    ) -> Value:
        kernel = self._tables.kernels[command.kernel].symbol
        weights = [o.index for o in self._tables.operands_of(command) if OPERAND_KINDS[o.kind] == "weight"]
        name = self._tables.weights[weights[0]].name.removesuffix(".weight") if weights else kernel.rpartition("_")[0]
        if command.layer >= 0:
            name = f"layers.{command.layer}.{op}"
        array = value.read(operands[value.operand], 1 if value.on_samples else count)
        return Value(index, op, kernel, name, command.layer, array)
