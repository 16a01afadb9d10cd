"""Rules against values that were worked out by hand, and rendezvous hashing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from trunkline.router.routing.policies import POLICIES, RoutingSettings, TieBreaker, View, rendezvous


def view(controllers: int, **known: Any) -> View:
    """All idle and empty, but for what is said."""
    zeros = np.zeros(controllers)
    idle = View(
        candidates=np.arange(controllers),
        prompt_tokens=1000,
        chunk_size=np.full(controllers, 10),
        new_tokens=zeros + 1000,
        matched_tokens=np.zeros(controllers, np.int64),
        inflight=zeros,
        own_inflight=zeros,
        queued=zeros,
        own_queued=zeros,
        own_blocks=zeros,
        running=zeros,
        kv_used=zeros,
        costs=zeros + 1000,
        session="",
        place=-1,
        home=-1,
        names=[str(controller) for controller in range(controllers)],
    )
    arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in known.items()}
    return msgspec.structs.replace(idle, **arrays)


def chosen(policy: str, seen: View, turns: int = 12) -> set[int]:
    """All that it chooses in so many turns."""
    rule = POLICIES[policy](RoutingSettings(), TieBreaker(0))
    return {rule.choose(seen)[0] for _ in range(turns)}


CASES: list[tuple[str, dict[str, Any], set[int]]] = [
    ("round-robin", {}, {0, 1, 2}),
    ("round-robin", {"inflight": [9, 0, 0]}, {0, 1, 2}),
    ("least-loaded", {"inflight": [3, 1, 2]}, {1}),
    ("least-loaded", {"inflight": [3, 1, 1]}, {1, 2}),
    ("least-loaded", {"inflight": [3, 1, 2], "candidates": [0, 2]}, {2}),
    # 40 - 7 > 32 and 40 > 1.1 · 7: the shortest queue, whoever has the prompt.
    ("sglang", {"own_inflight": [40, 7, 9], "matched_tokens": [1000, 0, 0]}, {1}),
    # 39 - 7 = 32 is not more than 32: who has over half of it.
    ("sglang", {"own_inflight": [39, 7, 9], "matched_tokens": [510, 0, 0]}, {0}),
    # Half of it is not over half: the least loaded.
    ("sglang", {"own_inflight": [39, 7, 9], "matched_tokens": [500, 0, 0]}, {1}),
    # 373 is not more than 1.1 · 340: in balance.
    ("sglang", {"own_inflight": [373, 340, 350], "matched_tokens": [600, 0, 0]}, {0}),
    # Others' requests are not looked at.
    ("sglang", {"inflight": [9, 50, 50], "own_inflight": [2, 1, 2]}, {1}),
    # (0 + 1000 - 500) / 10 + 60 = 110, (100 + 1000) / 10 = 110, (0 + 1000) / 10 + 5 = 105.
    ("dynamo", {"matched_tokens": [500, 0, 0], "queued": [0, 100, 0], "own_blocks": [60, 0, 5]}, {2}),
    ("dynamo", {"matched_tokens": [600, 0, 0], "queued": [0, 100, 0], "own_blocks": [60, 0, 5]}, {0}),
    # 400 · 3 = 1200, 1000 · 1, 500 · 2 = 1000.
    ("lmetric", {"matched_tokens": [600, 0, 500], "inflight": [2, 0, 1]}, {1, 2}),
    # 3 · 0.5 + 0 + 2 = 3.5, 0 + 2 + 2 = 4, 0 + 1 + 2 = 3.
    ("llm-d", {"matched_tokens": [500, 0, 0], "inflight": [4, 0, 2]}, {1}),
    # The same with half of the KV of 1 taken: 3.5, 3, 3.
    ("llm-d", {"matched_tokens": [500, 0, 0], "inflight": [4, 0, 2], "kv_used": [0, 0.5, 0]}, {0}),
    # What runs is in no queue: all queues are equal.
    ("llm-d", {"matched_tokens": [0, 10, 0], "inflight": [4, 0, 2], "running": [4, 0, 2]}, {1}),
    ("prefix", {"costs": [3.0, 1.0, 2.0]}, {1}),
    ("prefix", {"costs": [1.0, 1.0, 2.0]}, {0, 1}),
    # The one that has most, and more than half, is left only if it costs more than 1.5 times as much.
    ("prefix", {"costs": [1.5, 1.0, 2.0], "matched_tokens": [501, 500, 0]}, {0}),
    ("prefix", {"costs": [1.6, 1.0, 2.0], "matched_tokens": [501, 500, 0]}, {1}),
    ("prefix", {"costs": [1.5, 1.0, 2.0], "matched_tokens": [500, 400, 0]}, {1}),
    ("prefix", {"costs": [1.5, 1.0, 2.0], "matched_tokens": [600, 0, 600]}, {1}),
    ("prefix", {"costs": [1.5, 1.0, 2.0], "matched_tokens": [900, 0, 0], "candidates": [1, 2]}, {1}),
    ("prefix", {"costs": [1.5, 1.0, 2.0], "session": "s", "place": 0}, {0}),
    ("prefix", {"costs": [1.51, 1.0, 2.0], "session": "s", "place": 0}, {1}),
    ("prefix", {"costs": [1.5, 1.0, 2.0], "session": "s", "place": 0, "candidates": [1, 2]}, {1}),
    ("prefix", {"costs": [1.5, 1.0, 1.2], "session": "s", "place": -1, "home": 2}, {2}),
    ("prefix", {"costs": [1.5, 1.0, 1.2], "session": "", "place": 0, "home": 2}, {2}),
    # Where more of its prompt is than anywhere else it was last, whoever sent it there.
    (
        "prefix",
        {"costs": [1.0, 1.4, 1.5], "session": "s", "place": 0, "home": 1, "matched_tokens": [9, 0, 10]},
        {2},
    ),
    ("prefix", {"costs": [1.0, 1.2, 1.6], "session": "s", "place": 1, "matched_tokens": [9, 0, 10]}, {0}),
    ("prefix", {"costs": [1.0, 1.2, 1.3], "session": "s", "place": 1, "matched_tokens": [9, 0, 9]}, {1}),
    # The dearest one that can take it sets no limit for others.
    ("prefix", {"costs": [1.0, 9.0, 8.0], "session": "s", "place": 2, "candidates": [1, 2]}, {2}),
]


@pytest.mark.parametrize(("policy", "known", "expected"), CASES)
def test_rules(policy: str, known: dict[str, Any], expected: set[int]) -> None:
    assert chosen(policy, view(3, **known)) == expected


def test_session_hash_keeps_sessions_and_balances_the_rest() -> None:
    loads = {"inflight": [5, 0, 9]}
    for name in "abcdefgh":
        assert chosen("session-hash", view(3, session=name, **loads)) == {int(rendezvous(name, "012"))}
    assert chosen("session-hash", view(3, **loads)) == {1}


def test_new_sessions_break_near_ties_by_hash() -> None:
    for name in "abcdefgh":
        seen = {"session": name, "costs": [1.0, 1.2, 1.3]}
        assert chosen("prefix", view(3, **seen)) == {int(rendezvous(name, "01"))}
        cached = view(3, **seen, matched_tokens=[10, 0, 0])
        assert chosen("prefix", cached) == {0}, "what is cached decides"


def test_when_a_controller_comes_or_goes_only_its_own_keys_move() -> None:
    keys = [f"session {number}" for number in range(2000)]
    before = {key: rendezvous(key, "abcdefgh") for key in keys}
    assert all(180 < count < 320 for count in Counter(before.values()).values())
    for key, place in before.items():
        assert rendezvous(key, "bcdaefhg") == place, "the order does not matter"
        after = rendezvous(key, "abcefgh")
        assert after == place or place == "d"
        assert rendezvous(key, "abcdefghi") in (place, "i")
    with pytest.raises(ValueError, match="empty"):
        rendezvous("x", [])
