"""Finds the smallest recipe within a divergence target: predicted from per-layer costs, then measured as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmc.compiler.calibration.layers import round_layers
from llmc.compiler.calibration.plan import Plan
from llmc.compiler.calibration.recipe.head import Head
from llmc.compiler.calibration.recipe.knapsack import Frontier, Option
from llmc.compiler.calibration.recipe.sensitivity import Choice, measure
from llmc.compiler.calibration.request import Progress, RecipeReport, TradeOff
from llmc.compiler.calibration.task import Task
from llmc.compiler.calibration.threads import Workers
from llmc.compiler.calibration.work import Work
from llmc.compiler.config import CompileError
from llmc.quantize.formats.base import WeightFormat

_MOST_TRIES = 8
_STRICTER = 0.9
"""Largest factor from one predicted divergence to the next, stricter one."""
_WORTH = 32.0
"""Recipes predicted above this multiple of the target are not considered."""
_POINTS = 64  # points of the reported curve


@dataclass(frozen=True)
class Found:
    """The chosen recipe. plan: with its formats. rounded: the model's layers. resumed: layers measured by an earlier
    call."""

    plan: Plan
    rounded: Work
    resumed: int
    recipe: RecipeReport


def find_recipe(task: Task, work: Work, crew: Workers, progress: Progress) -> Found:
    """Finds a recipe. Raises CompileError if only the float model meets the target."""
    target = task.config.target_kl
    assert target is not None
    measured = work.part("measured")
    resumed = measured.done()
    reference, choices = measure(task, measured, crew, progress)
    frontier = Frontier(
        [[Option(*pair) for pair in zip(choice.nbytes, choice.costs, strict=True)] for choice in choices],
        _WORTH * target,
    )
    head = Head(task.model, task.parameters, crew)
    budget, tries = target, list[tuple[float, float]]()
    while len(tries) < _MOST_TRIES:
        place = frontier.find(budget)
        assert place is not None, "leaving every layer as it is costs nothing"
        options = frontier.choice(place)
        formats = _formats(choices, options)
        plan = task.plan.with_formats(formats)
        if not plan.formats:
            break
        rounded = work.part(f"try-{len(tries)}")
        round_layers(task, plan, rounded, crew, progress)
        stream = rounded.stream(task.model.num_layers)
        kl = head.divergence(reference, stream[len(stream) - task.held_out :])
        predicted = float(frontier.cost[place])
        tries.append((predicted, kl))
        if kl <= target:
            recipe = _report(task, choices, frontier, place, plan, tries)
            return Found(plan, rounded, resumed, recipe)
        budget = predicted * min(_STRICTER, target / kl)
    least = f", the last of {len(tries)} recipes having {tries[-1][1]:.6f}" if tries else ""
    raise CompileError(f"--target-kl {target} leaves no layer to quantize{least}; give a larger one")


def _formats(choices: list[Choice], options: list[int]) -> dict[tuple[int, str], WeightFormat | None]:
    return {
        (choice.index, choice.linear.kind): choice.formats[option]
        for choice, option in zip(choices, options, strict=True)
    }


def _report(
    task: Task, choices: list[Choice], frontier: Frontier, place: int, plan: Plan, tries: list[tuple[float, float]]
) -> RecipeReport:
    weights = sum(choice.linear.n * choice.linear.k for choice in choices)

    def point(at: int) -> TradeOff:
        nbytes = int(frontier.nbytes[at])
        return TradeOff(nbytes, 8 * nbytes / weights, float(frontier.cost[at]))

    places = np.unique(np.linspace(0, len(frontier) - 1, min(_POINTS, len(frontier))).round().astype(int))
    described = {
        prefix: "none" if linear.format is None else f"{linear.format.bits} bits, {linear.format.describe()}"
        for layer in plan.layers
        for linear in layer.values()
        for prefix, _ in linear.parts
    }
    assert task.config.target_kl is not None
    return RecipeReport(
        target_kl=task.config.target_kl,
        kl=tries[-1][1],
        chosen=point(place),
        tries=tuple(tries),
        measured_tokens=task.held_out * task.windows.shape[1],
        layers=described,
        curve=tuple(point(int(at)) for at in sorted({*places.tolist(), place})),
    )
