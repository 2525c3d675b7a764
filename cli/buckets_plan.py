"""`llmc buckets plan`: the ladder that serves a trace at the lowest cost."""

# ruff: noqa: B008 (typer declares options as argument defaults)
from __future__ import annotations

import enum
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llmc.buckets import BucketError
from llmc.buckets.contexts import Contexts
from llmc.buckets.roles import Role, decode_server, prefill_ladder, prefill_trace
from llmc.buckets.verify_buckets import DEFAULT_ODDS
from llmc.cli.options.acceptance import acceptance_odds
from llmc.cli.options.numbers import finite
from llmc.output_path import check_outputs

if TYPE_CHECKING:
    from llmc.buckets.demand import ServerModel
    from llmc.buckets.planner import Resources
    from llmc.buckets.step_cost import StepCosts
    from llmc.buckets.trace import Trace
    from llmc.buckets.verify_plan import VerifyPlan
    from llmc.runtime.simulation.plan import SimulatedPlan

_PREFILL_RATE = 20_000.0
PLAN_HELP = """Plan the ladder that serves a trace at the lowest cost, and write it as a bucket file for llmc compile.

The trace is llmc's JSONL (arrival_s, prompt_tokens, output_tokens), an Azure LLM inference CSV or a Mooncake JSONL.

\b
Examples:
  llmc buckets plan --trace trace.jsonl --max-model-len 4096 -o buckets.toml
  llmc buckets plan --trace trace.csv --phase prefill --max-padding 5 -o buckets.toml
  llmc buckets plan --trace trace.csv --model models/llama --max-graphs 32 --max-memory 500M -o buckets.json
  llmc buckets plan --trace trace.jsonl --cost-table llama.llmc --speculate 7 -o buckets.toml
  llmc buckets plan --trace trace.jsonl --model models/llama --contexts auto -o buckets.toml
  llmc buckets plan --trace trace.jsonl --role decode -o decode.toml
  llmc compile models/llama -o llama.llmc --buckets buckets.toml
"""


class Phase(enum.StrEnum):
    """Phases to plan."""

    prefill = "prefill"
    decode = "decode"
    both = "both"


class Cost(enum.StrEnum):
    """Source of a replay's cost. auto: measured with a table, else flops with a model, else tokens."""

    auto = "auto"
    tokens = "tokens"
    flops = "flops"
    measured = "measured"


class Scenarios(enum.StrEnum):
    """Scenarios to plan for."""

    spread = "spread"
    own = "own"


def plan_command(
    trace: Path = typer.Option(..., metavar="FILE", help="Trace of requests, plain or .gz; -: stdin."),
    output: Path | None = typer.Option(None, "-o", "--output", metavar="FILE", help="Bucket file, .toml or .json."),
    phase: Phase = typer.Option(Phase.both, help="Phases to plan; the other one gets its default buckets."),
    max_graphs: int | None = typer.Option(
        None, metavar="N", help="Graphs per phase; default: 24, or 128 with --max-padding."
    ),
    max_padding: float | None = typer.Option(
        None, metavar="PCT", callback=finite, help="Plan the fewest graphs that pad at most PCT percent."
    ),
    max_memory: str | None = typer.Option(None, metavar="SIZE", help="Memory of arena and graphs, such as 500M."),
    max_compile_time: float | None = typer.Option(
        None, metavar="S", callback=finite, help="Seconds to compile all graphs."
    ),
    cost: Cost = typer.Option(Cost.auto, help="Cost to minimise; auto: by --cost-table, else --model, else tokens."),
    cost_table: Path | None = typer.Option(
        None, metavar="FILE|ARTIFACT", help="Cost table, or artifact that llmc warmup measured on this machine."
    ),
    model: Path | None = typer.Option(None, metavar="DIR", help="Model whose config.json gives the dimensions."),
    gflops: float = typer.Option(
        1000.0, min=1e-3, callback=finite, help="Arithmetic of the machine for --cost flops, in GFLOP/s."
    ),
    bandwidth: float = typer.Option(
        50.0, min=1e-3, callback=finite, help="Memory bandwidth of the machine for --cost flops, in GB/s."
    ),
    overhead_us: float = typer.Option(
        50.0, min=0, callback=finite, help="Fixed time of a replay for --cost flops, microseconds."
    ),
    max_model_len: int = typer.Option(
        4096, metavar="N", help="Longest prompt plus output; longer requests are clipped."
    ),
    block_size: int = typer.Option(32, metavar="N", help="Tokens per KV block; sizes are multiples of it."),
    max_num_seqs: int = typer.Option(16, metavar="N", help="Sequences per step."),
    max_prefill_batch: int = typer.Option(1, metavar="N", help="Prompts per prefill step."),
    max_prefill_tokens: int = typer.Option(0, metavar="N", help="Tokens per prefill step; 0: max-model-len."),
    prefill_rate: float | None = typer.Option(
        None,
        metavar="X",
        callback=finite,
        help="Prefill speed in tokens/s; default: 20000, and a quarter and four times of it.",
    ),
    decode_step_ms: float = typer.Option(
        20.0, metavar="MS", callback=finite, help="Time of a decode step, if costs are unknown."
    ),
    scenarios: Scenarios = typer.Option(
        Scenarios.spread,
        help="spread: several arrival rates, mixed steps on and off; own: the trace's rate and the given costs.",
    ),
    contexts: Contexts = typer.Option(
        Contexts.longest,
        help="Bound of decode buckets: longest context, total of all, both in one ladder; auto: what suits the trace.",
    ),
    speculate: int = typer.Option(
        0, metavar="N", help="Add decode buckets with rows for N guesses per sequence, where that pays off."
    ),
    acceptance: str = typer.Option(
        f"{DEFAULT_ODDS:g}",
        metavar="X|FILE",
        help="Probability that a guess is right if those before it are, or saved /metrics of a server that measured.",
    ),
    role: Role = typer.Option(
        Role.both, help="Role of the server behind llmc route; prefill and decode servers need fewer buckets."
    ),
    hand_over_tokens: int = typer.Option(
        1024, min=1, metavar="N", help="Tokens of the shortest prompt that a prefill server computes, for --role."
    ),
    prefix_cache: bool = typer.Option(
        False, "--prefix-cache", help="Leave out prompt tokens that a prefix cache would hold."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the plan as JSON on stdout."),
) -> None:
    from llmc.buckets import planner
    from llmc.buckets.bucket import REQUIRED_PHASES
    from llmc.buckets.cost import TokensCost
    from llmc.buckets.demand import ServerModel
    from llmc.buckets.files import write_file
    from llmc.buckets.scenarios import scenarios as scenarios_of
    from llmc.buckets.trace import read_trace
    from llmc.cli.render.plan import plan_data, print_plan
    from llmc.cli.render.verify_plan import print_verify, verify_data
    from llmc.runtime.simulation import plan as plan_simulation

    if output is not None and output.suffix not in (".toml", ".json"):
        raise typer.BadParameter(f"--output {output} must end in .toml or .json")
    check_outputs({"--output": output})
    limits = planner.Limits(max_graphs, max_padding, _bytes(max_memory), max_compile_time)
    server = ServerModel(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_prefill_batch=max_prefill_batch,
        max_prefill_tokens=max_prefill_tokens,
        prefill_tokens_per_s=_PREFILL_RATE if prefill_rate is None else prefill_rate,
        decode_step_s=decode_step_ms / 1000,
        prefix_cache=prefix_cache,
    )
    costs, by_tokens, resources = _cost_model(cost, cost_table, model, gflops, bandwidth, overhead_us, server)
    requests = read_trace(trace, prefixes=prefix_cache)
    phases = REQUIRED_PHASES if phase is Phase.both else (phase.value,)
    if role is not Role.both and (phase is not Phase.both or contexts is not Contexts.longest):
        raise BucketError(f"--role {role.value} decides what is planned: leave out --phase and --contexts")
    if role is Role.prefill and speculate:
        raise BucketError("--role prefill decodes nothing: leave out --speculate")
    if role is Role.prefill:
        phases, requests = ("prefill",), prefill_trace(requests, block_size, hand_over_tokens)
    if role is Role.decode:
        server = decode_server(server, block_size, hand_over_tokens)
        cost_of_plan = TokensCost() if by_tokens else costs
        fixed = planner.plan(requests, server, limits, cost_of_plan, block_size=block_size, resources=resources)
        simulated = plan_simulation.SimulatedPlan(fixed, (), 0)
    else:
        simulated = plan_simulation.plan(
            requests,
            server,
            limits,
            costs,
            by_tokens=by_tokens,
            block_size=block_size,
            phases=phases,
            resources=resources,
            scenarios=scenarios_of(
                pinned=scenarios is Scenarios.own,
                guessed_prefill=prefill_rate is None and cost_table is None and model is None,
            ),
            contexts=contexts,
        )
    if role is Role.prefill:
        only = replace(simulated.plan, ladder=prefill_ladder(simulated.plan.ladder, server))
        simulated = replace(simulated, plan=only)
    verify, odds = None, 0.0
    if speculate:
        odds = acceptance_odds(acceptance)
        verify = _plan_verify(simulated, requests, server, costs, by_tokens, block_size, speculate, odds)
        ladder = replace(simulated.plan.ladder, decode=(*simulated.plan.ladder.decode, *verify.buckets))
        simulated = replace(simulated, plan=replace(simulated.plan, ladder=ladder))
    planned = simulated.plan
    intervals = {} if by_tokens else costs.bounds
    for note in costs.notes:
        print(f"llmc: warning: {note}", file=sys.stderr)
    if output is not None:
        what = " ".join(f"{p.phase} pads {p.score.padding:.2%}." for p in planned.phases)
        write_file(output, planned.ladder, f"Planned by llmc for {requests.name}, {len(requests)} requests. {what}")
    if as_json:
        data = plan_data(simulated, len(requests), server, resources, intervals, costs.notes)
        print(json.dumps(data if verify is None else {**data, "verify": verify_data(verify)}, indent=2))
    else:
        print_plan(simulated, requests.name, len(requests), resources, output, intervals)
        if verify is not None:
            print_verify(verify, planned.unit, max_num_seqs, speculate, odds)


def _plan_verify(
    simulated: SimulatedPlan,
    requests: Trace,
    server: ServerModel,
    costs: StepCosts,
    by_tokens: bool,
    block_size: int,
    guesses: int,
    odds: float,
) -> VerifyPlan:
    from llmc.buckets.demand import demands
    from llmc.buckets.verify_plan import plan_verify

    if by_tokens:
        raise typer.BadParameter(
            "--speculate needs to know what rows cost: give --cost-table of a warmed artifact, or --model DIR"
        )
    decode = simulated.plan.ladder.decode
    if all(bucket.total for bucket in decode) and simulated.decode is not None:
        demand = simulated.decode
    else:
        demand = demands(requests, server, ("decode",))["decode"]
    return plan_verify(
        demand,
        decode,
        costs,
        guesses=guesses,
        odds=odds,
        max_num_seqs=server.max_num_seqs,
        block_size=block_size,
    )


def _cost_model(
    cost: Cost,
    table: Path | None,
    model: Path | None,
    gflops: float,
    bandwidth: float,
    overhead_us: float,
    server: ServerModel,
) -> tuple[StepCosts, bool, Resources]:
    """(costs of steps, whether tokens are minimized instead, resources of graphs other than time)."""
    from llmc.buckets.cost import FlopsCost, ModelShape
    from llmc.buckets.model_config import read_config
    from llmc.buckets.planner import Resources
    from llmc.buckets.step_cost import AssumedCost, StepCosts
    from llmc.compiler.compile_times import learned

    if cost is Cost.auto:
        cost = Cost.measured if table else Cost.flops if model else Cost.tokens
    if cost is Cost.measured and table is None:
        raise typer.BadParameter("--cost measured needs --cost-table FILE, or an artifact that llmc warmup measured")
    if cost is Cost.flops and model is None:
        raise typer.BadParameter("--cost flops needs the dimensions of a model: give its directory with --model")
    resources = learned(Resources())
    shape = ModelShape.from_config(read_config(model), str(model / "config.json")) if model else None
    if shape is not None:
        resources = replace(resources, bytes_per_token=shape.arena_bytes_per_token)
    if cost is Cost.measured and table is not None:
        from llmc.runtime.warm_up.cost_tables import step_costs

        return step_costs(table), False, resources
    if cost is Cost.flops and shape is not None:
        roofline = FlopsCost(shape, gflops * 1e9, bandwidth * 1e9, overhead_us * 1e-6)
        return StepCosts.of_model(roofline, "a roofline"), False, resources
    assumed = AssumedCost(server.prefill_tokens_per_s, server.decode_step_s)
    return StepCosts.of_model(assumed, "assumed"), True, resources


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    from llmc.units import parse_size

    return parse_size(text)
