"""Open tails: what routers remember of chunks that are not full, and where the next turns of conversations go."""

from __future__ import annotations

import random

import pytest
from seeds import seeds

from trunkline.kvstore.chunks import pack_int32
from trunkline.router.routing.core import Decision, RouteRequest, RoutingCore
from trunkline.router.routing.names import KvIdentity
from trunkline.router.routing.tails import TAIL_SECONDS, Tail, Tails

CHUNK = 16
MODEL = KvIdentity(b"model", "float32", CHUNK)
NAMES = ("red", "green", "blue", "white")


def tokens_of(*tokens: int) -> bytes:
    return pack_int32(list(tokens))


def keep(tails: Tails, ticket: int, parent: bytes, tokens: bytes, controller: str, now: float = 0.0) -> None:
    tails.expect(ticket, Tail(parent, tokens), controller)
    tails.ended(ticket, now, is_kept=True)


@pytest.mark.parametrize("seed", seeds(20))
def test_the_longest_tail_is_found(seed: int) -> None:
    """Compared with a search through all of them, among tails of few different tokens."""
    rng = random.Random(seed)
    bytes_max = rng.choice([5_000, 1 << 20])
    tails = Tails(bytes_max)
    known: dict[tuple[bytes, bytes], str] = {}
    for ticket in range(1, 1500):
        parent = rng.choice([b"p", b"q"])
        tokens = tokens_of(*(rng.randrange(1, 4) for _ in range(rng.randrange(1, CHUNK))))
        if rng.random() < 0.5:
            controller = rng.choice(NAMES)
            keep(tails, ticket, parent, tokens, controller)
            known.pop((parent, tokens), None)
            known[parent, tokens] = controller
            while len(known) > len(tails):
                del known[next(iter(known))]
        else:
            fitting = [key for key in known if key[0] == parent and tokens.startswith(key[1])]
            best = max(fitting, key=lambda key: len(key[1]), default=None)
            expected = ("", 0) if best is None else (known[best], len(best[1]) // 4)
            assert tails.find(parent, tokens, 0.0) == expected
        assert tails.bytes <= bytes_max
    for key, controller in known.items():
        assert tails.find(*key, 0.0) == (controller, len(key[1]) // 4)


def test_a_tail_is_known_when_its_request_has_ended() -> None:
    tails = Tails()
    tails.expect(1, Tail(b"p", tokens_of(1, 2)), "red")
    assert tails.find(b"p", tokens_of(1, 2, 3), 0.0) == ("", 0)
    tails.ended(1, 0.0, is_kept=True)
    assert tails.find(b"p", tokens_of(1, 2, 3), 0.0) == ("red", 2)
    tails.expect(2, Tail(b"p", tokens_of(5)), "red")
    tails.ended(2, 0.0, is_kept=False)
    tails.ended(2, 0.0, is_kept=True)
    tails.ended(3, 0.0, is_kept=True)
    assert tails.find(b"p", tokens_of(5, 6), 0.0) == ("", 0)
    assert len(tails) == 1


def test_tails_are_forgotten_after_some_time() -> None:
    tails = Tails()
    keep(tails, 1, b"p", tokens_of(1), "red", 0.0)
    keep(tails, 2, b"p", tokens_of(2), "red", TAIL_SECONDS)
    assert tails.find(b"p", tokens_of(1), TAIL_SECONDS) == ("red", 1)
    assert tails.find(b"p", tokens_of(1), TAIL_SECONDS + 1) == ("", 0)
    keep(tails, 3, b"p", tokens_of(3), "red", TAIL_SECONDS + 1)
    assert len(tails) == 2


# Routing


def made_core(*, seed: int = 0) -> RoutingCore:
    core = RoutingCore(NAMES, replica_seed=seed)
    for slot in range(len(NAMES)):
        core.traits.set_identity(slot, MODEL)
        core.set_available(slot, True)
    return core


def send(core: RoutingCore, ticket: int, request: RouteRequest, *, ends: bool = True) -> Decision:
    decision = core.route(request, 0.0)
    core.sent(ticket, decision, request, 0.0)
    if ends:
        core.started(ticket, 0.0)
        core.ended(ticket, 0.0)
    return decision


@pytest.mark.parametrize("seed", seeds(5))
def test_short_conversations_stay(seed: int) -> None:
    """Several at the same time, each of at most two chunks and without a label, while others are running."""
    rng = random.Random(seed)
    core = made_core(seed=seed)
    talks = [[rng.randrange(1000) for _ in range(rng.randrange(4, 9))] for _ in range(12)]
    homes: dict[int, int] = {}
    ticket = 0
    for turn in range(4):
        order = list(range(len(talks)))
        rng.shuffle(order)
        for number in order:
            ticket += 1
            request = RouteRequest(pack_int32(talks[number]))
            decision = send(core, ticket, request)
            assert decision.controller == homes.setdefault(number, decision.controller)
            assert (decision.reason == "tail") == (turn > 0), "also when the chunk is full that the tail began"
            talks[number] += [rng.randrange(1000) for _ in range(rng.randrange(2, 6))]
    assert len(set(homes.values())) == len(NAMES)


def test_tokens_of_a_tail_count_as_cached() -> None:
    core = made_core()
    chosen = send(core, 1, RouteRequest(tokens_of(*range(10)))).controller
    decision = core.route(RouteRequest(tokens_of(*range(30))), 0.0)
    assert (decision.controller, decision.cached_tokens, decision.new_tokens) == (chosen, 10, 20)
    assert core.route(RouteRequest(tokens_of(*range(9), 99)), 0.0).cached_tokens == 0
    assert core.route(RouteRequest(tokens_of(*range(30)), salt=b"other"), 0.0).cached_tokens == 0


def test_a_tail_behind_chunks_counts_where_the_chunks_are() -> None:
    core = made_core()
    chosen = send(core, 1, RouteRequest(tokens_of(*range(CHUNK + 4)))).controller
    longer = RouteRequest(tokens_of(*range(CHUNK + 9)))
    decision = core.route(longer, 0.0)
    assert (decision.controller, decision.cached_tokens, decision.reason) == (chosen, CHUNK + 4, "tail")
    core.index.remove(chosen)
    core.index.add(chosen)
    assert core.route(longer, 0.0).cached_tokens == 0, "a tail without the chunks before it is worth nothing"


def test_a_conversation_leaves_a_busy_controller() -> None:
    core = made_core()
    chosen = send(core, 1, RouteRequest(tokens_of(1, 2, 3))).controller
    for ticket in range(2, 12):
        other = RouteRequest(tokens_of(ticket), pinned=chosen)
        send(core, ticket, other, ends=False)
    decision = core.route(RouteRequest(tokens_of(1, 2, 3, 4)), 0.0)
    assert decision.controller != chosen


def test_routers_agree_on_short_conversations_that_have_a_name() -> None:
    """While no controller can tell of a full chunk, other routers' tails are not known."""
    cores = [made_core(seed=seed) for seed in range(3)]
    chosen = set()
    for number in range(40):
        homes = set()
        for turn, core in enumerate(cores):
            talk = RouteRequest(tokens_of(number, *range(1 + turn)), session=f"opening {number}")
            homes.add(send(core, number, talk).controller)
        assert len(homes) == 1
        chosen |= homes
    assert len(chosen) == len(NAMES)
