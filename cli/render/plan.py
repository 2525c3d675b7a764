"""A plan as text and as JSON data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmc.buckets.cost_bounds import CONFIDENCE
from llmc.buckets.demand import ServerModel
from llmc.buckets.evidence import Blur
from llmc.buckets.files import entry
from llmc.buckets.held_out import HeldOut
from llmc.buckets.planner import LadderScore, PhasePlan, Resources
from llmc.graphs_format import PHASES
from llmc.runtime.simulation.forms import FormChoice
from llmc.runtime.simulation.plan import SimulatedPlan


def _scores(phase: PhasePlan) -> list[LadderScore]:
    return [phase.score, *phase.others]


def _cost(cost: float, ends: tuple[float, float] | None) -> str:
    """The interval, below the cost: in 80 columns such a table has no room for both ends beside it."""
    if ends is None or cost <= 0:
        return f"{cost:,.4g}"
    return f"{cost:,.4g}\n{ends[0] / cost - 1:+.0%} {ends[1] / cost - 1:+.0%}"


Intervals = Mapping[str, tuple[float, float]]
"""Factors (low, high) on costs, by phase."""


def _interval(intervals: Intervals, phase: str, cost: float) -> tuple[float, float] | None:
    ends = intervals.get(phase)
    return None if ends is None else (cost * ends[0], cost * ends[1])


def plan_data(
    simulated: SimulatedPlan,
    requests: int,
    server: ServerModel,
    resources: Resources,
    intervals: Intervals,
    warnings: Sequence[str],
) -> dict[str, Any]:
    """The whole plan as data; shares and padding are 0 … 1."""
    plan = simulated.plan
    return {
        "requests": requests,
        "clipped": plan.clipped,
        "max_model_len": server.max_model_len,
        "unit": plan.unit,
        "arena_bytes": int(plan.arena_bytes),
        "compile_s": resources.compile_s(len(plan.ladder)),
        "phases": {
            p.phase: {
                "buckets": [entry(bucket) for bucket in p.buckets],
                "steps": p.steps,
                "exact": p.exact,
                "lower_bound": p.lower_bound,
                "gap": p.gap,
                "held_out": None if p.held_out is None else _held_out_data(p.held_out),
                "ladders": [
                    {
                        "name": s.name,
                        "graphs": s.graphs,
                        "cost": s.cost,
                        "cost_interval": _interval(intervals, p.phase, s.cost),
                        "padding": s.padding,
                        "padded_tokens": s.tokens * s.padding,
                        "coverage": s.held,
                        "buckets": [list(pair) for pair in s.pairs],
                    }
                    for s in _scores(p)
                ],
            }
            for p in plan.phases
        },
        "warnings": [*warnings, *simulated.warnings],
        "confidence": CONFIDENCE if intervals else None,
        "scenarios": [
            {"name": one.name, "speed": one.speed, "prefill": one.prefill, "mixed": one.mixed, "weight": one.weight}
            for one in simulated.scenarios
        ],
        "simulated": {
            "requests": simulated.requests,
            "ladders": [
                {
                    "name": one.name,
                    "cost": one.cost,
                    "cost_interval": one.interval,
                    "score": one.score,
                    "padding": one.padding,
                    "steps": one.steps,
                    "graphs": len(one.ladder),
                }
                for one in simulated.tried
            ],
        },
        "contexts": None if simulated.forms is None else _forms_data(simulated.forms, plan.unit),
        "ladder": {phase: [entry(bucket) for bucket in getattr(plan.ladder, phase)] for phase in PHASES},
    }


def _forms_data(forms: FormChoice, unit: str) -> dict[str, Any]:
    uses = {
        name: {
            "graphs": use.graphs, "steps": use.steps, "read_tokens": use.read, "padded_tokens": use.padded,
            "padding": use.padding, "cost": use.cost,
        }
        for name, use in (("longest", forms.longest), ("total", forms.total), ("both", forms.both))
        if use is not None
    }  # fmt: skip
    suits = None if forms.suits is None else forms.suits.value
    return {**uses, "uneven": forms.uneven, "suits": suits, "why": forms.why(unit)}


def _held_out_data(one: HeldOut) -> dict[str, Any]:
    made = {"width": one.way.width, "even": one.way.even} if isinstance(one.way, Blur) else one.way.value
    return {"padding": one.padding, "ramp_up": one.by_rule, "share": one.share, "own": one.own, "worst": one.worst,
            "made_by": made}  # fmt: skip


def _held_out_text(one: HeldOut | None) -> str:
    if one is None:
        return "held out: too few requests to plan on one half and serve the other"
    made = one.way.value if not isinstance(one.way, Blur) else "planned" if not one.way else "planned for blurred steps"
    return (
        f"held out, planned on one half and serving the other, both ways: pads {one.padding:.2%}, tuned ramp-up "
        f"{one.by_rule:.2%}; {one.share:.1%} of its padded cost, {one.own:.1%} at the trace's pace; {made}"
    )


def _print_forms(forms: FormChoice, unit: str, requests: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from llmc.cli.render.console import Console
    from llmc.cli.render.tables import print_table
    from llmc.runtime.simulation.figures import count

    console = Console()
    title = f"decode buckets for the longest context and for the total, at the trace's pace, {requests:,} requests"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("contexts", "graphs", "steps", "table tokens", "padded", "padding", "cost"):
        table.add_column(column, justify="left" if column == "contexts" else "right")
    uses = [("longest", forms.longest), ("total", forms.total), ("both", forms.both)]
    for name, use in uses:
        if use is None:
            continue
        row = (f"{use.graphs}", f"{use.steps:,}", count(use.read), count(use.padded), f"{use.padding:.1%}")
        table.add_row(name, *row, f"{use.cost:,.4g}")
    print_table(table, console)
    console.print(
        f"{forms.why(unit)}; --contexts longest, total, both or auto chooses", highlight=False, soft_wrap=True
    )


def print_plan(
    simulated: SimulatedPlan,
    name: str,
    requests: int,
    resources: Resources,
    output: Path | None,
    intervals: Intervals,
) -> None:
    """Prints tables on stdout."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from llmc.cli.render.console import Console
    from llmc.cli.render.tables import print_table
    from llmc.runtime.simulation.figures import count, duration
    from llmc.units import format_bytes

    console, plan = Console(), simulated.plan
    several = len(simulated.scenarios) > 1
    clipped = f", {plan.clipped} of them clipped" if plan.clipped else ""
    for phase in plan.phases:
        weighted = ", of all scenarios by their weights" if several and phase.phase in simulated.open_phases else ""
        title = f"{phase.phase}: {phase.steps:,.0f} steps of {requests:,} requests in {name}{clipped}{weighted}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for column in ("ladder", "graphs", "padded", "padding", "plan / this", "cost", "held"):
            table.add_column(column, justify="left" if column == "ladder" else "right")
        mine = phase.score.tokens * phase.score.padding
        for score in _scores(phase):
            padded = score.tokens * score.padding
            ratio = "" if score is phase.score or padded <= 0 else f"{mine / padded:.1%}"
            cost = _cost(score.cost, _interval(intervals, phase.phase, score.cost))
            cells = (f"{score.graphs}", count(padded), f"{score.padding:.2%}", ratio, cost, f"{score.held:.1%}")
            table.add_row(score.name, *cells, style="bold" if score is phase.score else "")
        print_table(table, console)
        sizes = sorted({b.seq for b in phase.buckets})
        proof = "optimal" if phase.exact else f"within {phase.gap:.1%} of the optimum of these steps"
        console.print(f"cost in {plan.unit}, {proof}; lengths {' '.join(map(str, sizes))}", highlight=False)
        console.print(_held_out_text(phase.held_out), highlight=False, soft_wrap=True)
    if len(simulated.scenarios) > 1:
        what = ", ".join(f"{one.name} ({one.weight:g})" for one in simulated.scenarios)
        console.print(f"scenarios, with their weights: {what}", highlight=False, soft_wrap=True)
    if simulated.tried:
        title = f"whole ladders in the simulation at the trace's pace, {simulated.requests:,} requests"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for column in ("ladder", "graphs", "steps", "padding", "cost", "plan / this"):
            table.add_column(column, justify="left" if column == "ladder" else "right")
        best = simulated.tried[0]
        for one in simulated.tried:
            row = (f"{len(one.ladder)}", f"{one.steps:,}", f"{one.padding:.2%}", _cost(one.cost, one.interval),
                   "" if one is best else f"{best.cost / one.cost:.1%}")  # fmt: skip
            table.add_row(one.name, *row, style="bold" if one is best else "")
        print_table(table, console)
    if simulated.forms is not None:
        _print_forms(simulated.forms, plan.unit, simulated.requests)
    if intervals:
        console.print(f"below a cost: how far off it may lie, in {CONFIDENCE:.0%} of cases", highlight=False)
    console.print(
        f"arena about {format_bytes(int(plan.arena_bytes))}; {len(plan.ladder)} graphs in all, compiled in about "
        f"{duration(resources.compile_s(len(plan.ladder)))} from an empty cache",
        highlight=False,
    )
    for warning in simulated.warnings:
        console.print(f"warning: {warning}", highlight=False, soft_wrap=True)
    if output is not None:
        console.print(f"wrote {output}: llmc compile MODEL -o OUT --buckets {output}", highlight=False)
