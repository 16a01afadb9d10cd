"""How often drafts are right, by where they come from; learnt token by token. Pure.

A follower compares every token that arrives with the one that it would have drafted, whether it was drafted or
not. So no step is spent on finding out how often drafts are right, and a text that cannot be drafted costs
nothing.

    chance = of all sequences of the tenant, for this source, length of match, and what other places say
             ×  how drafts of this token, and those behind the token before it, do compared with that
             ×  how this sequence does compared with that

The second line is for short matches only. There it tells the rest of a word, which is nearly sure, from what
stands behind an opening bracket.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np

from trunkline.controller.drafts.text_index import MATCH_MAX


class Source(IntEnum):
    """Where a draft comes from. Of equally long matches the first counts."""

    TREE = 0
    """The radix tree: another sequence went on behind the same path."""
    PREDICTION = 1
    """What the client said that the answer will be like."""
    CONTEXT = 2
    """The sequence's own tokens."""
    RECENT = 3
    """Prompts and outputs of the tenant's earlier requests."""
    GRAMMAR = 4
    """What the grammar demands, as the tokenizer writes it: foretold by rank 0, whatever matches."""


class Others(IntEnum):
    """What stands at the other places where the sequence's last tokens were found, behind fewer of them."""

    NONE = 0
    """There is no other place, or none was looked for."""
    DIFFER = 1
    """Other tokens than at the place."""
    SOME_AGREE = 2
    ALL_AGREE = 3


CLASSES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Lengths of match at which a class of its own begins."""
_CLASS: Final = [sum(m >= first for first in CLASSES) - 1 for m in range(MATCH_MAX + 1)]
PRIOR: Final = {
    Source.TREE: (0.4, 0.4, 0.4, 0.5, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.8),
    Source.PREDICTION: (0.6, 0.2, 0.6, 0.7, 0.7, 0.8, 0.8, 0.9, 0.9, 0.9, 0.95),
    Source.CONTEXT: (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.9, 0.9),
    Source.GRAMMAR: (0.8,) * 11,
    Source.RECENT: (0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.9),
}
"""Chances that are assumed before anything is measured, by class; each counts as `PRIOR_TRIALS` tokens."""
PRIOR_PARTS: Final = (1.0, 0.6, 1.0, 1.2)
"""By which these chances are multiplied, by `Others`."""
_PRIOR_RATES: Final = [
    [[min(rate * part, 0.95) for rate in PRIOR[source]] for part in PRIOR_PARTS] for source in Source
]
PRIOR_TRIALS: Final = 8.0
TRIALS_MAX: Final = 512.0
"""Number of tokens over which a class remembers."""
FIT_TRIALS: Final = 4.0
"""Number of tokens as which the other sequences count beside this sequence's own."""
FIT_KEPT: Final = 0.96
"""Part of a sequence's own count that each new token leaves: it remembers about 25 of them."""
CHANCE_MAX: Final = 0.98
"""No draft is surer than this."""
TOKEN_TRIALS: Final = 8.0
"""Number of tokens as which the others count beside a token's own."""
TOKEN_KEPT: Final = 0.99
"""Part of a token's own count that each new trial leaves."""
TOKEN_SLOTS: Final = 1 << 13
"""Number of tokens that are told apart; others share their counts with one of these."""


class Acceptance:
    """How often drafts have been right, over all sequences of a tenant."""

    nbytes: Final = 4 * 4 * TOKEN_SLOTS
    """Bytes of memory, nearly."""

    def __init__(self) -> None:
        self._trials = [[[PRIOR_TRIALS] * len(CLASSES) for _ in Others] for _ in Source]
        self._rates = [[rates.copy() for rates in parts] for parts in _PRIOR_RATES]
        # In one piece: the system gives such memory when it is first touched, and most tenants touch little of it.
        counts = np.zeros((4, TOKEN_SLOTS), np.float32)
        right, expected, right_of, expected_of = (row.data.cast("B").cast("f") for row in counts)
        self.behind = TokenFits(right, expected)
        """By the token behind which drafts stood."""
        self.of = TokenFits(right_of, expected_of)
        """By the token that was drafted."""

    def chance(self, source: Source, match: int, others: Others) -> float:
        """Return how likely the next token is right behind `match` tokens that agree, at most `MATCH_MAX`.

        Args:
            others: what the text says at the other places that were found.
        """
        return self._rates[source][others][_CLASS[match]]

    def chances(self, source: Source, match: int, count: int, fit: float, least: float) -> list[float]:
        """Return for each of the next `count` tokens of one text how likely it and all before it are right, as far
        as that is `least` or more. Other places are not looked at.

        Args:
            fit: how the sequence does compared with others (`Fit.ratio`).
        """
        rates, found, product = self._rates[source][Others.NONE], list[float](), 1.0
        for class_ in range(_CLASS[match], len(CLASSES)):
            rate = min(rates[class_] * fit, CHANCE_MAX)
            stop = CLASSES[class_ + 1] - match if class_ + 1 < len(CLASSES) else count
            for _ in range(len(found), min(stop, count)):
                product *= rate
                if product < least:
                    return found
                found.append(product)
        return found

    def learn(self, source: Source, match: int, others: Others, *, is_right: bool) -> None:
        """Take in whether the token behind `match` tokens that agree was right."""
        rates, trials, class_ = self._rates[source][others], self._trials[source][others], _CLASS[match]
        trials[class_] = count = min(trials[class_] + 1.0, TRIALS_MAX)
        rates[class_] += (is_right - rates[class_]) / count


class TokenFits:
    """How often drafts have been right, by a token, compared with all others."""

    def __init__(self, right: memoryview[float], expected: memoryview[float]) -> None:
        """
        Args:
            right, expected: `[TOKEN_SLOTS]` float32, zeros.
        """
        self._right, self._expected = right, expected

    def learn(self, token: int, chance: float, *, is_right: bool) -> None:
        """Take in whether a draft was right of which others have this chance."""
        slot = token % TOKEN_SLOTS
        self._right[slot] = self._right[slot] * TOKEN_KEPT + is_right
        self._expected[slot] = self._expected[slot] * TOKEN_KEPT + chance

    def ratio(self, token: int) -> float:
        """Return the chance of a draft with this token, divided by that of others."""
        slot = token % TOKEN_SLOTS
        return (self._right[slot] + TOKEN_TRIALS) / (self._expected[slot] + TOKEN_TRIALS)


class Fit:
    """How often the drafts for one sequence from one source have been right, compared with others."""

    __slots__ = ("_expected", "_right")

    def __init__(self) -> None:
        self._right = self._expected = 0.0

    def learn(self, chance: float, *, is_right: bool) -> None:
        """Take in whether a token was right of which others have this chance."""
        self._right = self._right * FIT_KEPT + is_right
        self._expected = self._expected * FIT_KEPT + chance

    @property
    def ratio(self) -> float:
        """The sequence's chance, divided by that of others."""
        return (self._right + FIT_TRIALS) / (self._expected + FIT_TRIALS)
