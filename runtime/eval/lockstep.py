"""Logits over the whole vocabulary for several token windows that advance together, one token per step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llmc.runtime.binding import Artifact, Replayer
from llmc.runtime.request_error import RequestError

Floats = npt.NDArray[np.float32]
_POOL_BYTES = 1 << 30


class Lockstep:
    """Replays an artifact's graphs for windows of one length; a context manager, or close it.

    The logits are bit-identical to the engine's: no result depends on the graph. width: windows that fit the KV pool.
    """

    def __init__(self, path: Path, window: int, most: int, num_threads: int = 0) -> None:
        """window: tokens of the longest window. most: windows at once. Raises LlmcError or RequestError."""
        self.path = path
        self._artifact = Artifact(path)
        try:
            info = self._artifact.info
            if window > info.max_model_len:
                raise RequestError(f"a window of {window} tokens is longer than the {info.max_model_len} of {path}")
            self.vocab_size, self._block_size = info.vocab_size, info.block_size
            self._blocks_per_seq = -(-window // info.block_size)
            pool = _POOL_BYTES // (self._blocks_per_seq * info.kv_block_bytes + info.state_bytes)
            self.width = max(1, min(most, pool))
            # If a step holds fewer sequences, windows take turns in it.
            self._graphs = list(enumerate(self._artifact.graphs()))
            num_states = self.width if info.state_bytes else 0
            num_blocks = self.width * self._blocks_per_seq
            self._replayer = Replayer(self._artifact, num_threads, num_blocks, num_states=num_states)
        except BaseException:
            self._artifact.close()
            raise

    def step(self, position: int, tokens: Sequence[int]) -> Floats:
        """Advances the first windows by one token, all at `position`; returns logits [len(tokens), vocabulary].

        Position 0 restarts the windows. Raises LlmcError or RequestError.
        """
        parts, start = [], 0
        while start < len(tokens):
            graph, room = self._graph(position, len(tokens) - start)
            part = np.asarray(tokens[start : start + room], np.int32)
            parts.append(self._replay(graph, position, part, start))
            start += len(part)
        return np.concatenate(parts)

    def _graph(self, position: int, wanted: int) -> tuple[int, int]:
        """(smallest graph for as many of `wanted` sequences at `position` as any graph holds, that number)."""
        reach = position // self._block_size + 1
        rooms = [
            (min(graph.max_tokens, graph.max_seqs, graph.max_samples, wanted), graph, index)
            for index, graph in self._graphs
            if graph.max_blocks_per_seq >= reach
        ]
        if not rooms:
            raise RequestError(f"{self.path} has no graph for position {position}; give a smaller window")
        room, _, index = min(rooms, key=lambda found: (-found[0], found[1].max_tokens, found[1].max_blocks_per_seq))
        return index, room

    def _replay(self, graph: int, position: int, tokens: npt.NDArray[np.int32], first: int) -> Floats:
        count, size = len(tokens), self._block_size
        reach = position // size + 1
        # Block 0 is the dummy block, and slot 0 the dummy slot.
        starts = 1 + (first + np.arange(count)) * self._blocks_per_seq
        tables = (starts[:, None] + np.arange(reach)).astype(np.int32)
        each = np.arange(count, dtype=np.int32)
        return self._replayer.run(
            graph,
            input_ids=tokens,
            positions=np.full(count, position, np.int32),
            slot_mapping=tables[:, -1] * size + position % size,
            block_tables=tables,
            context_lens=np.full(count, position + 1, np.int32),
            query_start=np.arange(count + 1, dtype=np.int32),
            sample_index=each,
            state_slots=self._replayer.own_slots(range(1 + first, 1 + first + count)),
        )

    def close(self) -> None:
        """Releases replayer and artifact."""
        self._replayer.close()
        self._artifact.close()

    def __enter__(self) -> Lockstep:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
