"""What the demo model reads as edited prompts: histories with cleared parts in their middle, and what goes on.

Agents clear the results of old tool calls and go on with what is left. So pieces of a history are kept and cleared
by turns; the first piece (instructions) and the last one are kept.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from masking_texts import ModuleTexts, Target

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples/demo_model"))

from chat import ASSISTANT_ID, BOS_ID, END_ID, USER_ID, plain_ids
from recall import ACKNOWLEDGEMENTS, COLOURS, FACT_FORMS, NUMBERS, WORD_VALUES, Memo, draw_memos

EDITS: Final = 6
ROOT: Final = 16
CLEARED: Final = 160
"""Tokens of a cleared part; about, in conversations."""
KEPT: Final = 96
"""Tokens of held-out text behind each cleared part."""
TURN: Final = 64
"""About; tokens of a turn that tells a fact behind a cleared result."""
TARGET: Final = 192


@dataclass(frozen=True)
class EditTask:
    """A history with cleared parts, and texts that would go on behind it: each is asked for alone."""

    pieces: list[list[int]]
    """Kept, cleared, kept, …, kept."""
    targets: list[Target]

    @property
    def kept(self) -> list[list[int]]:
        return self.pieces[::2]


class EditTexts(ModuleTexts):
    """Tasks, by seed."""

    def edited_stretches(self, count: int) -> list[EditTask]:
        """Held-out text, of which parts are cleared, and how it goes on."""
        tasks = []
        for stretch in self.streams(count, ROOT + EDITS * (CLEARED + KEPT) + TARGET):
            pieces, at = [[BOS_ID, *stretch[1:ROOT]]], ROOT
            for length in (CLEARED, KEPT) * EDITS:
                pieces.append(stretch[at : at + length])
                at += length
            tasks.append(EditTask(pieces, [Target(stretch[at:], 1, -1)]))
        return tasks

    def conversations(self, count: int, *, stale: bool, about_cleared: bool = False) -> list[EditTask]:
        """Results of tools (long prose), each before a turn that begins with a fact; the results are cleared.

        Args:
            stale: each result ends with an older value of the fact that the turn behind it tells.
            about_cleared: the questions ask for the older values, which only the cleared parts tell: no turn
                behind a result tells a fact.
        """
        tasks = []
        for seed in range(count):
            rng = random.Random(seed)
            pieces, targets = [[BOS_ID, USER_ID]], list[Target]()
            for memo in draw_memos(rng, EDITS):
                old = Memo(memo.attribute, memo.entity, other_value(rng, memo))
                said = [old.fill(rng.choice(FACT_FORMS))] if stale or about_cleared else []
                pieces.append(self._encoded(" ".join([*self._prose(rng, CLEARED - 14 * len(said)), *said])))
                told = self._encoded(" ".join([memo.fill(rng.choice(FACT_FORMS)), *self._prose(rng, TURN - 14)]))
                reply = [END_ID, ASSISTANT_ID, *self._encoded(rng.choice(ACKNOWLEDGEMENTS)), END_ID, USER_ID]
                pieces.append(reply if about_cleared else [*reply, *told, *reply])
                asked = self._question(rng, old if about_cleared else memo, 0)
                targets.append(self._target(asked, len(targets)))
            tasks.append(EditTask(pieces, targets))
        return tasks

    def _encoded(self, text: str) -> list[int]:
        return plain_ids(self._tokenizer, text)


def other_value(rng: random.Random, memo: Memo) -> str:
    """A value that the fact does not have."""
    while True:
        if memo.attribute in NUMBERS:
            value = "".join(rng.choices("0123456789", k=NUMBERS[memo.attribute]))
        else:
            value = rng.choice(WORD_VALUES.get(memo.attribute, COLOURS))
        if value != memo.value:
            return value
