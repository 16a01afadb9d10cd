"""How many tokens to draft: as many as gain more than the rows that they cost. Pure.

A step over R sequences with D drafted tokens in all brings each sequence a token and those of its draft that are
accepted: 1 + Gᵢ tokens, Gᵢ being the sum of the chances that each drafted token and all before it are right. It
takes longer for all of them:

    T  = step_us(R, prefill)                        without drafts
    T' = step_us(R + D, prefill) + bubble_us        with D drafted tokens

While a drafted step runs, the next one cannot be planned: the workers wait for its result and the next plan, which
is the bubble. Lengths are chosen so that the product of all sequences' speeds is largest (proportional fairness),
and the time that the U sequences without drafts lose counts twice:

    Σ log (1 + Gᵢ) - (R + U) · log (T' / T)

So a single sequence drafts what pays for itself, and in a batch a few sequences with drafts do not slow down all
others. What makes the product larger makes the sum of the speeds larger, too. Each further token of a draft adds
less than the one before it, so the tokens that add most are taken first, up to the best number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log, log1p
from typing import Final

import numpy as np

from trunkline.controller.drafts.acceptance import CHANCE_MAX
from trunkline.controller.drafts.allowance import SHARE
from trunkline.controller.tiers.costs import StepCosts

MARGIN: Final = 1.02
"""How much faster drafts must make the sequences that have some: chances are estimates."""
BYSTANDER: Final = 1.0
"""How much more the time counts that sequences without drafts lose by those of others."""
ROW_LEAST: Final = 0.002
"""Least cost of a drafted token, as a part of the step: a row that was never measured does not count as free."""
WORTH_GOAL: Final = 1.05
"""Smallest worth of drafts (`Worth`) for which `MARGIN` is enough."""
WORTH_PRIOR: Final = 0.55, 0.5
LOOKED_PART: Final = 0.1
"""Part of what the best drafts would save beyond `WORTH_GOAL` that looking for them may take."""
BEST_LENGTHS: Final = (1, 3, 8, 24)
"""Lengths of drafts of which the best is taken to be known."""
WORTH_KEPT: Final = 0.97
"""Part of the worth that a step with drafts leaves: some 30 steps count."""
WORTH_RECOVERY: Final = 0.002
"""Part by which a worth below the goal comes back to it with each step that was not waited for."""
PRIOR_BUBBLE_US: Final = 1000.0
"""Assumed time from a result to the beginning of the next step, if that was not planned meanwhile."""
BUBBLE_KEPT: Final = 0.9
"""Part of the estimate that a new measurement leaves."""
SURPRISE_MAX: Final = 4.0
"""A gap counts as at most so many times the estimate: a stall is not the usual time."""


class Bubble:
    """What it costs not to plan a step while the one before it runs: measured from results and plans."""

    def __init__(self) -> None:
        self._alone_us = PRIOR_BUBBLE_US
        self._pipelined_us = 0.0
        self._planned: dict[int, tuple[float, bool]] = {}
        self._answered_at = 0.0

    @property
    def us(self) -> float:
        """Microseconds by which a step begins later if it is planned only behind the result of the one before."""
        return max(0.0, self._alone_us - self._pipelined_us)

    def planned(self, step: int, now: float) -> bool:
        """Note that a step was planned; return whether no other one is in flight."""
        alone = not self._planned
        self._planned[step] = now, alone
        return alone

    def settle(self, steps: Sequence[int]) -> None:
        """Note the steps in flight behind some that it was not told of: when they were planned is not known."""
        self._planned = dict.fromkeys(steps, (inf, False))

    def answered(self, step: int, now: float, elapsed_us: float) -> float:
        """Note that the result of the oldest step has come, which computed for `elapsed_us`.

        Returns:
            the step's whole time in µs, if no other step was in flight when it was planned; else 0.
        """
        planned_at, alone = self._planned.pop(step, (now, False))
        before, self._answered_at = self._answered_at, now
        if planned_at > now:
            return 0.0
        whole_us = 1e6 * (now - (planned_at if alone else max(before, planned_at)))
        known = self._alone_us if alone else self._pipelined_us
        gap = min(max(0.0, whole_us - elapsed_us), SURPRISE_MAX * max(known, PRIOR_BUBBLE_US / 10))
        gap = known + (1.0 - BUBBLE_KEPT) * (gap - known)
        if not alone:
            self._pipelined_us = gap
            return 0.0
        self._alone_us = gap
        return whole_us


class Worth:
    """What waiting for results and drafting has brought: the time that the tokens would have taken without drafts,
    divided by the time that they took. It shows what no estimate knows, and raises the margin."""

    def __init__(self) -> None:
        self._saved, self._spent = WORTH_PRIOR

    @property
    def margin(self) -> float:
        """How much faster drafts must be by the estimates."""
        return MARGIN * max(1.0, WORTH_GOAL * self._spent / self._saved)

    def step(self, tokens: int, rows: int, plain_us: float, whole_us: float) -> None:
        """Take in a step that was waited for.

        Args:
            tokens: number of tokens that it brought.
            plain_us: time of the step without drafts.
            whole_us: its time, with the bubble before it.
        """
        added = (1.0 - WORTH_KEPT) / max(plain_us, 1e-9)
        self._saved = self._saved * WORTH_KEPT + added * plain_us * tokens / rows
        self._spent = self._spent * WORTH_KEPT + added * min(whole_us, SURPRISE_MAX * plain_us * tokens / rows)

    def rest(self, steps: int = 1) -> None:
        """Take in steps that were not waited for."""
        if self._saved < WORTH_GOAL * self._spent:
            left = (1.0 - WORTH_RECOVERY) ** steps
            self._saved = WORTH_GOAL * self._spent * (1.0 - left) + self._saved * left


class Lengths:
    """Chooses how many tokens each row drafts."""

    def __init__(self, costs: StepCosts) -> None:
        self.bubble = Bubble()
        self.worth = Worth()
        self._costs = costs

    def least_chance(self, rows: int, prefill_tokens: int) -> float:
        """Return a chance below which a drafted token gains nothing in a step of so many rows."""
        step_us = self._costs.step_us(rows, prefill_tokens)
        return 0.5 * rows * self._row_us(rows, prefill_tokens) / max(step_us + self.bubble.us, 1e-9)

    def plain_us(self, rows: int, prefill_tokens: int) -> float:
        """Return the time of a step without drafts, in µs."""
        return self._costs.step_us(rows, prefill_tokens)

    def whole_us(self, rows: int, drafted: int, plain_us: float) -> float:
        """Return the time in µs of a step that is waited for, with drafts, which takes `plain_us` without."""
        return plain_us + self.bubble.us + drafted * self._row_us(rows, 0)

    def share(self, rows: int) -> float:
        """Return which part of steps' time looking for drafts may take, at most `SHARE`; 0: even drafts that
        are surely right, for all rows, would bring next to nothing, as in a busy batch of a small model, whose
        steps take as long as they have rows."""
        plain_us, row_us = self.plain_us(rows, 0), rows * self._row_us(rows, 0)
        waited_us = plain_us + self.bubble.us
        best = max(tokens * plain_us / (waited_us + length * row_us) for length, tokens in _BEST)
        return min(max(0.0, LOOKED_PART * (best - WORTH_GOAL)), SHARE)

    def may_pay(self, rows: int, prefill_tokens: int, gains: Sequence[float]) -> bool:
        """Return whether `choose` could find drafts: a bound, in Python because most calls end here.

        D drafted tokens of n sequences bring them n · log (1 + D / n) at most, and not more than their gains; the
        best D is where that grows no faster than what the tokens cost, if it is n or more.

        Args:
            gains: for each sequence with a draft, the logarithm of by how much it becomes faster at most: falling.
        """
        plain_us, row_us = self.plain_us(rows, prefill_tokens), self._row_us(rows, prefill_tokens)
        waited_us, margin, most = plain_us + self.bubble.us, log(self.worth.margin), 0.0
        for count, gain in enumerate(gains, 1):
            most += gain - margin
            weight = rows + BYSTANDER * (rows - count)
            if most < weight * log((waited_us + count * row_us) / plain_us):
                continue
            if weight <= count:
                return True
            best = max(count, count * (waited_us / row_us - weight) / (weight - count))
            if count * (log1p(best / count) - margin) >= weight * log((waited_us + best * row_us) / plain_us):
                return True
        return False

    def choose(self, rows: int, prefill_tokens: int, chances: Sequence[Sequence[float]]) -> list[int] | None:
        """Return how many tokens to draft of each chain; None: none at all.

        Args:
            rows: sequences that decode in the step, also those without a chain.
            chances: for each chain, how likely each token and all before it are right: falling.
        """
        gains = sorted((log1p(sum(chain)) for chain in chances if chain), reverse=True)
        if not self.may_pay(rows, prefill_tokens, gains):
            return None
        plain_us, row_us = self.plain_us(rows, prefill_tokens), self._row_us(rows, prefill_tokens)
        bubble_us, margin = self.bubble.us, log(self.worth.margin)
        if len(chances) == rows == 1:
            return _one_length(chances[0], (plain_us + bubble_us) / plain_us, row_us / plain_us, margin)
        drafting = [row for row, chain in enumerate(chances) if chain]
        width = max(map(len, chances))
        table = np.array([[*chances[row], *[0.0] * (width - len(chances[row]))] for row in drafting])
        gain = np.log1p(table.cumsum(axis=1))
        gain[:, 1:] -= gain[:, :-1].copy()
        order = np.argsort(-gain, axis=None, kind="stable")[: sum(map(len, chances))]  # what is filled up gains 0
        drafted = np.arange(1, len(order) + 1)
        times = plain_us + bubble_us + drafted * row_us
        without = rows - np.cumsum(order % width == 0)
        values = gain.ravel()[order].cumsum() - (rows + BYSTANDER * without) * np.log(times / plain_us)
        best = int(values.argmax())
        lengths = np.bincount(order[: best + 1] // width, minlength=len(drafting))
        if values[best] < np.count_nonzero(lengths) * margin:
            return None
        found = [0] * len(chances)
        for row, length in zip(drafting, lengths.tolist(), strict=True):
            found[row] = length
        return found

    def _row_us(self, rows: int, prefill_tokens: int) -> float:
        plain_us = self._costs.step_us(rows, prefill_tokens)
        return max(self._costs.step_us(rows + 1, prefill_tokens) - plain_us, ROW_LEAST * plain_us)


_BEST: Final = [(length, (1.0 - CHANCE_MAX ** (length + 1)) / (1.0 - CHANCE_MAX)) for length in BEST_LENGTHS]
"""Lengths of drafts, and how many tokens they bring at best."""


def _one_length(chain: Sequence[float], longer: float, row: float, margin: float) -> list[int] | None:
    """Return `Lengths.choose` for a sequence that decodes alone: the same in less time.

    Args:
        longer: time of a step that is waited for, in steps.
        row: time of a drafted token, in steps.
    """
    best, most, gained = 0, margin, 1.0
    for length, chance in enumerate(chain, 1):
        gained += chance
        longer += row
        if gained > longer and (value := log(gained / longer)) > most:
            best, most = length, value
    return [best] if best else None
