"""What looking for drafts may cost: a small part of the steps' time, and what drafts have saved. Pure.

Looking takes the controller's CPU, which the workers of a machine with few cores share. Texts that cannot be
foreseen bring nothing for it. So looking lives on a credit:

    credit  +=  a share of the time of each step
            +=  time that a step with drafts has saved; less than nothing if it has lost some
            -=  price of what was looked at

            broke │ modest                       │ rich
    ──────────────┼──────────────────────────────┼──────────────────────────────
      tokens wait 0 long matches, now and then   every match, at each token

It is a time, and much or little of it are so many steps: what short steps have saved does not pay for a busy
batch, whose steps are long.
With an empty credit tokens only wait to be looked at, for some steps, which may be calm. And where drafts were
considered and none paid, as in a busy batch, the next steps are not looked at (`rest`), also with much credit. So
in the long run drafts take no more than `SHARE` of the time beyond what they bring. Prices are constants of an
ordinary machine, because this part knows no clock: the same tokens and step times give the same drafts.
"""

from __future__ import annotations

from math import ceil
from typing import Final

SHARE: Final = 0.012
"""Part of the steps' time that looking may take without any success."""
FRUITLESS: Final = SHARE, 0.03
"""Part of the steps' time that looks may take which bring nothing, and that with much credit."""
MOST: Final = 8.0
"""Largest credit in steps: what may be lost when a text ceases to be foreseen."""
FIRST: Final = 4.0
"""Credit in the beginning, in steps."""
RICH: Final = 2.0, 4.0
"""Credit in steps at which looking ceases to be rich, and that at which it becomes so again."""
BROKE: Final = 0.0, 0.25
"""Credit in steps at which nothing is looked at any more, and that at which looking begins again: between them
steps are calm, which saves more than single looks are worth."""
STEPS_MAX: Final = 1000
"""Largest number of steps for which an empty credit says that nothing may be looked at."""
PRIOR_US: Final = 2000.0
"""Assumed time of a step before one is known."""


class Allowance:
    """The credit of one scheduler's drafter."""

    def __init__(self) -> None:
        self._step_us = 0.0
        """Time of the latest step; 0: there was none."""
        self._share = SHARE
        self._credit_us = FIRST * PRIOR_US
        self.is_rich = True
        """Whether every match may be looked for."""
        self.is_broke = False
        """Whether nothing may be looked at."""

    @property
    def broke_steps(self) -> int:
        """Number of steps until something may be looked at again."""
        if not self.is_broke:
            return 0
        left = BROKE[1] - self._credit_us / (self._step_us or PRIOR_US)
        return ceil(min(left / max(self._share, 1e-9), STEPS_MAX))

    def rest(self, price_us: float) -> int:
        """Return behind how many steps to look again, if looking had this price and brought nothing."""
        return 1 + int(price_us / (self._step_us or PRIOR_US) / FRUITLESS[self.is_rich])

    def step(self, plain_us: float, share: float = SHARE, count: int = 1) -> None:
        """Take in steps which take so long each without drafts.

        Args:
            share: part of their time that looking may take, at most `SHARE`.
            count: number of steps.
        """
        if not self._step_us:
            self._credit_us *= plain_us / PRIOR_US
        self._step_us, self._share = plain_us, share
        self._add(count * share * plain_us)

    def saved(self, saved_us: float) -> None:
        """Take in what a step with drafts has saved; what it has lost is negative."""
        self._add(saved_us)

    def spend(self, price_us: float) -> None:
        """Take in that something was looked at."""
        self._add(-price_us)

    def _add(self, us: float) -> None:
        step_us = self._step_us or PRIOR_US
        most = MOST * step_us
        self._credit_us = min(max(self._credit_us + us, -most), most)
        steps = self._credit_us / step_us
        self.is_rich = steps > RICH[not self.is_rich]
        self.is_broke = steps <= BROKE[self.is_broke]
