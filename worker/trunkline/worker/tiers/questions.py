"""What a puller asks one rank of a peer next, and for which answers it waits; it has no sockets, no clock.

Chunks wait in their order. A few questions are open at a time, so that the next answer is under way while one is
read, but never more bytes than the puller has asked for. A rank that answers nothing for too long has failed: all
that it was asked for is given up, and until a while has passed it is asked for nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, NamedTuple, TypeVar

from trunkline.runtime.looks import Looks
from trunkline.worker.tiers.exchange import CHUNKS_MAX, CREDIT_BYTES, QUESTIONS_OPEN

SILENT_S: Final = 1.5
"""Seconds without any answer after which a rank has failed, besides the time for the bytes that were asked for."""
QUESTION_S: Final = 6.0
"""Seconds after which a question must be answered whole, besides the time for the bytes."""
LOOKS_WITHIN_S: Final = 0.5
"""`Looks.within_s`, of looks at the answers."""
SLOWEST_BYTES_PER_S: Final = 8e6
AWAY_S: Final = 2.0
"""Seconds for which a rank that has failed is asked for nothing."""

PartT = TypeVar("PartT")


class Question(NamedTuple, Generic[PartT]):
    """A question that is to be asked."""

    id: int
    parts: list[PartT]


class Questions(Generic[PartT]):
    """The questions to one rank of a peer. Times are in seconds of any clock."""

    def __init__(self, part_bytes: int) -> None:
        """
        Args:
            part_bytes: Bytes of payload of one part.
        """
        self.needs_payload = True
        """Whether answers bring the bytes with them, so that these are limited."""
        self._part_bytes = part_bytes
        self._waiting: deque[PartT] = deque()
        self._open: dict[int, dict[int, PartT]] = {}
        """Parts without an answer, by question and index."""
        self._last_id = 0
        self._asked_at: dict[int, float] = {}
        self._heard = 0.0
        self._looks = Looks(LOOKS_WITHIN_S)
        self._away_until = float("-inf")

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be asked and no answer is missing."""
        return not self._waiting and not self._open

    @property
    def asked(self) -> int:
        """Number of parts that were asked for and have not come."""
        return sum(map(len, self._open.values()))

    def is_away(self, now: float) -> bool:
        """Return whether the rank has failed a short time ago."""
        return now < self._away_until

    def add(self, part: PartT, now: float) -> None:
        """Ask for a part soon."""
        if self.is_idle:
            self._heard = now
            self._looks.begin(now)
        self._waiting.append(part)

    def again(self, part: PartT) -> None:
        """Ask for a part before all others."""
        self._waiting.appendleft(part)

    def next(self, now: float) -> Question[PartT] | None:
        """Return the next question, if one may be asked now; then it counts as asked."""
        if not self._waiting or len(self._open) >= QUESTIONS_OPEN:
            return None
        most = CHUNKS_MAX
        if self.needs_payload:
            most = min(most, max(1, CREDIT_BYTES // self._part_bytes))
        parts = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        self._last_id += 1
        self._asked_at[self._last_id] = now
        self._open[self._last_id] = dict(enumerate(parts))
        return Question(self._last_id, parts)

    def take(self, question: int, index: int, now: float) -> PartT | None:
        """Return the part that an answer is about; None: nothing like it is asked for (any more)."""
        parts = self._open.get(question, {})
        part = parts.pop(index, None)
        if part is not None:
            self._heard, self._away_until = now, float("-inf")
            if not parts:
                del self._open[question], self._asked_at[question]
        return part

    def look(self, now: float) -> None:
        """Note that all answers were taken that had come by this time."""
        if late := self._looks.late(now):
            self._heard = min(now, self._heard + late)
            self._asked_at = {question: min(now, at + late) for question, at in self._asked_at.items()}

    def deadline(self) -> float:
        """Return when the rank will have failed if it says nothing; infinity: nothing is wanted of it."""
        if self.is_idle:
            return float("inf")
        size = self.asked * self._part_bytes if self.needs_payload else 0
        oldest = min(self._asked_at.values(), default=float("inf"))
        return min(self._heard + SILENT_S, oldest + QUESTION_S) + size / SLOWEST_BYTES_PER_S

    def fail(self, now: float) -> list[PartT]:
        """Give up everything, because the rank has failed; return what was wanted."""
        given_up = [part for parts in self._open.values() for part in parts.values()] + list(self._waiting)
        self._open.clear()
        self._asked_at.clear()
        self._waiting.clear()
        self._away_until = now + AWAY_S
        return given_up
