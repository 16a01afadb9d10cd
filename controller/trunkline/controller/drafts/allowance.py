"""What looking for drafts may cost: a small part of the steps' time, and what drafts have saved. Pure.

Looking takes the controller's CPU, which the workers of a machine with few cores share. Texts that cannot be
foreseen bring nothing for it. So looking lives on a credit:

    credit  +=  SHARE · time of each step
            +=  time that a step with drafts has saved; less than nothing if it has lost some
            -=  price of what was looked at

    level        0 ── broke ──┤        ├── modest ──┤        ├── rich ── most
                 tokens wait        long matches, now and then     every match, at each token

With an empty credit tokens only wait to be looked at. So in the long run drafts take no more than `SHARE` of the
time beyond what they bring. Prices are constants of an ordinary machine, because this part knows no clock:
the same tokens and step times give the same drafts.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.015
"""Part of the steps' time that looking may take without any success."""
MOST_STEPS: Final = 8.0
"""Largest credit, as a number of steps' times: what may be lost when a text ceases to be foreseen."""
FIRST_US: Final = 5000.0
"""Credit in the beginning."""
RICH: Final = 0.25, 0.5
"""Part of the largest credit at which looking ceases to be rich, and that at which it becomes so again."""


class Allowance:
    """The credit of one scheduler's drafter, in µs."""

    def __init__(self) -> None:
        self._credit_us = self._most_us = FIRST_US
        self.is_rich = True
        """Whether every match may be looked for."""

    @property
    def is_broke(self) -> bool:
        """Whether nothing may be looked at."""
        return self._credit_us <= 0.0

    def step(self, plain_us: float) -> None:
        """Take in a step, which takes so long without drafts."""
        self._most_us += SHARE * (MOST_STEPS * plain_us - self._most_us)
        self._add(SHARE * plain_us)

    def saved(self, saved_us: float) -> None:
        """Take in what a step with drafts has saved; what it has lost is negative."""
        self._add(saved_us)

    def spend(self, price_us: float) -> None:
        """Take in that something was looked at."""
        self._add(-price_us)

    def _add(self, us: float) -> None:
        most = self._most_us
        self._credit_us = credit = min(max(self._credit_us + us, -most), most)
        self.is_rich = credit > RICH[not self.is_rich] * most
