"""Hints of any shape: what is understood of them, and that none is an error."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
from router.fake_controller import FakeController
from seeds import seeds

from trunkline.router.jobs.hints import NEXT_MAX_S, OUTPUT_MAX, PRIORITY_MAX, Hints, hints_of
from trunkline.router.jobs.request_models import ChatRequest

MESSAGES = [{"role": "user", "content": "Hello"}]


def test_what_is_understood() -> None:
    said = {"iat": 2500, "priority": 5, "total_requests": 1, "osl": 512, "latency_sensitivity": 1.2}
    assert hints_of({"agent_hints": said}, ()) == Hints(2.5, True, -5, 512)
    assert hints_of(None, ({"iat": "250", "last": True}, None)) == Hints(0.25, True, None)
    assert hints_of({"agent_hints": {"iat": 1000}}, ({"iat": 9000, "priority": "-3"},)) == Hints(1.0, False, 3)
    assert hints_of({"agent_hints": {"total_requests": 9}}, ()) == Hints()


@pytest.mark.parametrize(
    ("said", "hints"),
    [
        ({"iat": "MEDIUM", "priority": "high", "total_requests": None, "last": "yes"}, Hints()),
        ({"iat": -5, "priority": True, "last": 1}, Hints()),
        ({"iat": 1e300, "priority": 1e300}, Hints(NEXT_MAX_S, False, -PRIORITY_MAX)),
        ({"iat": float("nan"), "priority": float("-inf")}, Hints(0.0, False, PRIORITY_MAX)),
        ({"iat": 10**400, "priority": [1], "osl": -1}, Hints()),
        ({"osl": "77"}, Hints(output_tokens=77)),
        ({"osl": 1e300}, Hints(output_tokens=OUTPUT_MAX)),
        ({"osl": {"a": 1}}, Hints()),
    ],
)
def test_impossible_values_say_nothing_or_are_clipped(said: dict[str, Any], hints: Hints) -> None:
    assert hints_of(None, (said,)) == hints


def test_a_priority_counts_before_a_hint_of_one() -> None:
    body = {"messages": MESSAGES, "agent_hints": {"priority": 5}}
    assert ChatRequest.model_validate(body).priority == -5
    assert ChatRequest.model_validate(body | {"priority": 2}).priority == 2


def anything(rng: random.Random, depth: int = 3) -> Any:
    """Draw a JSON value."""
    kind = rng.randrange(9 if depth else 7)
    keys = ("agent_hints", "iat", "priority", "last", "total_requests", "osl", "", "x")
    if kind == 7:
        return [anything(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 8:
        return {key: anything(rng, depth - 1) for key in rng.sample(keys, rng.randrange(5))}
    plain = (None, True, rng.randint(-(10**20), 10**20), rng.gauss(0, 1e9), "1e999", "text\0\ud800", 0)
    return plain[kind]


@pytest.mark.parametrize("seed", seeds(2))
def test_hints_of_any_shape_are_no_error(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2000):
        fields = {name: anything(rng) for name in ("nvext", "agent_hints", "agent_hint") if rng.random() < 0.7}
        request = ChatRequest.model_validate({"messages": MESSAGES, **fields})
        hints = request.hints
        assert 0.0 <= hints.next_s <= NEXT_MAX_S
        assert 0 <= hints.output_tokens <= OUTPUT_MAX
        assert hints.priority == request.priority
        assert hints.priority is None or abs(hints.priority) <= PRIORITY_MAX


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 5},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 5},
    "/v1/messages": {"model": "demo", "messages": MESSAGES, "max_tokens": 5},
}


@pytest.mark.parametrize("path", BODIES)
def test_the_controller_hears_of_the_next_request(http: httpx.Client, fake: FakeController, path: str) -> None:
    for said in (
        {"nvext": {"agent_hints": {"iat": 2500, "priority": 3}}},
        {"agent_hints": {"last": True}},
        {"agent_hint": ["nonsense", {"iat": {}}]},
    ):
        answer = http.post(path, json=BODIES[path] | said)
        assert answer.status_code == 200, answer.text
    first, second, third = fake.behaviour.submits
    assert (first.next_s, first.is_last, first.priority) == (2.5, False, -3)
    assert (second.next_s, second.is_last, second.priority) == (0.0, True, 0)
    assert (third.next_s, third.is_last) == (0.0, False)
    assert first.tokens == second.tokens == third.tokens
