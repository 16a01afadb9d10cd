"""What the model can do: held-out loss, exact answers, recall by context length.

An answer counts as exact when greedy decoding would write it token for token, end token
included. That is decided in one pass over question and expected answer: greedy decoding
writes the expected answer exactly when each of its tokens is the most likely one there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from chat import PAD_ID, Message, answer, encode_chat, question
from mixture import IGNORED, Mixture, Shares
from questions import HELDOUT_TEMPLATES, Fact, ask
from recall import ask_memo, draw_memos, notes
from tokenizers import Tokenizer
from torch import Tensor

Scorer = Callable[[Tensor], Tensor]  # rows of ids to logits
RECALL_TOKENS = (128, 256, 512, 1024, 1800)


@dataclass(frozen=True)
class Paraphrase:
    """A question from a template never trained on, and the one right answer."""

    question: str
    answer: str
    name: str


def paraphrases(facts: list[Fact], seed: int = 7) -> list[Paraphrase]:
    """One held-out question per fact."""
    rng = random.Random(seed)
    return [Paraphrase(ask(f, rng, HELDOUT_TEMPLATES), f.answer, f.name) for f in facts]


def exact_flags(scorer: Scorer, tokenizer: Tokenizer, chats: list[list[Message]], rows: int = 16) -> list[bool]:
    """For each conversation: would greedy decoding write its last message exactly?"""
    encoded = []
    for chat in chats:
        start = len(encode_chat(tokenizer, chat[:-1])[0]) + 1  # after the role token
        encoded.append((encode_chat(tokenizer, chat)[0], start))
    order = sorted(range(len(chats)), key=lambda index: len(encoded[index][0]))
    flags = [False] * len(chats)
    for first in range(0, len(order), rows):
        group = order[first : first + rows]
        width = max(len(encoded[index][0]) for index in group)
        padded = [encoded[i][0] + [PAD_ID] * (width - len(encoded[i][0])) for i in group]
        ids = torch.tensor(padded)
        best = scorer(ids).argmax(-1)
        for row, index in enumerate(group):
            tokens, start = encoded[index]
            end = len(tokens)
            flags[index] = bool((best[row, start - 1 : end - 1] == ids[row, start:end]).all())
    return flags


def share(flags: list[bool]) -> float:
    """Share of true flags."""
    return sum(flags) / max(1, len(flags))


def heldout_loss(scorer: Scorer, rows: Tensor, batch: int = 8) -> float:
    """Mean loss per token of text rows (each of length + 1 tokens)."""
    total, count = 0.0, 0
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        logits = scorer(part[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        total += loss.item()
        count += part[:, 1:].numel()
    return total / count


def perplexity(loss: float) -> float:
    """The loss as a branching factor."""
    return math.exp(loss)


def recall_chats(mixture: Mixture, tokens: int, count: int, seed: int = 11) -> list[list[Message]]:
    """Conversations of about ``tokens`` tokens: facts among prose, then one question."""
    saved = mixture.state()
    mixture.rng.seed(seed * 10_000 + tokens)
    rng = mixture.rng
    chats = []
    for _ in range(count):
        facts = max(2, min(24, tokens // 50))
        memos = draw_memos(rng, facts)
        # A fact is near 11 tokens and the closing turn near 30; prose takes the rest.
        filler = mixture.filler(max(0, tokens - 11 * facts - 30))
        chat = [Message("system", notes(rng, memos, filler))]
        chats.append(chat + ask_memo(rng, rng.choice(memos)))
    mixture.restore(saved)
    return chats


def copy_rows(mixture: Mixture, count: int, seed: int = 12) -> tuple[Tensor, Tensor]:
    """Inputs and targets of random spans said again, the same for every check."""
    saved = mixture.state()
    mixture.rng.seed(seed)
    batch = mixture.batch(count, 256, Shares(library=0, recall=0, copying=1), 0)
    mixture.restore(saved)
    return batch


def copying_share(scorer: Scorer, rows: tuple[Tensor, Tensor]) -> float:
    """Share of repeated tokens that are predicted right."""
    ids, targets = rows
    counted = targets != IGNORED
    return float((scorer(ids).argmax(-1) == targets)[counted].float().mean())


def question_chats(items: list[Paraphrase]) -> list[list[Message]]:
    """Single-turn conversations of paraphrases."""
    return [[question(item.question), answer(item.answer)] for item in items]
