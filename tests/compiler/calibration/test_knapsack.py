"""The choice of one option for each layer against all choices there are."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from llmc.compiler.calibration.recipe.knapsack import Frontier, Option


def made_up(seed: int, layers: int, options: int, sizes: int) -> list[list[Option]]:
    """Every layer may be left as it is, which is the largest and costs nothing."""
    rng = np.random.default_rng(seed)
    left = Option(sizes, 0.0)
    return [
        [*(Option(int(rng.integers(1, sizes)), float(rng.exponential())) for _ in range(options - 1)), left]
        for _ in range(layers)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all_choices(seed: int) -> None:
    # Few sizes make many choices of one size; many sizes make none alike.
    layers = made_up(seed, layers=2 + seed % 5, options=2 + seed % 4, sizes=(4, 1000)[seed % 2])
    frontier = Frontier(layers)
    sums = [(sum(o.nbytes for o in chosen), math.fsum(o.cost for o in chosen))
            for chosen in itertools.product(*layers)]  # fmt: skip
    limits = [0.0, *np.random.default_rng(seed).uniform(0, len(layers), 20), math.inf]
    for limit in limits:
        place = frontier.find(limit)
        assert place is not None
        fitting = [nbytes for nbytes, cost in sums if cost <= limit + 1e-12]
        assert frontier.nbytes[place] == min(fitting)
        assert frontier.cost[place] <= limit
        chosen = [options[at] for options, at in zip(layers, frontier.choice(place), strict=True)]
        assert sum(option.nbytes for option in chosen) == frontier.nbytes[place]
        assert sum(option.cost for option in chosen) == pytest.approx(frontier.cost[place], abs=1e-12)
        cheapest = min(cost for nbytes, cost in sums if nbytes <= frontier.nbytes[place])
        assert frontier.cost[place] == pytest.approx(cheapest, abs=1e-12)


def test_the_frontier_falls() -> None:
    frontier = Frontier(made_up(3, layers=6, options=5, sizes=50))
    assert (np.diff(frontier.nbytes) > 0).all()
    assert (np.diff(frontier.cost) < 0).all()


def test_what_costs_too_much_is_not_followed_and_nothing_else_is_lost() -> None:
    layers = made_up(5, layers=8, options=4, sizes=100)
    whole, cut = Frontier(layers), Frontier(layers, most=2.0)
    kept = whole.cost <= 2.0
    assert np.array_equal(cut.nbytes, whole.nbytes[kept])
    assert np.array_equal(cut.cost, whole.cost[kept])
    assert len(cut) < len(whole)
    assert Frontier([[Option(1, 1.0)]]).find(0.5) is None
