"""From the loss of a group's workers to the coming of others: how it is noticed, how long it is borne. Pure."""

from __future__ import annotations

from math import inf
from typing import Final

from trunkline.controller.engine.engine import Engine
from trunkline.controller.service.membership import StepClock

PREDICTED_STEPS: Final = 20.0
"""A step that takes so many times as long as predicted hangs, if it also takes longer than `step_timeout_s`."""


class WorkerLoss:
    """What the service remembers of it."""

    def __init__(self, step_timeout_s: float, resume_seconds_max: float) -> None:
        self.reason = ""
        """Why there are no workers; "" before they have been there."""
        self._since = inf
        self._step_timeout_s = step_timeout_s
        self._resume_seconds_max = resume_seconds_max
        self._clock = StepClock()

    def began(self, reason: str, now: float) -> None:
        """The workers are lost. If that happens to others before they were ready, it is one outage."""
        self.reason = reason
        self._since = min(self._since, now)

    def ended(self) -> None:
        """Others are ready."""
        self.reason, self._since = "", inf

    def hangs(self, engine: Engine, now: float) -> str:
        """Why a step is taken for one that will never be answered; "" if it is not."""
        waited_s = self._clock.waited_s(engine.oldest_step, now)
        limit_s = max(self._step_timeout_s, PREDICTED_STEPS * engine.predicted_step_s)
        if waited_s < limit_s:
            return ""
        return f"the workers have not answered step {engine.oldest_step} for {waited_s:.0f} s"

    def is_too_long(self, now: float) -> bool:
        """Whether requests are not to wait for its end (any longer)."""
        return now >= self._since + self._resume_seconds_max
