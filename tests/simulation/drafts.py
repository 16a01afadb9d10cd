"""Sources of drafts for the simulation: right, wrong and half right ones, drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
from numpy.typing import NDArray
from simulation.driver import Simulation
from simulation.model import VOCABULARY
from simulation.streams import expected_stream

from trunkline.controller.drafts.drafter import Drafter
from trunkline.controller.sequences.draft_source import DraftSource, Slots
from trunkline.controller.sequences.sequence import Sequence
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.chunks import Int32Array


def draft_from(simulation: Simulation, make: Callable[[Simulation], DraftSource]) -> None:
    """Let rows have drafts from now on, also with other workers."""
    simulation.make_drafts = make
    simulation.begin_drafts()


def found_drafts(simulation: Simulation) -> Drafter:
    """Return the product's own source, for workers on which drafts cost next to nothing."""
    costs = StepCosts(0.0)
    for rows in [1, 2, 4, 8] * 50:
        costs.observe(rows=rows, prefill_tokens=0, elapsed_us=1e7 + rows)
    return Drafter(simulation.engine.config, costs)


class RandomDrafts(DraftSource):
    """Knows what every stream will be, and guesses that, a part of it, or anything else.

    It checks what a source is promised: sequences come and go, and their tokens come one by one, as they count.
    """

    def __init__(self, simulation: Simulation, seed: int, *, right: float = 0.6, longest: int = 12) -> None:
        """
        Args:
            right: probability that a guess is right, token by token.
            longest: more guesses are made than there is room for, too.
        """
        self._simulation = simulation
        self._random = Random(seed)
        self._right = right
        self._longest = longest
        self.here: dict[int, Sequence] = {}
        """By slot."""
        self.lengths: dict[int, int] = {}
        """Output tokens by slot."""
        self._waits = False
        self.steps = 0
        """Steps with drafts."""

    def add(self, sequence: Sequence) -> None:
        assert sequence.slot >= 0
        assert sequence.slot not in self.here, "a slot has two sequences"
        assert sequence.beam_position is None, "a beam has no drafts"
        self.here[sequence.slot] = sequence
        self.lengths[sequence.slot] = sequence.tokens.count - sequence.prompt_len

    def remove(self, sequence: Sequence) -> None:
        assert self.here.pop(sequence.slot) is sequence
        del self.lengths[sequence.slot]

    def extend(self, slots: Slots, tokens: Int32Array) -> None:
        columns = np.atleast_2d(tokens).T.tolist()
        assert len(set(slots.tolist())) == len(slots) == len(columns)
        for slot, drawn in zip(slots.tolist(), columns, strict=True):
            first, expected = self.lengths[slot], self._expected(self.here[slot])
            assert expected[first : first + len(drawn)] == drawn
            self.lengths[slot] += len(drawn)

    def foretold(self, slot: int, tokens: Int32Array) -> None:
        assert slot in self.here

    def study(self, *, is_idle: bool) -> bool:
        return False

    @property
    def calm_steps(self) -> int:
        return 0

    def settle(self, slots: Slots, tokens: Int32Array, steps: list[int]) -> None:
        raise AssertionError("it is never calm")

    def waits(self, slots: Slots) -> bool:
        return self._waits

    def propose(self, slots: Slots, room: NDArray[np.int64], prefill_tokens: int) -> list[Int32Array] | None:
        assert len(slots) == len(room)
        assert room.min() >= 0
        return [self._guess(slot) for slot in slots.tolist()]

    def is_prediction(self, slot: int) -> bool:
        return slot % 2 == 0

    def planned(self, step: int, now: float, drafted: int) -> None:
        self.steps += drafted > 0
        self._waits = self._random.random() < 0.7

    def answered(self, step: int, now: float, elapsed_us: int) -> None:
        assert elapsed_us > 0

    def _expected(self, sequence: Sequence) -> list[int]:
        stream = self._simulation.streams[sequence.request_id]
        return expected_stream(stream, sequence.sample, stream.longest(self._simulation.engine.config))

    def _guess(self, slot: int) -> Int32Array:
        if slot not in self.here:
            return np.zeros(0, np.int32)  # a beam's
        count = self._random.choice([0, 1, 2, self._longest])
        coming = self._expected(self.here[slot])[self.lengths[slot] :][:count]
        guesses = [
            token if self._random.random() < self._right else self._random.randrange(VOCABULARY)
            for token in coming
        ]
        guesses += [self._random.randrange(VOCABULARY) for _ in range(count - len(coming))]
        return np.array(guesses, np.int32)


class KnownDrafts(RandomDrafts):
    """Guesses what requests said before, and other things; every token that comes must be what was said."""

    def __init__(self, simulation: Simulation, outputs: dict[int, list[list[int]]]) -> None:
        """
        Args:
            outputs: of each request's samples, by the request's number.
        """
        super().__init__(simulation, 0, right=0.8)
        self._outputs = outputs

    def _expected(self, sequence: Sequence) -> list[int]:
        return self._outputs[sequence.request_id][sequence.sample]
