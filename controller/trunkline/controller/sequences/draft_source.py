"""What the scheduler asks of a source of drafts: guesses of the tokens that rows will draw next.

A source changes no text: the workers draw each token as they would have without drafts, and a guess only saves the
step that would have computed it. So a source may guess from anything, and be wrong.

      add ─► extend, extend, … ─► remove        one sequence, from its first token to its end or preemption
                  propose ─► planned ─► answered     one step
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trunkline.controller.sequences.sequence import Sequence
from trunkline.kvstore.chunks import Int32Array

Slots = NDArray[np.intp]
"""Slots of sequences in the arrays of `DecodeRows` (`Sequence.slot`), `[rows]`."""


class DraftSource(Protocol):
    """Guesses the next tokens of decoding sequences. Beams are not told of, and have no drafts."""

    def add(self, sequence: Sequence) -> None:
        """Note a sequence that begins to decode, or goes on after a preemption. `sequence.tokens` are its tokens
        so far."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Note that a sequence has ended or was preempted; its slot may be another one's next."""
        ...

    def extend(self, slots: Slots, tokens: Int32Array) -> None:
        """Note the next tokens of some sequences, each named once: `[rows]`, or `[positions, rows]` behind a step
        with drafts, whose tokens come in several calls if the sequences come differently far."""
        ...

    def foretold(self, slot: int, tokens: Int32Array) -> None:
        """Note what a sequence's grammar demands behind its tokens so far, as it is usually spelled."""
        ...

    def study(self, *, is_idle: bool) -> bool:
        """Look at a part of the texts that wait for it. Nobody waits meanwhile; return whether to call it again at
        once.

        Args:
            is_idle: whether no step is in flight, and no request there.
        """
        ...

    @property
    def calm_steps(self) -> int:
        """For how many steps more there will be no guesses: their tokens may come together, in `settle`. Then it
        `waits`, or there are none for some steps more. 0: steps have to be `planned` and `answered`."""
        ...

    def settle(self, slots: Slots, tokens: Int32Array, steps: list[int]) -> None:
        """Note the tokens of some steps, which were neither `planned` nor `answered` here.

        Args:
            tokens: `[steps, rows]`.
            steps: numbers of the steps that are in flight now.
        """
        ...

    def waits(self, slots: Slots) -> bool:
        """Return whether the next step should be planned only when the step in flight, which has no drafts, is
        answered: drafts are planned only behind tokens that are known. Asked again before the next plan, it must
        say the same, unless tokens came meanwhile.

        Args:
            slots: the sequences that have a token to compute behind that step.
        """
        ...

    def propose(self, slots: Slots, room: NDArray[np.int64], prefill_tokens: int) -> list[Int32Array] | None:
        """Return guesses for the next step, by row; None: for no row.

        Args:
            room: `[rows]`, the most guesses that a row may have; what is beyond is cut off.
            prefill_tokens: prompt tokens that the step computes, too.
        """
        ...

    def is_prediction(self, slot: int) -> bool:
        """Return whether what was proposed last for a sequence, which has drawn nothing since, is what its client
        expects (`Submit.prediction`)."""
        ...

    def planned(self, step: int, now: float, drafted: int) -> None:
        """Note a step that was planned, with `drafted` guesses."""
        ...

    def answered(self, step: int, now: float, elapsed_us: int) -> None:
        """Note the answer to a step, which took the workers `elapsed_us`; its tokens follow."""
        ...
