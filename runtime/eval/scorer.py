"""Log-likelihoods of continuations: one sequence in the KV pool, of which the next one reuses the common prefix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llmc.runtime.binding import Artifact, GraphInfo, Replayer
from llmc.runtime.eval.softmax import log_softmax
from llmc.runtime.request_error import RequestError

_SLOT, _KEPT_SLOT = 1, 2


class Scorer:
    """Scores with an artifact; a context manager, or close it.

    The engine's prompt logprobs would agree up to rounding, but would also score every context token.
    """

    def __init__(self, path: Path, num_threads: int = 0) -> None:
        """Raises LlmcError, and RequestError for a model that does not generate text."""
        self.path = path
        self._artifact = Artifact(path)
        try:
            info = self._artifact.info
            if info.vector_width:
                raise RequestError(f"{path} gives vectors and writes no text: give a model that does")
            self.max_model_len, self._block_size = info.max_model_len, info.block_size
            graphs = enumerate(self._artifact.graphs())
            self._graphs = [(index, graph) for index, graph in graphs if graph.phase != "decode"]
            self._num_blocks = -(-info.max_model_len // info.block_size)
            num_states = 2 if info.state_bytes else 0
            self._replayer = Replayer(self._artifact, num_threads, self._num_blocks, num_states=num_states)
        except BaseException:
            self._artifact.close()
            raise
        self._cached: list[int] = []
        self._kept = 0  # leading ones of these, behind which the other slot has the state

    def score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """(log-likelihood of `continuation` after `context`, whether each of its tokens is the likeliest).

        Raises RequestError for an empty context, or more tokens than the artifact holds.
        """
        tokens = [*context, *continuation[:-1]]
        if not context:
            raise RequestError("a continuation needs a context of at least one token")
        if len(tokens) > self.max_model_len:
            raise RequestError(f"{len(tokens)} tokens are more than the {self.max_model_len} that {self.path} holds")
        if not continuation:
            return 0.0, True
        scored = len(context) - 1
        done = self._resumed(_common(self._cached, tokens, scored))
        self._cached = []  # until the whole sequence is cached
        while done < scored:
            done += self._chunk(tokens[:scored], done, False)[0]
        if self._replayer.has_states:
            self._replayer.copy_state(_SLOT, _KEPT_SLOT)
        self._kept = scored
        rows: list[npt.NDArray[np.float32]] = []
        while done < len(tokens):
            count, logits = self._chunk(tokens, done, True)
            rows.append(logits)
            done += count
        self._cached = tokens
        scores, wanted = log_softmax(np.concatenate(rows)), np.asarray(continuation)
        likely = bool((scores.argmax(axis=1) == wanted).all())
        return float(scores[np.arange(len(wanted)), wanted].sum()), likely

    def _resumed(self, common: int) -> int:
        """How many of the `common` tokens need not be computed again: with states only those of the kept one."""
        if not self._replayer.has_states:
            return common
        if not 0 < self._kept <= common:
            return 0
        self._replayer.copy_state(_KEPT_SLOT, _SLOT)
        return self._kept

    def _chunk(self, tokens: Sequence[int], start: int, sampled: bool) -> tuple[int, npt.NDArray[np.float32]]:
        """Runs the next tokens. Returns (their number, logits of each, or of none)."""

        def room(graph: GraphInfo) -> int:
            most = min(graph.max_tokens, graph.max_samples) if sampled else graph.max_tokens
            return min(most, graph.max_blocks_per_seq * self._block_size - start, len(tokens) - start)

        index, graph = min(self._graphs, key=lambda one: (-room(one[1]), one[1].max_tokens, one[1].max_blocks_per_seq))
        count = room(graph)
        if count < 1:
            raise RequestError(f"{self.path} has no graph for a prompt of {start + 1} tokens; compile larger buckets")
        positions = np.arange(start, start + count, dtype=np.int32)
        blocks = np.arange(1, self._num_blocks + 1, dtype=np.int32)  # block 0 is the dummy block
        logits = self._replayer.run(
            index,
            input_ids=np.asarray(tokens[start : start + count], np.int32),
            positions=positions,
            slot_mapping=blocks[positions // self._block_size] * self._block_size + positions % self._block_size,
            block_tables=blocks[None, : -(-(start + count) // self._block_size)],
            context_lens=np.asarray([start + count], np.int32),
            query_start=np.asarray([0, count], np.int32),
            sample_index=np.arange(count if sampled else 0, dtype=np.int32),
            state_slots=self._replayer.own_slots([_SLOT]),
        )
        return count, logits

    def close(self) -> None:
        """Releases replayer and artifact."""
        self._replayer.close()
        self._artifact.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _common(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Length of the common prefix of two sequences, at most `most`."""
    count = 0
    for left, right in zip(a, b, strict=False):
        if count == most or left != right:
            break
        count += 1
    return count
