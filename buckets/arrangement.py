"""Ranks, stages and replicas of a model, and the time of a step among them.

The time of one rank is divided; that of messages between ranks is added. The messages are those of
runtime/native/collective/mpi, and their time is that of MPICH's algorithms: Thakur, Rabenseifner, Gropp, "Optimization
of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from llmc.graphs_format import MAX_RANKS
from llmc.shown import shown

from .bucket import BucketError
from .cost import BucketCost, CostModel, Floats, Ints, Lengths, ModelShape
from .step_cost import LoadCost, StepCosts

# As the ranks do over MPI: smaller sums are gathered whole, larger ones are added up by parts.
_BY_PARTS = (32 << 10) // 4
# MPICH gathers parts of more bytes than that around a ring.
_RING_BYTES = 512 << 10
_MOST_REPLICAS = 4096


@dataclass(frozen=True, slots=True)
class Link:
    """What carries messages between ranks.

    latency_s: from the start of a short message to its arrival. message_s: what each further message costs a rank that
    sends several at once. bytes_per_s: of a long one, and of each rank.
    """

    latency_s: float
    message_s: float
    bytes_per_s: float

    def gather_s(self, floats: Floats, ranks: int) -> Floats:
        """Seconds until every rank has the floats of all. floats: of each rank."""
        rounds = math.ceil(math.log2(ranks))
        return np.asarray(rounds * self.latency_s + (ranks - 1) * 4 * floats / self.bytes_per_s, np.float64)

    def sum_s(self, floats: Floats, ranks: int) -> Floats:
        """Seconds until every rank has the sum of the floats of all."""
        whole = self.gather_s(floats, ranks)
        if ranks <= 2:
            return whole
        rounds = np.where(4 * floats > _RING_BYTES, ranks - 1, math.ceil(math.log2(ranks)))
        starts = self.latency_s + (ranks - 2) * self.message_s + rounds * self.latency_s
        parts = starts + 2 * (ranks - 1) / ranks * 4 * floats / self.bytes_per_s
        return np.asarray(np.where(floats < _BY_PARTS, whole, parts), np.float64)

    def pass_s(self, floats: Floats) -> Floats:
        """Seconds until one rank has what another one passes on."""
        return np.asarray(self.latency_s + 4 * floats / self.bytes_per_s, np.float64)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """`ranks` share each layer, `stages` the layers, and `replicas` of all these the requests."""

    ranks: int = 1
    stages: int = 1
    replicas: int = 1

    @classmethod
    def parse(cls, text: str) -> Arrangement:
        """From ranks, ranks × stages or ranks × stages × replicas, as in 8x4x2. Raises BucketError."""
        numbers = text.split("x")
        if not 1 <= len(numbers) <= 3 or not all(n.isascii() and n.isdigit() and len(n) <= 6 for n in numbers):
            raise BucketError(f"arrangement {shown(text)} is not ranks x stages x replicas: write it as in 8x4x2")
        found = cls(*map(int, numbers))
        together = found.ranks * found.stages
        if not found.ranks or not found.stages or together > MAX_RANKS:
            raise BucketError(f"arrangement {text} has {together} ranks in a replica: use 1 to {MAX_RANKS}")
        if not 1 <= found.replicas <= _MOST_REPLICAS:
            raise BucketError(f"arrangement {text} has {found.replicas} replicas: use 1 to {_MOST_REPLICAS}")
        return found

    @property
    def processes(self) -> int:
        """Ranks of all replicas."""
        return self.ranks * self.stages * self.replicas

    def __str__(self) -> str:
        return f"{self.ranks}x{self.stages}x{self.replicas}"


@dataclass(frozen=True, slots=True)
class DividedModel:
    """A model divided among the ranks and stages of one replica. link: between all of them.

    undivided_s: the part of a step that each rank spends whatever its share.
    """

    shape: ModelShape
    arrangement: Arrangement
    link: Link
    undivided_s: float = 0.0

    def check(self) -> None:
        """Raises BucketError with one sentence on what the arrangement cannot divide."""
        ranks, stages, shape = self.arrangement.ranks, self.arrangement.stages, self.shape
        counts = {"attention heads": shape.heads, "tokens of the vocabulary": shape.vocab}
        counts |= {} if shape.latent is not None else {"KV heads": shape.kv_heads}
        counts |= {"elements inside the feed-forward block": shape.expert_intermediate or shape.intermediate}
        for name, count in counts.items():
            if count % ranks:
                raise BucketError(
                    f"{count} {name} cannot be divided among {ranks} ranks of {self.arrangement}: choose a divisor"
                )
        if stages > shape.layers:
            raise BucketError(f"{self.arrangement} has more stages than the model's {shape.layers} layers: use fewer")

    def messages_s(self, rows: npt.ArrayLike, sequences: npt.ArrayLike) -> Floats:
        """Seconds of all messages of a step; 0 without any."""
        ranks, stages, link = self.arrangement.ranks, self.arrangement.stages, self.link
        hidden = np.asarray(rows, np.float64) * self.shape.hidden
        logits = np.asarray(sequences, np.float64) * self.shape.vocab
        seconds = np.zeros(np.broadcast_shapes(hidden.shape, logits.shape))
        if ranks > 1:
            sums = 2 * self.shape.layers + 1  # of each layer, and the embedding
            seconds += sums * link.sum_s(hidden, ranks) + link.gather_s(logits / ranks, ranks)
        if stages > 1:
            seconds += (stages - 1) * link.pass_s(hidden) + link.pass_s(logits)
        # Rank 0 says what to run: to all at once, or to each rank of several stages.
        if stages > 1:
            seconds += link.latency_s + (ranks * stages - 2) * link.message_s
        elif ranks > 1:
            seconds += math.ceil(math.log2(ranks)) * link.latency_s
        return seconds

    def share_s(self, seconds: Floats) -> Floats:
        """Seconds of a step, without messages, that takes one rank `seconds` for a whole model. All stages together
        take as long as one. Which of them work at the same time depends on the requests."""
        fixed = np.minimum(seconds, self.undivided_s)
        return np.asarray(fixed + (seconds - fixed) / self.arrangement.ranks, np.float64)

    def costs(self, whole: StepCosts) -> StepCosts:
        """Costs of the divided model, without bounds, from those of a single rank."""
        return replace(
            whole,
            laws={phase: self._law(law) for phase, law in whole.laws.items()},
            computed=None if whole.computed is None else _DividedCost(whole.computed, self),
            bounds={},
        )

    def _law(self, whole: LoadCost) -> LoadCost:
        # The time of messages is a line between these rows.
        bends = {n // self.shape.hidden + 1 for n in (_BY_PARTS - 1, _RING_BYTES // 4)}
        inside = {bend + step for bend in bends for step in (-1, 0)}
        last = int(whole.rows[-1])
        rows = np.array(sorted({*whole.rows.tolist(), *(row for row in inside if 1 <= row <= last)}), np.float64)
        seconds = self.share_s(whole.at(rows)) + self.messages_s(rows, 0)
        each = float(self.messages_s(1, 1) - self.messages_s(1, 0))
        pair_s = {phase: s / self.arrangement.ranks for phase, s in whole.pair_s.items()}
        return LoadCost(rows, seconds, pair_s, whole.sequence_s / self.arrangement.ranks + each)


@dataclass(frozen=True, slots=True)
class _DividedCost(BucketCost):
    """Costs of buckets whose padding is computed."""

    whole: CostModel
    model: DividedModel
    unit: str = "s"

    def cost(self, phase: str, batch: Ints, seq: Lengths) -> Floats:
        rows = batch + 0 * seq if phase == "decode" else batch * seq
        return self.model.share_s(self.whole.cost(phase, batch, seq)) + self.model.messages_s(rows, batch)
