"""One group pulls from others what routers say they have: which chunks, how long a request waits for them, and
what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from controller.tier_harness import CHUNK, TIERED, miss_of, pulled_of, settle, simulate
from msgspec.structs import replace
from simulation.driver import Simulation
from simulation.peers import Network
from simulation.streams import Stream

from trunkline.controller.cache.radix_tree import PENDING
from trunkline.controller.engine.events import ExpectRequest
from trunkline.controller.engine.integrity import check_integrity
from trunkline.controller.engine.validation import problem_of_prefetch, problem_of_submit, request_of_prefetch
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Holder, Prefetch, Submit
from trunkline.controller.service.status import state_of
from trunkline.controller.tiers.fetching import FIRST_PULL_S, PATIENCE_LEAST_S
from trunkline.kvstore import peers
from trunkline.kvstore.chunks import NAME_BYTES, pack_int32
from trunkline.kvstore.tier import TierKind
from trunkline.router.routing.core import RouteRequest, RoutingCore
from trunkline.router.routing.names import KvIdentity
from trunkline.router.streams.introductions import AGAIN_SECONDS
from trunkline.worker.messages import PeerAt, Sampling, StepPlan, TierMoves, TierOrder

PEERED = replace(TIERED, disk_slots=0, remote=False, peers=True)
PROMPT = list(range(100, 130))
WHOLE = len(PROMPT) // CHUNK


@pytest.fixture(autouse=True)
def pulls_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated steps are so fast that pulls at the usual assumption would not be tried."""
    monkeypatch.setattr(peers, "PEER_READ_US", 1.0)


@dataclass
class Pair:
    """A group that has computed `PROMPT`, and one that has not."""

    config: EngineConfig = PEERED
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        self.giver = self.join()
        self.endpoints = self.network.export(self.giver.workers.pool, "giver", self.config.ranks)
        self.giver.ask(PROMPT, 1)
        settle(self.giver)
        self.taker = self.join()

    def join(self) -> Simulation:
        simulation = simulate(self.config)
        simulation.tiers.network = self.network
        return simulation

    def holder(self, start: int = 0, stop: int = WHOLE) -> Holder:
        return Holder("giver", self.endpoints, start, stop)

    def ask(self, *said: Holder, prompt: list[int] = PROMPT, **options: object) -> Stream:
        self.taker.holders_of = lambda _: list(said)
        return self.taker.ask(prompt, 1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_a_peer_has_is_not_computed_again(ranks: int) -> None:
    pair = Pair(replace(PEERED, ranks=ranks))
    stream = pair.ask(pair.holder())
    assert stream.cached_tokens == pulled_of(stream) == WHOLE * CHUNK
    assert pair.taker.workers.computed_tokens == len(PROMPT) - WHOLE * CHUNK
    assert pair.taker.engine.counters.tiers[TierKind.PEER].reads == WHOLE
    again = pair.ask(pair.holder())
    assert pulled_of(again) == 0, "it is this group's own now"
    assert again.cached_tokens == len(PROMPT) - 1


def test_only_what_goes_on_from_what_is_known_is_of_use() -> None:
    pair = Pair()
    assert pulled_of(pair.ask(pair.holder(1))) == 0
    assert not pair.network.asked
    other = Pair()
    assert pulled_of(other.ask(other.holder(0, 3), other.holder(4))) == 3 * CHUNK
    assert len(other.network.asked[other.endpoints[0]]) == 3


def test_of_runs_that_overlap_the_first_counts_and_each_peer_gives_its_own() -> None:
    pair = Pair()
    second = pair.network.export(pair.giver.workers.pool, "second", 1)
    pair.ask(pair.holder(0, 3), Holder("second", second, 2, WHOLE))
    assert [len(pair.network.asked[at]) for at in (pair.endpoints[0], second[0])] == [3, WHOLE - 3]


def test_what_is_computed_meanwhile_is_not_pulled() -> None:
    pair = Pair()
    first = pair.taker.submit(PROMPT, 4)
    pair.taker.plan()  # it is being computed now
    pair.taker.holders_of = lambda _: [pair.holder()]
    second = pair.taker.submit([*PROMPT, 7, 8], 4)
    pair.taker.finish()
    assert not pair.network.asked
    assert [pulled_of(pair.taker.streams[number]) for number in (first, second)] == [0, 0]


def test_what_lies_behind_chunks_that_are_being_computed_is_pulled_beside_that() -> None:
    pair = Pair()
    pair.taker.submit(PROMPT[: 3 * CHUNK + 1], 4)
    pair.taker.plan()
    pair.taker.holders_of = lambda _: [pair.holder()]
    second = pair.taker.submit(PROMPT, 1)
    pair.taker.finish()
    assert len(pair.network.asked[pair.endpoints[0]]) == WHOLE - 3
    assert pulled_of(pair.taker.streams[second]) == (WHOLE - 3) * CHUNK


def test_a_peer_that_does_not_have_it_is_a_miss() -> None:
    pair = Pair()
    pair.giver.flush_cache()
    pair.giver.workers.pool.names.clear()
    stream = pair.ask(pair.holder())
    assert miss_of(stream) == ("lost", 0)
    assert pair.taker.engine.counters.pulls_given_up.keys() == {"lost"}


def test_a_peer_that_is_gone_is_a_miss_and_is_left_alone() -> None:
    pair = Pair()
    pair.network.leave(pair.endpoints)
    stream = pair.ask(pair.holder())
    assert miss_of(stream) == ("lost", 0)
    stats = pair.taker.tree.tiers.stats()[TierKind.PEER]
    assert stats.problem == "giver: broken"
    assert pair.taker.engine.counters.pulls_given_up.keys() == {"gone"}
    failures = stats.totals.failures
    pair.ask(pair.holder(), prompt=[*PROMPT[:-9], 1, 2])
    assert stats.totals.failures == failures, "it is not asked while it is paused"


@pytest.mark.parametrize(("knows_it", "patience"), [(False, FIRST_PULL_S), (True, PATIENCE_LEAST_S)])
def test_a_silent_peer_costs_no_more_than_patience(knows_it: bool, patience: float) -> None:
    pair = Pair()
    if knows_it:
        pair.ask(pair.holder(0, 1), prompt=PROMPT[: CHUNK + 1])
    pair.network.silent.update(pair.endpoints)
    pair.taker.pace_s, pair.taker.tier_pace = PATIENCE_LEAST_S / 4, 0.0  # no rank has given it up yet
    pair.taker.holders_of = lambda _: [pair.holder()]
    began, request = pair.taker.now, pair.taker.submit(PROMPT, 1)
    stream = pair.taker.streams[request]
    pair.taker.step_until(lambda: stream.started)
    assert patience <= pair.taker.now - began <= patience + PATIENCE_LEAST_S
    assert miss_of(stream) == ("slow", CHUNK * knows_it)
    assert pair.taker.engine.counters.pulls_given_up == {"slow": WHOLE - knows_it}
    pair.taker.tier_pace = 1.0
    pair.taker.finish()


def test_a_first_pull_that_waits_for_a_connection_is_not_given_up() -> None:
    pair = Pair()
    pair.network.silent.update(pair.endpoints)
    pair.taker.pace_s = PATIENCE_LEAST_S / 4
    pair.taker.holders_of = lambda _: [pair.holder()]
    began, request = pair.taker.now, pair.taker.submit(PROMPT, 1)
    pair.taker.step_until(lambda: pair.taker.now > began + 3 * PATIENCE_LEAST_S)
    pair.network.silent.clear()
    pair.taker.finish()
    assert pulled_of(pair.taker.streams[request]) == WHOLE * CHUNK


def test_a_silent_peer_does_not_stop_pulls_from_another() -> None:
    pair = Pair()
    second = pair.network.export(pair.giver.workers.pool, "second", 1)
    pair.network.silent.update(pair.endpoints)
    pair.taker.holders_of = lambda submit: [pair.holder() if submit.salt else Holder("second", second, 0, WHOLE)]
    slow = pair.taker.submit(PROMPT, 1, salt=b"another tenant")
    fast = pair.taker.submit(PROMPT, 1)
    pair.taker.step_until(lambda: pair.taker.streams[fast].ended)
    assert pulled_of(pair.taker.streams[fast]) == WHOLE * CHUNK
    assert pair.taker.streams[slow].started is None or pulled_of(pair.taker.streams[slow]) == 0
    pair.taker.finish()


def test_pulling_is_tried_only_where_it_is_faster_and_the_first_pull_says_what_it_costs() -> None:
    pair = Pair()
    book = pair.taker.tree.tiers.peers
    peer = book.meet("giver", tuple(pair.endpoints), 0.0)
    assert peer is not None
    assert book.read_us == state_of(pair.taker.engine).load_us[TierKind.PEER] == 0.0, "nothing is known yet"
    peer.health.read_us = 1e9
    assert pulled_of(pair.ask(pair.holder(), salt=b"x")) == 0
    assert peer.health.read_us < 1e9, "the estimate is doubted"
    peer.health.read_us = 0.5
    assert not peer.health.is_measured
    pair.taker.tier_pace = 0.1
    pair.ask(pair.holder())
    assert peer.health.is_measured
    assert 0.0 < peer.health.read_us == book.read_us
    assert state_of(pair.taker.engine).load_us[TierKind.PEER] > 0


def test_pulls_that_were_slow_once_are_planned_again_after_a_while() -> None:
    """Prompts are computed apart only if pulls seem fast enough. Where each prompt is another one, there are no
    other pulls; and the introductions of groups to each other go on, so that no peer is forgotten."""
    pair, long = Pair(), RouteRequest(pack_int32(list(range(2000))), may_part=True)
    core = RoutingCore(["giver", "taker"])
    for index, role in enumerate(("prefill", "decode")):
        core.traits.set_role(index, role)
        core.traits.set_identity(index, KvIdentity(b"model", "float32", CHUNK))
        core.traits.set_exports(index, [f"ipc:///{index}"])
        core.set_available(index, True)

    def is_parted() -> bool:
        for index, group in enumerate((pair.giver, pair.taker)):
            state = state_of(group.engine)
            core.traits.set_costs(index, state.prefill_us, state.load_us)
        return core.route(long, 0.0).goes_on == 1

    assert is_parted(), "nothing is known of pulls"
    peer = pair.taker.tree.tiers.peers.meet("giver", tuple(pair.endpoints), pair.taker.now)
    assert peer is not None
    pair.taker.now += 1.0
    peer.health.ordered(is_write=False)
    peer.health.succeeded(is_write=False, ordered=0.0, now=pair.taker.now, elapsed_us=1e4)
    assert not is_parted()
    introduction = Prefetch(1, b"", holders=[pair.holder(0, 1)], root=b"s")
    since = pair.taker.now
    while not is_parted():
        assert pair.taker.now < since + 3 * 3600.0
        pair.taker.receive(ExpectRequest((1, 1), request_of_prefetch(introduction), introduction.root))
        for _ in range(int(AGAIN_SECONDS) // 10):
            pair.taker.now += 10.0
            pair.taker.plan()
    assert pair.taker.now > since + 600.0, "not while the measurement is young"
    assert not pair.network.asked


def test_ranks_are_told_where_a_peer_is_before_the_first_pull_and_when_it_is_forgotten() -> None:
    pair, orders = Pair(), list[TierOrder]()
    receive = pair.taker.tiers.receive

    def receive_and_note(message: TierOrder) -> None:
        orders.append(message)
        receive(message)

    pair.taker.tiers.receive = receive_and_note  # type: ignore[method-assign]
    pair.ask(pair.holder())
    assert orders[0] == PeerAt(0, pair.endpoints)
    assert [order for order in orders if isinstance(order, PeerAt)] == orders[:1]
    pair.taker.now += 1000.0
    pair.taker.plan()
    pair.taker.plan()
    pair.taker.move_chunks()
    assert orders[-1] == PeerAt(0, [])
    pair.taker.lose_workers()
    pair.taker.replace_workers()
    orders.clear()
    pair.taker.tiers.receive = orders.append  # type: ignore[method-assign, assignment]
    pair.taker.submit([*PROMPT, 1], 1)
    pair.taker.plan()
    pair.taker.move_chunks()
    assert orders[0] == PeerAt(0, pair.endpoints), "each epoch is told anew"


def test_ranks_are_told_of_peers_to_which_a_router_introduces_the_group_while_it_is_idle() -> None:
    pair, orders = Pair(), list[TierOrder]()
    pair.taker.tiers.receive = orders.append  # type: ignore[method-assign, assignment]
    said = Prefetch(1, b"", holders=[pair.holder(0, 1)], root=b"s")
    assert not problem_of_prefetch(said, 1000)
    pair.taker.receive(ExpectRequest((1, 1), request_of_prefetch(said), said.root))
    pair.taker.plan()
    pair.taker.move_chunks()
    assert orders == [PeerAt(0, pair.endpoints)]
    assert not pair.network.asked


@pytest.mark.parametrize("is_on", [False, True])
def test_plans_name_what_they_save_only_if_there_are_peers(is_on: bool) -> None:
    simulation, plans = simulate(replace(PEERED, peers=is_on)), list[StepPlan]()
    simulation.workers.observer = plans.append
    simulation.ask(PROMPT, 9)
    settle(simulation)
    for plan in plans:
        saved = (len(plan.saves) + len(plan.late_saves)) // 12
        assert len(plan.save_names) == is_on * saved * NAME_BYTES
    names = b"".join(plan.save_names for plan in plans)
    assert not is_on or names[:NAME_BYTES] == next(iter(simulation.tree.nodes())).name
    assert TierKind.PEER in simulation.tree.tiers.stats() or not is_on


def test_a_path_that_is_handed_over_is_near_and_stays() -> None:
    pair = Pair()
    root = pair.giver.tree.find_root(b"")
    assert root is not None
    tokens = pack_int32(PROMPT[: WHOLE * CHUNK])
    message = Prefetch(7, tokens, holders=[pair.holder()], root=root.key)
    assert not problem_of_prefetch(message, 0)
    pair.taker.receive(ExpectRequest((0, 7), request_of_prefetch(message), message.root))
    assert pair.taker.wanted.expected == (WHOLE * CHUNK, WHOLE * CHUNK)
    settle(pair.taker)
    pair.network.leave(pair.endpoints)
    pair.taker.now += 1000.0
    settle(pair.taker)
    assert pair.taker.ask(PROMPT, 1).cached_tokens == WHOLE * CHUNK
    assert not pair.taker.workers.computed_tokens - (len(PROMPT) - WHOLE * CHUNK)


def test_what_no_job_wants_any_more_is_forgotten() -> None:
    pair = Pair()
    pair.network.silent.update(pair.endpoints)
    pair.taker.holders_of = lambda _: [pair.holder()]
    request = pair.taker.submit(PROMPT, 1)
    pair.taker.plan()
    assert pair.taker.tree.tiers.stats()[TierKind.PEER].used == WHOLE
    pair.taker.abort(request)
    settle(pair.taker)
    assert pair.taker.tree.tiers.stats()[TierKind.PEER].used == 0
    assert not pair.taker.tree.node_count


def test_a_peers_chunks_come_in_place_of_what_was_used_last() -> None:
    """Without a tier below, host memory is always full: what a waiting request wants is worth more."""
    pair = Pair(replace(PEERED, host_slots=10))
    for number in range(4):
        pair.taker.ask([1000 * number + i for i in range(20)], 1)
    settle(pair.taker)
    pair.taker.scheduler.kv.make_room(pair.config.num_blocks)
    assert not pair.taker.tree.tiers.copies.host.free_count
    assert pulled_of(pair.ask(pair.holder())) == WHOLE * CHUNK


def test_a_cut_prompt_pulls_what_is_left_as_a_plain_one() -> None:
    pair = Pair()
    cut = [*range(50), *PROMPT]
    stream = pair.ask(pair.holder(), prompt=cut, drops=((0, 50),))
    assert stream.started is not None
    assert (stream.started.cut, pulled_of(stream)) == ("recomputed", WHOLE * CHUNK)


@pytest.mark.parametrize(
    "wrong",
    [
        Holder("a", [], 0, 1),
        Holder("a", ["ipc://x"], 2, 2),
        Holder("a", ["ipc://x"], -1, 2),
        Holder("a" * 5000, ["ipc://x"], 0, 2),
    ],
)
def test_holders_that_make_no_sense_are_refused(wrong: Holder) -> None:
    sound = Submit(1, pack_int32(PROMPT), len(PROMPT), 1, Sampling())
    assert problem_of_submit(replace(sound, holders=[wrong]), 0)
    assert problem_of_prefetch(Prefetch(1, sound.tokens, holders=[wrong]), 0)
    assert not problem_of_submit(replace(sound, holders=[Holder("a", ["ipc://x"], 0, 2)]), 0)


def test_what_exports_in_a_way_that_is_not_known_is_of_no_use() -> None:
    """A later version may have one. The request must not suffer for it."""
    pair = Pair()
    pair.endpoints = ["rdma://x"]
    stream = pair.ask(pair.holder())
    assert pulled_of(stream) == 0
    assert pair.taker.workers.computed_tokens == len(PROMPT)


def test_exports_are_told_while_there_are_workers() -> None:
    pair = Pair()
    assert state_of(pair.taker.engine, exports=["ipc://x"]).exports == ["ipc://x"]
    pair.taker.lose_workers()
    assert state_of(pair.taker.engine, exports=["ipc://x"]).exports == []
    assert state_of(simulate(TIERED).engine, exports=["ipc://x"]).exports == []


def test_chunks_that_came_behind_one_that_did_not_go_with_it() -> None:
    """A request gives up waiting, begins to compute, and is aborted before it gets to a chunk that is missing."""
    pair = Pair(replace(PEERED, token_budget=9, max_inflight_steps=1))
    simulation = pair.taker
    simulation.holders_of = lambda _: [pair.holder()]
    request = simulation.submit(PROMPT, 1)
    simulation.plan()
    (_, moves) = simulation.wanted.orders
    assert isinstance(moves, TierMoves)
    late = [moves.moves.pop(5), moves.moves.pop(1)]
    simulation.tier_pace = 1.0
    simulation.move_chunks()
    (group,) = simulation.scheduler.queue
    simulation.scheduler.fetching.give_up(group)
    simulation.scheduler.fetching.expect(group, [])
    simulation.now += simulation.pace_s
    simulation.plan()
    missing = [node for node in simulation.tree.nodes() if not node.is_stored]
    assert [(node.depth, node.ready_step == PENDING) for node in missing] == [(2, False), (6, True)]
    simulation.abort(request)
    check_integrity(simulation.scheduler)
    simulation.tiers.receive(TierMoves(simulation.engine._step, late))
    settle(simulation)
    assert not simulation.engine.traffic.in_flight
    assert simulation.ask(PROMPT, 1).output
