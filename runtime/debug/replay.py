"""Replays a graph one command at a time on the artifact's device, and captures each command's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmc.graphs_format import OPERAND_KINDS, PHASES
from llmc.graphs_records import Command, Graph
from llmc.manifest import read_manifest
from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.debug.values import Floats, ValueLayout, inner_norm, inner_op, written_values
from llmc.runtime.graph_view import commands_of
from llmc.runtime.graphs_file import read_graphs

_DECODE = PHASES.index("decode")


class DebugError(ValueError):
    """The request cannot be replayed; the message is one sentence."""


@dataclass(frozen=True)
class Value:
    """A tensor that a command wrote.

    command: its index. op: of its kernel. name: of the first weight it read, else the op. layer: of the model; −1 for
    none. cached: whether the command accesses the KV cache. array: float32 [rows, …].
    """

    command: int
    op: str
    kernel: str
    name: str
    layer: int
    cached: bool
    array: Floats


class CommandReplay:
    """One sequence on an artifact, step by step."""

    def __init__(self, path: Path, length: int) -> None:
        """length: most tokens of the sequence. Raises LlmcError, FormatError, ManifestError or DebugError."""
        self.path = Path(path)
        self._artifact = Artifact(self.path)
        self._tables, manifest = read_graphs(self.path), read_manifest(self.path)
        model = self._tables.model
        if length > model.max_model_len:
            raise DebugError(f"{length} tokens are more than the {model.max_model_len} that {path} holds; give fewer")
        self._kernels = [(str(k["op"]), str(k["components"]["params"])) for k in manifest["kernels"]]
        if len(self._kernels) != len(self._tables.kernels):
            raise DebugError(f"manifest.json of {path} lists other kernels than graphs.bin; compile the model again")
        self._num_blocks = -(-length // model.block_size)
        self._replayer = Replayer(self._artifact, num_threads=1, num_blocks=self._num_blocks, weight_memory="mapped")
        self._done = 0

    @property
    def vocab_size(self) -> int:
        return self._tables.model.vocab_size

    def step(self, tokens: Sequence[int]) -> tuple[str, Iterator[Value]]:
        """Runs the sequence's next tokens in the smallest graph that holds them. Returns the graph's name, and an
        iterator over each command's outputs as it runs. Raises DebugError."""
        graph = self._graph(len(tokens))
        values = self._run(graph, np.asarray(tokens, np.int32), self._done)
        self._done += len(tokens)
        return graph.name, values

    def unwritten(self, graph: str) -> set[str]:
        """Names of tensors that kernels of a graph compute on their way, and do not write, as other kernels would."""
        (found,) = (one for one in self._tables.graphs if one.name == graph)
        views, names = commands_of(self._tables, found), set[str]()
        for command, view in zip(self._tables.commands_of(found), views, strict=True):
            op, _ = self._kernels[command.kernel]
            if (norm := inner_norm(op)) is not None:
                names.add(self._module(self._tables.operands_of(command)[norm].index))
            if (inner := inner_op(op)) is not None:
                names.add(_in_layer(view.layer, inner))
        return names

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
        block_size, count = self._tables.model.block_size, len(tokens)
        positions = np.arange(start, start + count, dtype=np.int32)
        blocks = np.arange(1, self._num_blocks + 1, dtype=np.int32)  # block 0 is the dummy block
        stride = min(len(blocks), graph.max_blocks_per_seq)
        self._replayer.begin(
            self._tables.graphs.index(graph),
            input_ids=tokens,
            positions=positions,
            slot_mapping=blocks[positions // block_size] * block_size + positions % block_size,
            block_tables=blocks[None, :stride],
            context_lens=[start + count],
            query_start=[0, count],
            sample_index=[count - 1],
            state_slots=self._replayer.own_slots([1]),
        )
        layers = [view.layer for view in commands_of(self._tables, graph)]
        for index, command in enumerate(self._tables.commands_of(graph)):
            self._replayer.run_command(index)
            op, parameters = self._kernels[command.kernel]
            for value in written_values(op, parameters, graph):
                yield self._value(index, command, layers[index], op, value, count)

    def _value(self, index: int, command: Command, layer: int, op: str, value: ValueLayout, count: int) -> Value:
        kernel = self._tables.name_of(command)
        operands = list(self._tables.operands_of(command))
        weights = [o.index for o in operands if OPERAND_KINDS[o.kind] == "weight"]
        name = self._module(weights[0]) if weights else kernel.rpartition("_")[0]
        cached = command.layer >= 0
        if cached:
            name = _in_layer(layer, op)
        place = value.operand % len(operands)
        data = self._replayer.read_operand(index, place, operands[place].bytes)
        array = value.read(data, 1 if value.on_samples else count)
        return Value(index, op, kernel, name, layer, cached, array)

    def _module(self, weight: int) -> str:
        return self._tables.weights[weight].name.removesuffix(".weight")


def _in_layer(layer: int, op: str) -> str:
    """The name of a tensor that a command with the KV cache writes."""
    return f"layers.{layer}.{op}"
