"""Conversations as CachedAttention §4.1 describes its workload (ShareGPT), drawn from a seed.

27 % of the sessions have one turn, the others 2 + a geometric number; tokens per turn are log-normal with a part
that all turns of a session share, 32 % of them the user's; sessions arrive in a Poisson process. This fits the
statistics that the paper gives: 5.75 turns in the mean, 47 % of sessions over 2K tokens and 30 % over 4K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

SINGLE_TURN: Final = 0.27
MORE_TURNS_MEAN: Final = 5.507
"""Of the turns after the second."""
LOG_TOKENS: Final = 6.0
SESSION_SIGMA: Final = 0.7
TURN_SIGMA: Final = 0.9
TOKENS_MIN: Final = 8
USER_SHARE: Final = 0.32


@dataclass(frozen=True, slots=True)
class Conversation:
    """One session. All lists have one entry per turn."""

    arrival_s: float
    user_tokens: list[int]
    answer_tokens: list[int]
    think_s: list[float]
    """After the turn's answer; the last is not used."""


def conversations(count: int, rate: float, seed: int = 0) -> list[Conversation]:
    """Return `count` sessions that begin at `rate` per second, whose users think a minute on average."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, count))
    many = rng.random(count) >= SINGLE_TURN
    turns = np.where(many, 1 + rng.geometric(1.0 / (1.0 + MORE_TURNS_MEAN), count), 1)
    level = LOG_TOKENS + SESSION_SIGMA * rng.standard_normal(count)
    made = []
    for arrival, n, mean in zip(arrivals.tolist(), turns.tolist(), level.tolist(), strict=True):
        tokens = np.maximum(np.exp(mean + TURN_SIGMA * rng.standard_normal(n)), TOKENS_MIN)
        user = np.maximum(np.rint(USER_SHARE * tokens), 1).astype(int)
        answer = np.maximum(np.rint(tokens) - user, 1).astype(int)
        made.append(Conversation(arrival, user.tolist(), answer.tolist(), rng.exponential(60.0, n).tolist()))
    return made
