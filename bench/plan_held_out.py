"""Plans buckets on one half of a trace and simulates the other half, compared with the tuned ramp-up grid.

    python -m bench.plan_held_out TRACE [TRACE …] [--cost tokens|time] [--graphs 24] [--max-model-len 4096]

Each half is planned on once. Ramp-up grids (batches, start and step) are tuned on the half that the plan saw. One is
for the steps of all scenarios, one for those at the trace's own pace. Shares are plan over the better grid: padded
tokens of each phase, and padded time by a roofline of a 0.5-billion model. They are given at the trace's own pace, then
as the largest in any scenario. With --cost time, plan and grid are made for time, and both are served by that clock;
else they are made for tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from llmc.buckets.bucket import REQUIRED_PHASES, Bucket, BucketLadder, area
from llmc.buckets.cost import FlopsCost, ModelShape
from llmc.buckets.demand import ServerModel
from llmc.buckets.planner import Limits, Resources, complete
from llmc.buckets.scenarios import OWN, Scenario, scenarios
from llmc.buckets.step_cost import AssumedCost, StepCosts
from llmc.buckets.trace import Trace, read_trace
from llmc.runtime.simulation import plan as plan_simulation
from llmc.runtime.simulation.what_if import Ladder, Server, WhatIf, asked_tokens

BLOCK_SIZE = 32
MODEL = ModelShape(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, head_dim=64, vocab=151936)
TUNED = "ramp-up, tuned"


@dataclass(frozen=True)
class Padded:
    """Tokens asked for and computed, and seconds that padding takes, by phase."""

    asked: dict[str, float]
    computed: dict[str, float]
    seconds: dict[str, float]

    def padded(self, phase: str) -> float:
        """Padded tokens of a phase."""
        return self.computed[phase] - self.asked[phase]

    def padding(self, phase: str) -> float:
        """Padded tokens as a share of the tokens computed, 0 … 1."""
        return 1 - self.asked[phase] / self.computed[phase] if self.computed[phase] else 0.0


def clock(server: ServerModel, scenario: Scenario, by_time: bool) -> StepCosts:
    """Times of steps in the simulation; without by_time, those that plans without measured costs assume."""
    if by_time:
        return StepCosts.of_model(FlopsCost(MODEL), "roofline")
    rate = server.prefill_tokens_per_s * scenario.prefill
    return StepCosts.of_model(AssumedCost(rate, server.decode_step_s), "assumed")


def served(trace: Trace, ladder: BucketLadder, server: ServerModel, scenario: Scenario, by_time: bool) -> Padded:
    """Padding when the simulation serves the trace with a ladder."""
    costs = clock(server, scenario, by_time)
    engine = Server(server.max_model_len, server.max_num_seqs, BLOCK_SIZE, prefix_cache=False)
    buckets = tuple(bucket for bucket in ladder if scenario.mixed or bucket.phase != "mixed")
    roofline = FlopsCost(MODEL)
    asked, computed, seconds = (dict.fromkeys(REQUIRED_PHASES, 0.0) for _ in range(3))

    def cost(phase: str, batch: int, seq: float) -> float:
        return float(roofline.cost(phase, np.array([batch]), np.array([seq]))[0])

    for load in WhatIf(trace, engine, costs, speed=scenario.speed).loads(Ladder("", buckets)):
        bucket: Bucket = buckets[load.graph]
        if bucket.phase in REQUIRED_PHASES:
            asked[bucket.phase] += asked_tokens(bucket, load)
            computed[bucket.phase] += load.replays * area(bucket, BLOCK_SIZE)
            exact = cost(bucket.phase, load.num_seqs, load.longest / load.replays)
            seconds[bucket.phase] += load.replays * (cost(bucket.phase, bucket.batch, bucket.seq) - exact)
    return Padded(asked, computed, seconds)


def made_from(
    seen: Trace, server: ServerModel, graphs: int, met: tuple[Scenario, ...], by_time: bool
) -> tuple[BucketLadder, BucketLadder]:
    """The plan, and the best ramp-up grid for the same steps."""
    made = plan_simulation.plan(
        seen, server, Limits(graphs), clock(server, OWN, by_time),
        by_tokens=not by_time, block_size=BLOCK_SIZE, phases=REQUIRED_PHASES, resources=Resources(), scenarios=met,
    ).plan  # fmt: skip
    pairs = {phase.phase: next(one.pairs for one in phase.others if one.name == TUNED) for phase in made.phases}
    grid = {phase: tuple(Bucket(phase, *pair) for pair in pairs[phase]) for phase in REQUIRED_PHASES}
    return made.ladder, complete(grid, server, BLOCK_SIZE)


def by_other_half(seen: Trace, unseen: Trace, server: ServerModel, graphs: int, by_time: bool) -> dict[str, float]:
    """Padding of `unseen` by a plan made on `seen`, compared with grids tuned on `seen`."""
    met = scenarios(pinned=False, guessed_prefill=not by_time)
    plan, for_all = made_from(seen, server, graphs, met, by_time)
    for_own = made_from(seen, server, graphs, (OWN,), by_time)[1]
    at = {
        scenario: [served(unseen, one, server, scenario, by_time) for one in (plan, for_all, for_own)]
        for scenario in met
    }

    def by_best(scenario: Scenario, of: Callable[[Padded], float], rules: slice) -> float:
        mine, *others = (of(one) for one in at[scenario])
        least = min(others[rules])
        return mine / least if least > 0 else 1.0

    row: dict[str, float] = {}
    for phase in REQUIRED_PHASES:
        # With mixed steps few prompts run in prefill steps, so prefill is rated without them.
        scenario = OWN if phase == "decode" else next(one for one in met if not one.mixed and one.speed == 1)
        mine, *others = at[scenario]
        row[phase] = mine.padding(phase)
        row[f"{phase}, ramp-up"] = min(one.padding(phase) for one in others)
        row[f"{phase} share"] = by_best(scenario, partial(Padded.padded, phase=phase), slice(0, 2))
    row["time share"] = by_best(OWN, lambda one: sum(one.seconds.values()), slice(0, 2))
    row["largest time share"] = max(
        by_best(scenario, lambda one: sum(one.seconds.values()), slice(0, 1)) for scenario in met
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--cost", choices=("tokens", "time"), default="tokens")
    parser.add_argument("--graphs", type=int, default=24)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    server, by_time = ServerModel(args.max_model_len, args.max_num_seqs), args.cost == "time"
    rows: dict[str, dict[str, float]] = {}
    for path in args.traces:
        first, second = plan_simulation.halves(read_trace(path, prefixes=False))
        rows[f"{path.stem}, first → second"] = by_other_half(first, second, server, args.graphs, by_time)
        rows[f"{path.stem}, second → first"] = by_other_half(second, first, server, args.graphs, by_time)
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    names = list(next(iter(rows.values())))
    print("| trace, planned on → served | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(f"{value:.1%}" for value in row.values()) + " |")
    for word, of in (("median", statistics.median), ("largest", max)):
        cells = (f"{of([row[name] for row in rows.values()]):.1%}" if "share" in name else "" for name in names)
        print(f"| {word} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
