"""The time without workers: how a hanging group is noticed, and how long requests wait for new workers. Pure."""

from __future__ import annotations

from math import inf
from typing import Final

from trunkline.controller.engine.engine import Engine
from trunkline.controller.service.membership import StepClock

PREDICTED_STEPS: Final = 20.0
"""A step is taken to hang when it lasts this many times its predicted time, and longer than `step_timeout_s`."""


class WorkerLoss:
    """The state of an outage: since when the group's workers are lost, and why."""

    def __init__(self, step_timeout_s: float, resume_seconds_max: float) -> None:
        self.reason = ""
        """Why there are no workers; "" while there are some, or if there have been none yet."""
        self._since = inf
        self._step_timeout_s = step_timeout_s
        self._resume_seconds_max = resume_seconds_max
        self._clock = StepClock()

    def began(self, reason: str, now: float) -> None:
        """Note that the workers are lost. If new workers are lost before they were ready, the outage goes on."""
        self.reason = reason
        self._since = min(self._since, now)

    def ended(self) -> None:
        """Note that new workers are ready: the outage is over."""
        self.reason, self._since = "", inf

    def hangs(self, engine: Engine, now: float) -> str:
        """Return why the oldest unanswered step is taken to hang; "" if it is not."""
        waited_s = self._clock.waited_s(engine.oldest_step, now)
        limit_s = max(self._step_timeout_s, PREDICTED_STEPS * engine.predicted_step_s)
        if waited_s < limit_s:
            return ""
        return f"the workers have not answered step {engine.oldest_step} for {waited_s:.0f} s"

    def is_too_long(self, now: float) -> bool:
        """Return whether the outage has lasted so long that requests wait for its end no longer."""
        return now >= self._since + self._resume_seconds_max
