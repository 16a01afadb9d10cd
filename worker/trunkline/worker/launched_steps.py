"""Steps that run on the device while the host goes on, and results that were not taken yet.

A step whose tokens stay on the device need not be waited for: the next plan may be taken, and its step launched,
before the tokens of this one are read. The sequences then have `PENDING` in their places; whatever needs the
tokens themselves has all steps read first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from trunkline.controller.reports import StepResult
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.batch.sequences import PENDING, BatchSequence
from trunkline.worker.step_graphs import ReplayedStep, StepGraphs

LAUNCHED_MAX: Final = 2
"""Number of steps that run at once on the device, one behind the other: a controller plans no further ahead."""
_POLL_S: Final = 20e-6
"""Time between two looks at a step that runs."""


@dataclass(frozen=True)
class LaunchedStep:
    """A step that runs."""

    replayed: ReplayedStep
    rows: list[tuple[BatchSequence, int]]
    """Each row's sequence, and the index of its new token there."""
    result: StepResult | None
    """The result but for what is known at the end; None on ranks that report nothing."""
    started_ns: int

    @classmethod
    def of(
        cls, replayed: ReplayedStep, rows: list[BatchSequence], result: StepResult | None, started_ns: int
    ) -> LaunchedStep:
        """Return a step that was launched, and append a token to each row."""
        places = [(row, row.known) for row in rows]
        for row in rows:
            row.append(PENDING)
        return cls(replayed, places, result, started_ns)


class LaunchedSteps:
    """The launched steps and the results, in the order of their plans."""

    def __init__(self, take_moved: Callable[[], tuple[int, int]]) -> None:
        """
        Args:
            take_moved: Returns the microseconds and blocks that copies have taken since the last call.
        """
        self.graphs: StepGraphs | None = None
        """What launches steps without waiting; None: all steps run op by op."""
        self.step = 0
        """Number of the last step that was launched."""
        self._take_moved = take_moved
        self._launched: deque[LaunchedStep] = deque()
        self._results: deque[StepResult | None] = deque()
        self._read_ns = 0
        """When the last step was read."""

    @property
    def count(self) -> int:
        """Number of steps whose results have not been taken."""
        return len(self._launched) + len(self._results)

    @property
    def is_ready(self) -> bool:
        """Whether `take` need not wait, or should not be waited with: as many steps run as may."""
        if self._results or len(self._launched) >= LAUNCHED_MAX:
            return True
        return bool(self._launched) and self._launched[0].replayed.is_done

    def add(self, step: LaunchedStep) -> None:
        """Add a step that runs."""
        self._launched.append(step)

    def add_result(self, result: StepResult | None) -> None:
        """Add the result of a step that has ended; those before it must have been read."""
        assert not self._launched
        self._results.append(result)

    def took_us(self, started_ns: int) -> int:
        """Return how long a step took that ends now. It began when it was launched or the one before ended."""
        now = time.perf_counter_ns()
        started_ns, self._read_ns = max(started_ns, self._read_ns), now
        return (now - started_ns) // 1000

    def make_room(self) -> None:
        """Read steps until another one may be launched."""
        while len(self._launched) >= LAUNCHED_MAX:
            self._read()

    def read_all(self) -> None:
        """Wait for all steps, so that all tokens are known."""
        while self._launched:
            self._read()

    def take(self) -> StepResult | None:
        """Return the oldest result; wait for it."""
        if not self._results:
            self._read()
        return self._results.popleft()

    def report_ended(self, report: Callable[[StepResult], None]) -> None:
        """Report the steps that have ended, where this rank reports any. The last one launched may go on."""
        while self.is_ready:
            result = self.take()
            if result is not None:
                report(result)

    def patience_ms(self, longest_ms: int) -> int:
        """Return how long to sleep until a message comes. While steps run it is 0, and a moment passes here: the
        next plan may come before they end, or they may end before it comes."""
        if not self._launched:
            return longest_ms
        if not self.is_ready:
            time.sleep(_POLL_S)
        return 0

    def _read(self) -> None:
        step = self._launched.popleft()
        step.replayed.wait()
        tokens = step.replayed.tokens.numpy()
        for (row, index), token in zip(step.rows, tokens.tolist(), strict=True):
            row.resolve(index, token)
        result, took_us = step.result, self.took_us(step.started_ns)
        if result is not None:
            moved_us, moved_blocks = self._take_moved()
            result = msgspec.structs.replace(
                result,
                tokens=pack_int32(tokens),
                elapsed_us=took_us,
                moved_us=moved_us,
                moved_blocks=moved_blocks,
            )
        self._results.append(result)
