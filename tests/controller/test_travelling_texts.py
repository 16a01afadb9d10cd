"""Texts of modules, and KV that was kept behind a cut, come from other groups: under their names, to those who may
use them, and counted as what they are."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from controller.module_harness import ask, submit, words
from controller.tier_harness import CHUNK, TIERED, settle, simulate
from msgspec.structs import replace
from simulation.driver import Simulation
from simulation.module_prompts import text
from simulation.peers import Network
from simulation.streams import Stream

from trunkline.controller.engine.events import ExpectRequest
from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.engine.validation import problem_of_prefetch, request_of_prefetch
from trunkline.controller.messages import Holder, ModuleText, Prefetch
from trunkline.controller.service.offers import LIVE, OfferList
from trunkline.controller.tiers.fetching import FIRST_PULL_S
from trunkline.kvstore import peers
from trunkline.kvstore.chunks import blocks_for
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import OfferedPath
from trunkline.router.routing.handover import path_names
from trunkline.router.routing.names import KvIdentity

PEERED = replace(TIERED, disk_slots=0, remote=False, peers=True)
FIRST, SECOND = words(100, 3 * CHUNK), words(200, 2 * CHUNK + 3)
TEXTS = [text(FIRST, 0), text(SECOND, 20, 0)]
SEEN = len(FIRST) + len(SECOND)
RUNS = [(40, 5)]
HISTORY = words(100, 30)


@pytest.fixture(autouse=True)
def pulls_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated steps are so fast that pulls at the usual assumption would not be tried."""
    monkeypatch.setattr(peers, "PEER_READ_US", 1.0)


@dataclass
class Pair:
    """A group that gives, and one that takes."""

    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        self.giver, self.taker = self.join(), self.join()
        self.endpoints = self.network.export(self.giver.workers.pool, "giver", PEERED.ranks)
        self.taker.texts_of = lambda texts, salt, relocate: [self.told(text) for text in texts]

    def join(self) -> Simulation:
        simulation = simulate(PEERED)
        simulation.tiers.network = self.network
        return simulation

    def holder(self, stop: int) -> Holder:
        return Holder("giver", self.endpoints, 0, stop)

    def told(self, text: ModuleText) -> ModuleText:
        return replace(text, holders=[self.holder(blocks_for(len(text.tokens) // 4, CHUNK))])

    def offered(self) -> list[OfferedPath]:
        found = OfferList(self.giver.tree, LIVE, self.giver.now)
        while not found.advance(100):
            pass
        return found.page(0, 0).paths

    def hand_over(self, path: OfferedPath) -> None:
        names = path_names(path, KvIdentity(*self.giver.tree._identity, CHUNK))
        message = Prefetch(1, path.tokens, holders=[self.holder(len(names))], root=path.root, names=path.names)
        assert not problem_of_prefetch(message, 0)
        self.taker.receive(ExpectRequest((0, 1), request_of_prefetch(message), message.root, message.names))
        settle(self.taker)


def found(stream: Stream) -> tuple[int, int, int]:
    """Tokens of texts that a request sees, those that were cached, and those that came from a peer."""
    started = stream.started
    assert started is not None
    assert sum(started.tier_tokens) == started.cached_tokens
    return started.module_tokens, started.cached_tokens, started.tier_tokens[TierKind.PEER]


def encoded(simulation: Simulation) -> int:
    return simulation.tree.totals.encoded_texts


@pytest.mark.parametrize("is_warm", [True, False])
def test_texts_that_a_peer_has_are_not_computed_again(is_warm: bool) -> None:
    pair = Pair()
    if is_warm:
        ask(pair.giver, TEXTS, RUNS)
        settle(pair.giver)
    stream = ask(pair.taker, TEXTS, RUNS)
    if is_warm:
        assert found(stream) == (SEEN, SEEN, SEEN)
        assert encoded(pair.taker) == 0
    else:  # the peer has lost them
        assert found(stream) == (SEEN, 0, 0)
        assert encoded(pair.taker) == 2
    again = ask(pair.taker, TEXTS, RUNS, own=words(900, 5))
    assert found(again) == (SEEN, SEEN, 0), "they are this group's own now"
    check_integrity(pair.taker.scheduler)


@pytest.mark.parametrize("tokens", [CHUNK - 1, CHUNK, 3 * CHUNK, 3 * CHUNK + 1])
def test_a_job_waits_for_a_text_that_peers_send_slowly(tokens: int) -> None:
    """Also for its last chunk, which is not a whole one."""
    pair, sent = Pair(), [text(words(100, tokens), 0)]
    ask(pair.giver, sent, RUNS)
    settle(pair.giver)
    pair.taker.pace_s, pair.taker.tier_pace = FIRST_PULL_S / 100, 0.0
    request = submit(pair.taker, sent, RUNS)
    for _ in range(20):
        pair.taker.step()
    assert not pair.taker.workers.computed_tokens, "a text is computed that is on its way"
    pair.taker.tier_pace = 1.0
    pair.taker.run()
    assert found(pair.taker.streams[request]) == (tokens, tokens, tokens)
    assert encoded(pair.taker) == 0


def test_a_text_that_a_peer_has_at_another_position_is_computed() -> None:
    pair = Pair()
    ask(pair.giver, [text(FIRST, 8)], RUNS)
    settle(pair.giver)
    assert found(ask(pair.taker, [text(FIRST, 0)], RUNS)) == (len(FIRST), 0, 0)
    (path,) = [path for path in pair.offered() if path.root.startswith(b"m")]
    other = pair.join()
    pair.taker = other
    pair.hand_over(path)
    stream = ask(other, [text(FIRST, 0)], RUNS)
    assert stream.cached_tokens == len(FIRST), "a handover says where it was computed"
    assert not encoded(other)


def test_a_call_pulls_what_it_would_encode() -> None:
    pair = Pair()
    ask(pair.giver, TEXTS, RUNS)
    settle(pair.giver)
    ticket = pair.taker.modules_call("encode", TEXTS, pin_name="schema")
    pair.taker.run()
    reply = pair.taker.replies[ticket]
    assert (reply.status, reply.computed_tokens) == ("ok", 0)
    assert encoded(pair.taker) == 0
    pair.network.leave(pair.endpoints)
    assert found(ask(pair.taker, TEXTS, RUNS))[:2] == (SEEN, SEEN)


def test_a_text_of_which_a_peer_has_the_beginning_is_completed() -> None:
    pair = Pair()
    ask(pair.giver, [text(SECOND[: 2 * CHUNK], 0)], RUNS)
    settle(pair.giver)
    stream = ask(pair.taker, [text(SECOND, 0)], RUNS)
    assert found(stream)[1:] == (0, 0), "a text that is computed in part does not count as cached"
    assert pair.taker.workers.computed_tokens < len(SECOND) + 5 + 4
    assert pair.taker.engine.counters.tiers[TierKind.PEER].reads == 2


def test_kv_kept_behind_a_cut_is_handed_over_and_found_behind_that_cut_only() -> None:
    pair, drops = Pair(), ((CHUNK, 3 * CHUNK),)
    pair.giver.ask(HISTORY, 1)
    first = pair.giver.ask(HISTORY, 1, drops=drops)
    assert first.started is not None
    assert first.started.cut == "kept"
    pair.giver.ask([*HISTORY, *words(300, 2 * CHUNK)], 1, drops=drops)  # computed behind the cut
    settle(pair.giver)
    paths = pair.offered()
    assert any(path.names for path in paths)
    for path in paths:
        pair.hand_over(path)
    check_integrity(pair.taker.scheduler)
    whole = (len(HISTORY) + 2 * CHUNK) // CHUNK * CHUNK - 2 * CHUNK
    stream = pair.taker.ask([*HISTORY, *words(300, 2 * CHUNK)], 1, drops=drops)
    assert stream.started is not None
    assert (stream.started.cut, stream.started.exact) == ("kept", False)
    assert stream.cached_tokens == whole
    for other in (((2 * CHUNK, 3 * CHUNK),), ()):  # the plain tree has the three chunks that were not moved
        plain = pair.taker.ask([*HISTORY, *words(300, 2 * CHUNK)], 1, drops=other)
        assert (plain.cached_tokens or 0) <= 3 * CHUNK, "KV kept behind a cut is found without that cut"


def test_names_behind_a_cut_only() -> None:
    path = Prefetch(1, b"\0" * 16, root=b"s", names=b"n" * 16)
    assert not problem_of_prefetch(path, 0)
    assert problem_of_prefetch(replace(path, names=b"n" * 15), 0)
    assert problem_of_prefetch(replace(path, root=b""), 0)
    pair = Pair()
    pair.giver.ask(HISTORY, 1)
    settle(pair.giver)
    (plain,) = pair.offered()
    pair.hand_over(replace(plain, names=b"n" * 16))
    assert pair.taker.ask(HISTORY, 1).cached_tokens == len(plain.tokens) // 4, "names of a plain path are taken"
