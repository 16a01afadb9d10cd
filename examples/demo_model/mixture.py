"""What one training step sees: rows of library text, questions, recall and small talk.

A row is a fixed number of tokens. Conversations are packed whole, each starting with
``<|bos|>``; library text fills what is left, so no position is wasted. The mixture is a
deterministic function of its seed and its state, and the state travels with a checkpoint.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import torch
from chat import (
    BOS_ID,
    END_ID,
    PAD_ID,
    Message,
    answer,
    encode_chat,
    plain_ids,
    question,
)
from corpus import Document
from questions import Fact, ask
from recall import ACKNOWLEDGEMENTS, ask_memo, draw_memos, notes, recall_chat
from smalltalk import SYSTEM_PROMPTS, small_talk
from tokenizers import Tokenizer

IGNORED = -100  # the target of a position that does not count
CHUNK_TOKENS = 512
FILL_TOKENS_MIN = 24


@dataclass(frozen=True)
class Shares:
    """Share of rows by kind; the rest of the rows holds questions and small talk."""

    library: float
    recall: float
    copying: float


class Cycle:
    """Visits 0..n-1 in a new random order each time round: even exposure, unlike drawing."""

    def __init__(self, count: int, rng: random.Random) -> None:
        self.count, self.rng = count, rng
        self.order: list[int] = []

    def next(self) -> int:
        """The next index."""
        if not self.order:
            self.order = list(range(self.count))
            self.rng.shuffle(self.order)
        return self.order.pop()


def prose_paragraphs(documents: tuple[Document, ...]) -> list[str]:
    """Paragraphs of the reference topics: filler and long system prompts are cut from them."""
    paragraphs = []
    for document in documents:
        if not document.prose:
            continue
        for block in re.split(r"\n\s*\n", document.text):
            text = re.sub(r"\s+", " ", block).strip()
            if len(text) > 60 and not text.startswith(("*", ">>>", "|", "+")):
                paragraphs.append(text)
    return paragraphs


class Mixture:
    """Draws rows; ``seed`` fixes every draw."""

    def __init__(
        self, tokenizer: Tokenizer, documents: tuple[Document, ...], facts: list[Fact], seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self.facts = facts
        self.rng = random.Random(seed)
        shuffled = list(documents)
        random.Random(seed).shuffle(shuffled)
        stream: list[int] = []
        for encoding in tokenizer.encode_batch([document.text for document in shuffled]):
            stream += [BOS_ID, *encoding.ids, END_ID]
        self.stream = stream
        self.paragraphs = prose_paragraphs(documents)
        self.digits = [plain_ids(tokenizer, digit)[0] for digit in "0123456789"]
        self.chunks = Cycle(len(stream) // CHUNK_TOKENS - 8, self.rng)
        self.fact_cycle = Cycle(len(facts), self.rng)

    def state(self) -> dict[str, Any]:
        """Everything that the next draw depends on."""
        return {
            "rng": self.rng.getstate(),
            "chunks": list(self.chunks.order),
            "facts": list(self.fact_cycle.order),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken."""
        self.rng.setstate(state["rng"])
        self.chunks.order = list(state["chunks"])
        self.fact_cycle.order = list(state["facts"])

    def library_tokens(self, count: int) -> list[int]:
        """A run of library text that starts at a chunk border."""
        start = self.chunks.next() * CHUNK_TOKENS
        return self.stream[start : start + count]

    def prose(self, tokens: int) -> list[str]:
        """Neighbouring paragraphs of about that many tokens (a token is near 3.5 letters)."""
        index = self.rng.randrange(len(self.paragraphs))
        chosen: list[str] = []
        letters = tokens * 3.5
        while letters > 0:
            text = self.paragraphs[index % len(self.paragraphs)]
            if len(text) > letters:
                text = text[: text.rfind(" ", 0, max(int(letters), 40))]
            if not text:
                break
            chosen.append(text)
            letters -= len(text)
            index += 1
        return chosen

    def _turns(self, count: int) -> list[Message]:
        turns: list[Message] = []
        for _ in range(count):
            if self.rng.random() < 0.06:
                turns += small_talk(self.rng)
                continue
            fact = self.facts[self.fact_cycle.next()]
            turns += [question(ask(fact, self.rng)), answer(fact.answer)]
        return turns

    def question_chat(self, room: int) -> list[Message]:
        """Questions about the library, with and without a system prompt and history."""
        rng = self.rng
        dice = rng.random()
        messages: list[Message] = []
        if dice < 0.12:
            messages.append(Message("system", rng.choice(SYSTEM_PROMPTS)))
        elif dice < 0.22 and room > 250:
            tokens = rng.randrange(60, min(1000, room - 150))
            messages.append(Message("system", "\n".join(self.prose(tokens)), learn=True))
        many = 1 if rng.random() < 0.6 else rng.randint(2, 6)
        if room > 1000 and rng.random() < 0.4:
            many = rng.randint(4, 24)
        return messages + self._turns(many)

    def filler(self, tokens: int) -> list[str]:
        """Single sentences of library prose, about that many tokens."""
        sentences = []
        for paragraph in self.prose(tokens):
            sentences += re.split(r"(?<=[.])\s+", paragraph)
        return sentences

    def recall_chat(self, room: int, progress: float) -> list[Message]:
        """Made-up facts and questions; short and plain first, long once that works."""
        rng = self.rng
        limit = min(40, room // 22, 3 + int(60 * progress))
        count = rng.randint(1, max(2, limit))
        spare = room - 40 * count - 60
        filler: list[str] = []
        if spare > 60 and rng.random() < min(0.7, 0.1 + progress):
            filler = self.filler(rng.randrange(30, spare))
        asked = min(count, rng.randint(2, 12 if room > 1000 else 8))
        if rng.random() < 0.75:
            return recall_chat(rng, count, filler, asked)
        # Facts told turn by turn, with other talk between telling and asking.
        memos = draw_memos(rng, min(count, 8))
        messages: list[Message] = []
        for memo in memos:
            messages += [question(notes(rng, [memo], [])), answer(rng.choice(ACKNOWLEDGEMENTS))]
            messages += self._turns(int(rng.random() < 0.2))
        for memo in rng.sample(memos, min(asked, len(memos))):
            messages += ask_memo(rng, memo)
        return messages

    def _chat_row(self, length: int, recall: bool, progress: float) -> tuple[list[int], list[int]]:
        """Whole conversations until no more fit, then library text."""
        ids: list[int] = []
        learn: list[int] = []
        misses = 0
        while misses < 3 and length - len(ids) > 40:
            room = length - len(ids)
            chat = self.recall_chat(room, progress) if recall else self.question_chat(room)
            chat_ids, chat_learn = encode_chat(self.tokenizer, chat)
            if len(chat_ids) > room:
                misses += 1
                continue
            ids += chat_ids
            learn += chat_learn
        room = length - len(ids)
        if room >= FILL_TOKENS_MIN:
            extra = self.library_tokens(room - 1)
            ids += [BOS_ID, *extra]
            learn += [0, *[1] * len(extra)]
        padding = length - len(ids)
        return ids + [PAD_ID] * padding, learn + [0] * padding

    def _spans(self) -> list[list[int]]:
        """A few runs of random tokens: nothing to learn in them but their order."""
        rng = self.rng
        alphabet = [self.stream[rng.randrange(len(self.stream))] for _ in range(400)]
        alphabet = alphabet[: rng.choice((12, 40, 400))]
        digits = rng.choice((0.0, 0.0, 0.3, 0.6))
        return [
            [
                rng.choice(self.digits if index and rng.random() < digits else alphabet)
                for index in range(rng.randint(4, 24))
            ]
            for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 6)))
        ]

    def _copy_row(self, length: int) -> tuple[list[int], list[int]]:
        """Random spans, then the same spans again in other orders; the first time is free.

        Recalling a made-up fact needs heads that find an earlier match and copy what followed.
        Text rewards such heads rarely, this rewards nothing else, and so they form early.
        """
        ids: list[int] = []
        learn: list[int] = []
        while len(ids) < length:
            spans = self._spans()
            ids.append(BOS_ID)
            learn.append(0)
            for visit in range(self.rng.randint(2, 5)):
                self.rng.shuffle(spans)
                for span in spans:
                    ids += span
                    # Which span comes next cannot be known; how it goes on can.
                    learn += [0] + [int(visit > 0)] * (len(span) - 1)
        return ids[:length], learn[:length]

    def row(self, length: int, shares: Shares, progress: float) -> tuple[list[int], list[int]]:
        """One row and its learn flags."""
        dice = self.rng.random()
        if dice < shares.library:
            return self.library_tokens(length), [1] * length
        dice -= shares.library
        if dice < shares.copying:
            return self._copy_row(length)
        recall = dice - shares.copying < shares.recall
        return self._chat_row(length, recall, progress)

    def batch(self, rows: int, length: int, shares: Shares, progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and next-token targets of ``rows`` rows of ``length`` positions."""
        drawn = [self.row(length + 1, shares, progress) for _ in range(rows)]
        ids = torch.tensor([row[0] for row in drawn])
        learn = torch.tensor([row[1] for row in drawn], dtype=torch.bool)
        targets = torch.where(learn[:, 1:], ids[:, 1:], IGNORED)
        return ids[:, :-1].contiguous(), targets


def text_rows(tokenizer: Tokenizer, documents: tuple[Document, ...], length: int) -> torch.Tensor:
    """Documents cut into rows of ``length + 1`` tokens, for the held-out loss."""
    stream: list[int] = []
    for document in documents:
        stream += [BOS_ID, *plain_ids(tokenizer, document.text), END_ID]
    rows = len(stream) // (length + 1)
    return torch.tensor(stream[: rows * (length + 1)]).view(rows, length + 1)
