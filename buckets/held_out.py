"""Chooses how to plan by cross-validation: plans are scored on parts of the trace that they have not seen.

For each way to blur demand, and for the tuned rule-based ladder, a ladder is made from all parts but one fold and
scored on that fold. The way that pads least makes the final plan from all parts; its reported score is the held-out
one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .candidates import PhaseProblem, top_of
from .demand import Demand, ServerModel
from .evidence import Blur, Evidence, blurred, even, exact_cost, joined, scaled
from .scoring import Scorer
from .solvers import Pairs, by_rule, cheapest, solver_of

BLURS = (Blur(), Blur(width=0.15), Blur(even=0.3), Blur(width=0.15, even=1.0))
TUNED = "ramp-up, tuned"
# The padding of rule-based ladders in a case counts as at least this share of the case's cost; below, no ladder
# matters.
_LEAST_PADDING = 0.02
# In every fold a plan must pad less than this share of ramp-up's padding: traffic changes more than that.
_CLEARLY = 0.95
# Cells searched per fold; the final plan uses more.
_CELLS = 1 << 10

ProblemOf = Callable[[Demand], PhaseProblem]


class Rule(enum.Enum):
    """Ramp-up ladders whose batches, start and step are the best for given steps."""

    ALL = "ramp-up, tuned for all cases"
    OWN = "ramp-up, tuned for the own pace"


Way = Blur | Rule


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Performance of ladders on held-out steps, as weighted means over cases and means over folds.

    padding, by_rule: share 0 … 1 for the plan and for ramp-up. Ramp-up is tuned on the same steps, for all cases or for
    the own one, whichever is better.
    share: padded cost of the plan relative to ramp-up. own: the same for the own case. worst: the larger of both in the
    worst fold.
    way: how the ladder is made.
    """

    way: Way
    padding: float
    by_rule: float
    share: float
    own: float
    worst: float


@dataclass(frozen=True)
class _Test:
    """A case in a held-out fold."""

    scorer: Scorer
    exact: float
    weight: float
    own: bool

    def padded(self, ladder: Pairs) -> float:
        """Padded cost, bounded below so that ratios stay meaningful."""
        exact = self.exact + self.scorer.step_cost
        return max(self.scorer.outcome(ladder).cost - exact, 0.0) + _LEAST_PADDING * exact


@dataclass(frozen=True)
class Learner:
    """Makes ladders of `count` buckets from the evidence of one phase."""

    evidence: Evidence
    problem_of: ProblemOf
    server: ServerModel
    count: int
    block_size: int

    def blended(self, parts: Sequence[int] | None = None) -> Demand:
        """The demand of all cases, weighted by the padding of rule-based ladders in them; scaled to the own case's
        number of steps."""
        pairs = [(case, demand) for case in self.evidence.cases if (demand := case.demand(parts)) is not None]
        if len(pairs) == 1:
            return pairs[0][1]
        parts_of = [scaled(demand, case.weight / self._padded_by_rule(demand)) for case, demand in pairs]
        whole = joined(parts_of)
        return scaled(whole, self.evidence.steps / float(whole.weight.sum()))

    def learned_from(self, demand: Demand, blur: Blur) -> PhaseProblem:
        """The problem that a plan solves, with blurred demand."""
        spread = blurred(demand, blur.width, top_of(demand, self.server, self.block_size), self.block_size)
        if blur.even:
            flat = even(demand.phase, self.server, demand.total)
            shares = self._padded_by_rule(demand), self._padded_by_rule(flat)
            spread = joined([spread, scaled(flat, blur.even * shares[0] / shares[1])])
        return self.problem_of(spread)

    def rule(self, rule: Rule, parts: Sequence[int] | None = None) -> PhaseProblem:
        """The problem for which a rule-based ladder is tuned."""
        own = [case for case in self.evidence.cases if case.own] if rule is Rule.OWN else []
        demand = next((demand for case in own if (demand := case.demand(parts)) is not None), None)
        return self.problem_of(self.blended(parts) if demand is None else demand)

    def choose(self) -> HeldOut | None:
        """The way with the best held-out score; None without folds, or if a fold has no steps."""
        ways: tuple[Way, ...] = (*BLURS, *Rule)
        results: dict[Way, list[tuple[list[_Test], Pairs, list[Pairs]]]] = {way: [] for way in ways}
        for fold, left_out in enumerate(self.evidence.folds):
            seen = self.evidence.without(fold)
            tests = [
                _Test(self.problem_of(demand).scorer, self._exact(demand), case.weight, case.own)
                for case in self.evidence.cases
                if (demand := case.demand(left_out)) is not None
            ]
            if not tests or all(case.demand(seen) is None for case in self.evidence.cases):
                return None
            demand = self.blended(seen)
            problem = self.problem_of(demand)
            rules = {rule: self._tuned(self.rule(rule, seen)) for rule in Rule}
            for way in ways:
                if isinstance(way, Rule):
                    ladder = rules[way]
                else:
                    learned = self.learned_from(demand, way) if way else problem
                    ladder = solver_of(learned, self.count, self.block_size, problem, _CELLS)(self.count)
                results[way].append((tests, ladder, list(rules.values())))
        if not self.evidence.folds:
            return None
        held_out = {way: _held_out(way, folds) for way, folds in results.items()}
        best = min((held_out[way] for way in BLURS), key=lambda one: one.worst)
        if best.worst <= _CLEARLY:
            return best
        return min((held_out[rule] for rule in Rule), key=lambda one: one.worst)

    def _tuned(self, problem: PhaseProblem) -> Pairs:
        return cheapest(problem, by_rule(problem, self.count, self.block_size, (TUNED,)))

    def _exact(self, demand: Demand) -> float:
        return exact_cost(demand, self.problem_of(demand).model)

    def _padded_by_rule(self, demand: Demand) -> float:
        problem = self.problem_of(demand)
        exact = self._exact(demand)
        padded = problem.evaluate(self._tuned(problem)).cost - problem.scorer.step_cost - exact
        return max(padded, _LEAST_PADDING * (exact + problem.scorer.step_cost), 1e-30)


def _held_out(way: Way, folds: list[tuple[list[_Test], Pairs, list[Pairs]]]) -> HeldOut:
    shares, owns = [], []
    computed, total = np.zeros(2), 0.0
    for tests, ladder, rules in folds:
        weights = np.array([test.weight for test in tests])
        rule_of = [min(rules, key=test.padded) for test in tests]
        each = np.array([test.padded(ladder) / test.padded(rule) for test, rule in zip(tests, rule_of, strict=True)])
        shares.append(float(weights @ each / weights.sum()))
        owns.append(next((float(one) for one, test in zip(each, tests, strict=True) if test.own), shares[-1]))
        for test, rule in zip(tests, rule_of, strict=True):
            tokens = np.array([test.scorer.outcome(one).tokens for one in (ladder, rule)])
            computed += test.weight * tokens / test.scorer.asked
        total += float(weights.sum())
    padding, by_rule = (1 - total / computed).tolist()
    return HeldOut(way, padding, by_rule, float(np.mean(shares)), float(np.mean(owns)), max(*shares, *owns))
