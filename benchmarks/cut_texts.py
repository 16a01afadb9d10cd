"""What the demo model reads when its context overflows: held-out text, and talks with facts to remember.

Texts are the documents that `examples/demo_model` never trained on, put together as in training; they come from
the running interpreter's library. Talks follow the same folder's recall task.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples/demo_model"))

from chat import ASSISTANT_ID, BOS_ID, END_ID, USER_ID, plain_ids
from corpus import Document, load_corpus
from mixture import prose_paragraphs
from questions import MODULES, READ_MODULES
from recall import ACKNOWLEDGEMENTS, ANSWER_FORM, QUESTION_FORMS, Memo, draw_memos, notes

DEMO_MODEL: Final = Path(__file__).resolve().parents[1] / "deploy/trunkline/deploy/demo_model"
_ROUND_TOKENS: Final = 200
_ROUND_MEMOS: Final = 3


@dataclass(frozen=True)
class Question:
    """About a fact of a talk."""

    tokens: list[int]
    """Question and answer."""
    answer: int
    """Index of the answer's first token."""
    place: int
    """Index in the talk of the first token of the sentence that tells the fact."""


@dataclass(frozen=True)
class Talk:
    """Turns that tell facts among prose, and questions about them."""

    tokens: list[int]
    questions: list[Question]


class Texts:
    """Held-out documents, tokenised."""

    def __init__(self) -> None:
        taught = frozenset(MODULES + READ_MODULES) | {name.split(".")[0] for name in MODULES}
        documents = list(load_corpus(taught).heldout)
        self._tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
        self._sentences = _sentences(tuple(documents))
        random.Random(1).shuffle(documents)  # source and prose in turn
        self._tokens: list[int] = []
        for document in documents:
            self._tokens += [BOS_ID, *plain_ids(self._tokenizer, document.text), END_ID]

    def streams(self, count: int, length: int) -> list[list[int]]:
        """Stretches of the text, evenly spread, none twice.

        Raises:
            ValueError: there is not so much text.
        """
        if count * length > len(self._tokens):
            raise ValueError(f"{count} stretches of {length} tokens: there are {len(self._tokens)} tokens")
        step = (len(self._tokens) - length) // max(1, count - 1)
        return [self._tokens[index * step : index * step + length] for index in range(count)]

    def talk(self, seed: int, length: int) -> Talk:
        """A conversation of `length` tokens, the first round cut off where it does not fit."""
        rng = random.Random(seed)
        memos = draw_memos(rng, length // _ROUND_TOKENS * _ROUND_MEMOS + _ROUND_MEMOS)
        tokens, questions = [BOS_ID], []
        while len(tokens) < length:
            told = [memos.pop() for _ in range(min(_ROUND_MEMOS, len(memos)))]
            text = notes(rng, told, self._prose(rng, _ROUND_TOKENS - 14 * len(told)))
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            for memo in told:
                place = len(tokens) + 1 + (encoding.char_to_token(_place(text, memo)) or 0)
                questions.append(self._question(rng, memo, place))
            reply = plain_ids(self._tokenizer, rng.choice(ACKNOWLEDGEMENTS))
            tokens += [USER_ID, *encoding.ids, END_ID, ASSISTANT_ID, *reply, END_ID]
        surplus = len(tokens) - length
        questions = [Question(q.tokens, q.answer, q.place - surplus) for q in questions]
        return Talk([BOS_ID, *tokens[surplus + 1 :]], questions)

    def _question(self, rng: random.Random, memo: Memo, place: int) -> Question:
        asked = plain_ids(self._tokenizer, memo.fill(rng.choice(QUESTION_FORMS)))
        answer = plain_ids(self._tokenizer, memo.fill(ANSWER_FORM))
        begin = [USER_ID, *asked, END_ID, ASSISTANT_ID]
        return Question([*begin, *answer, END_ID], len(begin), place)

    def _prose(self, rng: random.Random, tokens: int) -> list[str]:
        """Neighbouring sentences of about so many tokens (a token is near 3.5 letters), the last one cut off."""
        index, letters = rng.randrange(len(self._sentences)), tokens * 3.5
        chosen: list[str] = []
        while letters > 0:
            chosen.append(self._sentences[index % len(self._sentences)][: int(max(letters, 20))])
            letters -= len(chosen[-1])
            index += 1
        return chosen


def _sentences(documents: tuple[Document, ...]) -> list[str]:
    return [part for text in prose_paragraphs(documents) for part in re.split(r"(?<=[.])\s+", text) if part]


def _place(text: str, memo: Memo) -> int:
    """Where the sentence about a fact begins, in characters."""
    forms = (f"{memo.attribute} of {memo.entity} is {memo.value}", f"{memo.entity} has the {memo.attribute}")
    return max(text.find(form) for form in forms)
