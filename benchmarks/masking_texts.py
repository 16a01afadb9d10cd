"""What the demo model reads as modules: stretches of held-out text, and documents with made-up facts."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cut_texts import Question, Texts

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples/demo_model"))

from chat import BOS_ID, END_ID, SYSTEM_ID, plain_ids
from recall import draw_memos, notes

DOCUMENTS: Final = 6
DOCUMENT_TOKENS: Final = 100
"""About; of documents with facts."""
_SENTENCE_TOKENS: Final = 14
STRETCH_ROOT: Final = 16
STRETCH_DOCUMENT: Final = 128
STRETCH_TARGET: Final = 256


@dataclass(frozen=True)
class Task:
    """A root text, documents, and texts that would go on behind them: each is asked for alone."""

    root: list[int]
    documents: list[list[int]]
    targets: list[Target]


@dataclass(frozen=True)
class Target:
    """A text behind the documents."""

    tokens: list[int]
    scored_from: int
    """Index of the first token that is to be foreseen."""
    document: int
    """What it is about; -1: all of them."""


class ModuleTexts(Texts):
    """Tasks, by seed."""

    def stretches(self, count: int) -> list[Task]:
        """Held-out text, cut into documents, and how it goes on."""
        length = STRETCH_ROOT + DOCUMENTS * STRETCH_DOCUMENT + STRETCH_TARGET
        tasks = []
        for stretch in self.streams(count, length):
            root, rest = [BOS_ID, *stretch[1:STRETCH_ROOT]], stretch[STRETCH_ROOT:]
            documents = [rest[at : at + STRETCH_DOCUMENT] for at in range(0, len(rest), STRETCH_DOCUMENT)][
                :DOCUMENTS
            ]
            tasks.append(Task(root, documents, [Target(rest[-STRETCH_TARGET:], 1, -1)]))
        return tasks

    def notebooks(self, count: int) -> list[Task]:
        """Documents in a system message, each with a fact among prose, and a question about every fact."""
        tasks = []
        for seed in range(count):
            rng = random.Random(seed)
            memos = draw_memos(rng, DOCUMENTS)
            documents = [
                plain_ids(
                    self._tokenizer, notes(rng, [memo], self._prose(rng, DOCUMENT_TOKENS - _SENTENCE_TOKENS))
                )
                for memo in memos
            ]
            targets = [self._target(self._question(rng, memo, 0), document) for document, memo in enumerate(memos)]
            tasks.append(Task([BOS_ID, SYSTEM_ID], documents, targets))
        return tasks

    @staticmethod
    def _target(question: Question, document: int) -> Target:
        """The question ends the system message."""
        return Target([END_ID, *question.tokens], question.answer + 1, document)
