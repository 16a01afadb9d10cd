"""A controller that says what no right controller says: at most its connection ends."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from router.fake_controller import FakeController
from router.harness import ADMIN_KEY, RunningRouter, running, wait_until
from seeds import seeds
from simulation.hostile import altered

from trunkline.controller.reports import PromptLogprobs, TopLogprobs
from trunkline.kvstore.chunks import pack_int32
from trunkline.router.messages import (
    PROTOCOL,
    BeamsFound,
    DraftsTried,
    EventsReply,
    Finished,
    Flushed,
    Hypothesis,
    KvEvents,
    ModulesReply,
    Outputs,
    Prefetched,
    PromptScored,
    Started,
    State,
    TierState,
    TreeDescription,
)
from trunkline.router.routing.index import ChunkIndex
from trunkline.router.streams.controller_socket import problem_of_reply
from trunkline.router.streams.kv_feed import FeedState
from trunkline.router.streams.link import ControllerLink
from trunkline.router.text.tokenizer import Tokenizer

PROMPT = {"model": "demo", "prompt": "import", "max_tokens": 4}
FRAMES = 2000
SEEDS = seeds(6)


def replies(chosen: random.Random, live: list[int], state: State) -> list[msgspec.Struct]:
    """One of each kind of message that a controller sends; `live` are numbers of requests that run."""
    number = chosen.choice(live) if live else 1
    one = pack_int32([number])
    top = TopLogprobs(-1.0, pack_int32([5, 6]), b"\0\0\0\0\0\0\0\0")
    scores = PromptLogprobs(1, b"\0" * 4, pack_int32([1]), pack_int32([5, 6]), b"\0" * 8)
    tiers = [TierState("device", 10, 5, 1, 2, 3, 4, 0), TierState("disk", 10, 5, 1, 2, 3, 4, 0, "full")]
    return [
        Outputs(1, one, pack_int32([51]), drafts=[DraftsTried(number, 3, 2, True)]),
        Outputs(1, one, pack_int32([51]), logprobs={0: top}, samples=b"\0\0"),
        Outputs(1, started=[Started(number, 3, [3, 0, 0, 0], "new", 3)]),
        Outputs(1, finished=[Finished(number, "length"), Finished(number, "stop", sample=0)]),
        Outputs(1, beams=[BeamsFound(number, [Hypothesis(one, -1.0, -2.0, "stop")])]),
        Outputs(1, prompt_logprobs=[PromptScored(number, scores)]),
        msgspec.structs.replace(
            state, tiers=tiers, misses={"new": 3}, load_us=[0.0, 1.0, 2.0, 3.0], prefill_us=5.0
        ),
        Flushed(1, number, 3),
        Prefetched(1, number, 3, 4),
        ModulesReply(1, number, "ok", "", one, one, 3, 100),
        EventsReply(1, number, b"12345678", 3, False, bytes(32), b"\1\2", False),
        TreeDescription(seq=1, ticket=number, names=bytes(16), parents=pack_int32([-1]), tokens=pack_int32([4])),
    ]


@pytest.fixture
def pair(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[RunningRouter, list[FakeController]]]:
    place = folder / "hostile"
    place.mkdir(exist_ok=True)
    with running(place, tokenizer, controllers=2) as (router, fakes):
        yield router, fakes


def in_loop(router: RunningRouter, work: Any) -> Any:
    """What a function returns that runs in the router's loop."""

    async def call() -> Any:
        return work()

    assert router._loop is not None
    return asyncio.run_coroutine_threadsafe(call(), router._loop).result(120)


def inject(router: RunningRouter, link: ControllerLink, seed: int, failures: Counter[str]) -> int:
    """Let a link hear many wrong messages; how many of them would have ended the connection."""
    chosen, losses = random.Random(seed), 0
    state = link.state
    assert state is not None

    def lost(reason: str) -> None:
        nonlocal losses
        losses += 1

    link.lost = lost  # type: ignore[method-assign]
    socket = link._socket
    assert socket is not None
    for _ in range(FRAMES):
        frame = altered(chosen, chosen.choice(replies(chosen, list(link._receivers), state)))
        socket._expected = None
        try:
            socket._receive(frame, [])
        except Exception as error:  # noqa: BLE001 (every kind is to be shown)
            failures[f"{type(error).__name__}: {error}"[:200]] += 1
    link.state = state
    del link.lost
    return losses


@pytest.mark.parametrize("seed", seeds(1))
def test_nonsense_ends_at_most_its_connection(pair: tuple[RunningRouter, list[FakeController]], seed: int) -> None:
    router, fakes = pair
    failures: Counter[str] = Counter()
    for fake in fakes:
        fake.behaviour.hold = True
    bodies: list[dict[str, Any]] = [
        {"stream": True},
        {"n": 2, "stream": True},
        {"logprobs": 2},
        {"echo": True, "logprobs": 1},
    ] * 4
    clients = [threading.Thread(target=_ask, args=(router.url, {**PROMPT, **body})) for body in bodies]
    for client in clients:
        client.start()
    wait_until(lambda: router.inflight >= len(bodies) - 2)
    began = time.monotonic()
    losses = in_loop(router, lambda: inject(router, router.service.links[1], seed, failures))
    print(f"seed {seed}: {losses} of {FRAMES} end the connection; {time.monotonic() - began:.1f} s")
    for fake in fakes:
        fake.behaviour.hold = False
    assert not failures, failures.most_common(20)
    assert 0 < losses < FRAMES
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    for path in ("/metrics", "/health"):
        assert httpx.get(router.url + path, headers=headers, timeout=20).status_code == 200, path
    in_loop(router, lambda: router.service.links[1].lost("enough"))
    for client in clients:
        client.join(30)
        assert not client.is_alive()
    wait_until(lambda: router.ready == 2)
    for _ in range(4):
        answer = httpx.post(f"{router.url}/v1/completions", json=PROMPT, timeout=20)
        assert answer.status_code == 200


def _ask(url: str, body: dict[str, Any]) -> None:
    httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_nonsense_among_events_is_a_gap_at_most() -> None:
    """In the end the index has what the controller has."""
    for seed in SEEDS:
        chosen, index = random.Random(seed), ChunkIndex(1)
        feed = FeedState(0, index, 0.0)
        refused = 0
        for number in range(600):
            right: list[msgspec.Struct] = [
                KvEvents(b"12345678", number, bytes(16), b"\1", 1, 2),
                EventsReply(
                    1, 1, b"12345678", number, chosen.random() < 0.5, bytes(32), b"\1\2", chosen.random() < 0.3
                ),
            ]
            frame = altered(chosen, chosen.choice(right))
            try:
                if frame[:20].find(b"kv_events") >= 0:
                    feed.heard(msgspec.msgpack.decode(frame, type=KvEvents), float(number))
                else:
                    reply = msgspec.msgpack.decode(frame, type=EventsReply)
                    feed.answered(feed._calls, reply, float(number))
            except (msgspec.DecodeError, ValueError, RecursionError):
                refused += 1
                feed.failed(feed._calls, float(number))
            feed.tick(float(number))
        assert refused
        # The controller comes to its senses: whatever was believed, a snapshot puts it right.
        ask = feed.heard(KvEvents(b"87654321", 5), 1e6)
        assert ask is not None
        names = bytes(range(32))
        assert (
            feed.answered(ask.number, EventsReply(1, 1, b"87654321", 5, True, names, b"\1\2", False), 1e6 + 2)
            is None
        )
        assert feed.status(1e6 + 2) == "current"


def test_a_controller_of_another_version_is_told_apart(folder: Path, tokenizer: Tokenizer) -> None:
    """Nothing is sent to it, people learn why, and the others serve."""
    place = folder / "versions"
    place.mkdir()
    with running(place, tokenizer, controllers=2) as (router, fakes):
        state = fakes[1]._state
        fakes[1]._state = lambda sequence: msgspec.structs.replace(  # type: ignore[method-assign]
            state(sequence), protocol=PROTOCOL - 1
        )
        wait_until(lambda: router.ready == 1)
        assert f"speaks protocol {PROTOCOL - 1}, this router {PROTOCOL}" in router.service.links[1].why_not_ready()
        for _ in range(4):
            assert httpx.post(f"{router.url}/v1/completions", json=PROMPT, timeout=20).status_code == 200
        assert not fakes[1].live


def test_a_controller_of_a_later_version_may_report_more(folder: Path, tokenizer: Tokenizer) -> None:
    """Tiers, times, reasons and fields that this version does not know: shown as far as possible, never a loss."""
    place = folder / "later"
    place.mkdir()
    with running(place, tokenizer, controllers=1) as (router, fakes):
        fake, state = fakes[0], fakes[0]._state
        tiers = [TierState("host", 10, 5, 1, 2, 3, 4, 0), TierState("moon", 10, 5, 1, 2, 3, 4, 0)]
        fake._state = lambda sequence: msgspec.structs.replace(  # type: ignore[method-assign]
            state(sequence), tiers=tiers, load_us=[1.0] * 7, misses={"eclipse": 2}, pulls_given_up={"late": 1}
        )
        fake.behaviour.found = lambda submit: Started(submit.request, 2, [1, 0, 0, 0, 0, 1], "eclipse", 2)
        links = router.service.links
        wait_until(lambda: bool(links[0].state and len(links[0].state.tiers) == 2))
        assert router.ready == 1, links[0].why_not_ready()
        answer = httpx.post(f"{router.url}/v1/completions", json=PROMPT, timeout=20)
        assert answer.status_code == 200
        assert answer.json()["cache"]["reason"] == "eclipse"
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        metrics = httpx.get(f"{router.url}/metrics", headers=headers, timeout=20).text
        assert 'trunkline_tier_slots{controller="0",tier="moon"} 10.0' in metrics
        known = links[0].state
        assert known is not None
        packed = msgspec.msgpack.decode(msgspec.msgpack.encode(known))
        frame = msgspec.msgpack.encode([*packed, ["a field", "of a later version"]])
        assert problem_of_reply(msgspec.msgpack.decode(frame, type=State)) == ""
        for many in (
            {"tiers": [tiers[0]] * 17},
            {"tiers": [TierState("m" * 33, 1, 1, 1, 1, 1, 1, 1)]},
            {"load_us": [1.0] * 17},
            {"misses": {str(number): 1 for number in range(17)}},
            {"pulls_given_up": {"m" * 33: 1}},
        ):
            assert problem_of_reply(msgspec.structs.replace(known, **many)), many
