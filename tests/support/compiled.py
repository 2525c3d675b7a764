"""Shared by tests: compile a small model once a session, and drive its graphs by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from llmc.compiler.config import CompileConfig
from llmc.compiler.pipeline import compile_model
from llmc.runtime.binding import Artifact, Replayer

from support.verified import checked

_FOLDERS: WeakKeyDictionary[Artifact, Path] = WeakKeyDictionary()


def compile_tiny(model: Path, output: Path, cache: Path, **options: object) -> Artifact:
    """Compiles `model` for this machine into `output` and opens it. In this process: starting compiling processes takes
    longer than a tiny model's kernels."""
    options.setdefault("jobs", 1)
    config = CompileConfig(model=model, output=output, cache_dir=cache, **options)  # type: ignore[arg-type]
    compile_model(config)
    artifact = Artifact(output)
    _FOLDERS[artifact] = output
    return artifact


def compared(artifact: Artifact, what: str = "logits") -> None:
    """An artifact gave the numbers that it should, if `compile_tiny` made it. what: as in `Claim`."""
    if artifact in _FOLDERS:
        checked(_FOLDERS[artifact], what)


def assert_same_bytes(a: Path, b: Path) -> None:
    """Two directories hold the same files."""
    assert sorted(file.name for file in a.iterdir()) == sorted(file.name for file in b.iterdir())
    for file in a.iterdir():
        assert file.read_bytes() == (b / file.name).read_bytes(), file.name


@dataclass
class Pages:
    """Block tables of hand-driven sequences; blocks are handed out in a shuffled order. A sequence also has a slot of
    states: the first has slot 1."""

    num_blocks: int
    block_size: int
    seed: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = np.random.default_rng(self.seed).permutation(np.arange(1, self.num_blocks + 1))
        self._free = [int(b) for b in order]

    def slots(self, seq: int, positions: range) -> list[int]:
        """Slots of a sequence's positions; takes blocks as needed."""
        table = self.tables.setdefault(seq, [])
        while len(table) * self.block_size < positions.stop:
            table.append(self._free.pop())
        return [table[p // self.block_size] * self.block_size + p % self.block_size for p in positions]

    def state_slot(self, seq: int) -> int:
        """The slot of a sequence's states; takes one as needed."""
        return self.states.setdefault(seq, 1 + len(self.states))


def replay(replayer: Replayer, graph: int, pages: Pages, chunks: list[tuple[int, list[int], int]]) -> np.ndarray:
    """Runs (sequence, new tokens, first position) chunks ragged in one graph; logits of each one's last token."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    contexts = []
    for seq, tokens, start in chunks:
        span = range(start, start + len(tokens))
        ids += tokens
        positions += span
        slots += pages.slots(seq, span)
        starts.append(len(ids))
        contexts.append(span.stop)
    tables = [pages.tables[seq] for seq, _, _ in chunks]
    width = max(len(t) for t in tables)

    def ints(values: object) -> np.ndarray:
        return np.asarray(values, np.int32)

    return replayer.run(
        graph,
        ints(ids),
        ints(positions),
        ints(slots),
        ints([t + [0] * (width - len(t)) for t in tables]),
        ints(contexts),
        ints(starts),
        ints([s - 1 for s in starts[1:]]),
        replayer.own_slots([pages.state_slot(seq) for seq, _, _ in chunks]),
    )


def random_tokens(vocab: int, length: int = 40, seed: int = 3) -> list[int]:
    """Token ids of no meaning, none of them special."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, vocab, length)]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference over the largest expected value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def check_every_bucket(artifact: Artifact, tokens: list[int], expected: np.ndarray, bound: float = 1e-4) -> None:
    """Replays every graph, padding included, on beginnings of `tokens`; expected: their logits, f32 [T, V]; bound: of
    the relative error."""
    graphs = artifact.graphs()
    assert graphs
    replayer = Replayer(artifact, num_threads=2, num_blocks=64)
    for index, graph in enumerate(graphs):
        pages = Pages(64, artifact.info.block_size, seed=index)
        # One sequence fewer than the bucket holds, and shorter ones: every bucket runs with padding.
        num_seqs = max(1, graph.batch - 1)
        if graph.phase == "prefill":
            lengths = [max(1, graph.seq - 3 - s) for s in range(num_seqs)]
            logits = replay(replayer, index, pages, [(s, tokens[:n], 0) for s, n in enumerate(lengths)])
            at = [n - 1 for n in lengths]
        else:
            prefill = next(i for i, g in enumerate(graphs) if g.phase == "prefill" and g.max_tokens >= 30)
            at = [20 + s for s in range(num_seqs)]
            for s, position in enumerate(at):
                replay(replayer, prefill, pages, [(s, tokens[:position], 0)])
            logits = replay(replayer, index, pages, [(s, [tokens[p]], p) for s, p in enumerate(at)])
        assert relative_error(logits, expected[at]) < bound, f"graph {graph}"
    compared(artifact)
