"""What looking for drafts may cost: a small part of the steps' time, and what drafts have saved. Pure.

Looking takes the controller's CPU, which the workers of a machine with few cores share. Texts that cannot be
foreseen bring nothing for it. So looking lives on a credit:

    credit  +=  SHARE of the time of each step
            +=  time that a step with drafts has saved; less than nothing if it has lost some
            -=  price of what was looked at

            broke │ modest                       │ rich
    ──────────────┼──────────────────────────────┼──────────────────────────────
      tokens wait 0 long matches, now and then   every match, at each token

It counts in steps, so that it means the same in a short step and in a long one.
With an empty credit tokens only wait to be looked at, for some steps, which may be calm. And where drafts were
considered and none paid, as in a busy batch, the next steps are not looked at (`rest`), also with much credit. So
in the long run drafts take no more than `SHARE` of the time beyond what they bring. Prices are constants of an
ordinary machine, because this part knows no clock: the same tokens and step times give the same drafts.
"""

from __future__ import annotations

from math import ceil
from typing import Final

SHARE: Final = 0.015
"""Part of the steps' time that looking may take without any success."""
FRUITLESS: Final = SHARE, 0.03
"""Part of the steps' time that looks may take which bring nothing, and that with much credit."""
MOST: Final = 8.0
"""Largest credit: what may be lost when a text ceases to be foreseen."""
FIRST: Final = 4.0
"""Credit in the beginning."""
RICH: Final = 2.0, 4.0
"""Credit at which looking ceases to be rich, and that at which it becomes so again."""
BROKE: Final = 0.0, 0.25
"""Credit at which nothing is looked at any more, and that at which looking begins again: between them steps are
calm, which saves more than single looks are worth."""
PRIOR_US: Final = 2000.0
"""Assumed time of a step before one is known."""


class Allowance:
    """The credit of one scheduler's drafter, as a number of steps."""

    def __init__(self) -> None:
        self._credit = FIRST
        self._step_us = PRIOR_US
        self.is_rich = True
        """Whether every match may be looked for."""
        self.is_broke = False
        """Whether nothing may be looked at."""

    @property
    def broke_steps(self) -> int:
        """Number of steps until something may be looked at again."""
        return ceil((BROKE[1] - self._credit) / SHARE) if self.is_broke else 0

    def rest(self, price_us: float) -> int:
        """Return behind how many steps to look again, if looking had this price and brought nothing."""
        return 1 + int(price_us / self._step_us / FRUITLESS[self.is_rich])

    def step(self, plain_us: float) -> None:
        """Take in a step, which takes so long without drafts."""
        self._step_us = plain_us
        self._add(SHARE)

    def saved(self, saved_us: float) -> None:
        """Take in what a step with drafts has saved; what it has lost is negative."""
        self._add(saved_us / self._step_us)

    def spend(self, price_us: float) -> None:
        """Take in that something was looked at."""
        self._add(-price_us / self._step_us)

    def _add(self, steps: float) -> None:
        self._credit = credit = min(max(self._credit + steps, -MOST), MOST)
        self.is_rich = credit > RICH[not self.is_rich]
        self.is_broke = credit <= BROKE[self.is_broke]
