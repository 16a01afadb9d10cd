"""An engine over disk and remote tiers that are slow, full, lossy, broken or gone: what sessions find again, and
that text is right and every request ends whatever the tiers do."""

from __future__ import annotations

import random

import pytest
from controller.tier_harness import CHUNK, TIERED, Session, miss_of, settle, simulate, sink, sunken, tiers_of
from msgspec.structs import replace
from seeds import seeds
from simulation.driver import Simulation
from simulation.traffic import Mix, Traffic

from trunkline.controller.engine.events import Event
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.reports import MoveOutcome, MovesDone
from trunkline.controller.sequences.sequence import Request
from trunkline.kvstore.chunks import pack_int32
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_moves import MoveStatus
from trunkline.worker.messages import Sampling, TierMoves, TierOrder

DISK, REMOTE = TierKind.DISK, TierKind.REMOTE


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tier", list(TierKind)[: TierKind.PEER])
def test_the_second_turn_finds_the_first_one_wherever_it_is(tier: TierKind, ranks: int) -> None:
    simulation = simulate(replace(TIERED, ranks=ranks))
    session = Session(simulation)
    session.turn(30)
    if tier is not TierKind.DEVICE:
        sink(simulation, tier)
    computed = simulation.workers.computed_tokens
    stream = session.turn(5)
    expected = [0] * TierKind.PEER
    expected[tier] = 32 if tier is not TierKind.DEVICE else 33  # a tail without a copy is lost with its block
    assert tiers_of(stream) == expected
    assert simulation.workers.computed_tokens - computed == len(stream.prompt) - expected[tier] + 3
    counters = simulation.engine.counters
    assert counters.tier_tokens == [*expected, 0]


def test_each_turn_of_a_session_is_written_down_once() -> None:
    simulation = simulate()
    session = Session(simulation)
    for _ in range(4):
        session.turn(10)
        settle(simulation)
    stats = simulation.tree.tiers.stats()
    full = (len(session.history) - 1) // CHUNK
    assert stats[DISK].totals.writes == stats[REMOTE].totals.writes == full
    assert not stats[DISK].totals.reads
    assert simulation.tree.totals.tiers[TierKind.DEVICE].reads == full


def test_chunks_are_written_in_the_pause_behind_a_request() -> None:
    simulation = simulate(replace(TIERED, host_slots=80, write_pause_s=0.25, write_within_s=3.0))
    simulation.pace_s = 0.01
    session = Session(simulation)
    session.turn(30)
    writes = simulation.tree.tiers.stats()[DISK].totals
    assert writes.writes == 0
    wake_at = simulation.wanted.wake_at
    assert simulation.now < wake_at <= simulation.now + 0.25
    simulation.now = wake_at - 0.02
    simulation.step()
    assert simulation.wanted.wake_at == wake_at
    assert not simulation.tiers.is_busy
    rest(simulation)
    assert (
        writes.writes == simulation.tree.tiers.stats()[REMOTE].totals.writes == (len(session.history) - 1) // CHUNK
    )
    assert simulation.wanted.wake_at == float("inf")


def on_disk(simulation: Simulation) -> set[bytes]:
    return {node.name for node in simulation.tree.nodes() if node.disk_ready}


def test_a_chunk_of_which_one_rank_failed_is_not_published() -> None:
    """Each rank holds its shard: what three quarters hold is nothing."""
    simulation = simulate(replace(TIERED, ranks=2, remote=False))
    engine = simulation.engine
    simulation.tier_pace = 0.0
    request = Session(simulation).send(16)
    simulation.step_until(lambda: simulation.streams[request].ended)
    moves = {move.id: move for _, _, move in simulation.tiers._waiting}
    assert moves, "there is something to write"
    done = sorted(moves)
    engine.receive(MovesDone(0, 1, [MoveOutcome(move, 0, 5) for move in done]), simulation.now)
    assert not on_disk(simulation), "published on the word of one rank"
    engine.receive(MovesDone(0, 1, [MoveOutcome(move, 0, 5) for move in done]), simulation.now)
    assert not on_disk(simulation), "said twice by one"
    outcomes = [MoveOutcome(move, 2 * (i == 0), 5) for i, move in enumerate(done)]
    engine.receive(MovesDone(1, 1, outcomes), simulation.now)
    assert on_disk(simulation) == {moves[move].name for move in done[1:]}
    engine.scheduler.kv.tree.tiers.check()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("tier", [DISK, REMOTE])
def test_a_tier_that_dies_while_others_are_served(tier: TierKind, ranks: int) -> None:
    """Before, in the middle, and after it: every turn ends with the right text, and host memory is used on."""
    simulation = simulate(replace(TIERED, ranks=ranks, host_slots=12))
    sessions = [Session(simulation, start=100 * i) for i in range(5)]
    for number, session in enumerate(sessions * 4):
        if number == 7:
            simulation.tiers.faults.dead.add(tier)
        if number == 14:
            simulation.tiers.faults.dead.clear()
            simulation.now += 100.0
        session.turn(4)
    stats = simulation.tree.tiers.stats()[tier]
    assert stats.totals.failures > 0
    assert stats.totals.writes > 0
    settle(simulation)
    assert not stats.problem or simulation.tree.tiers.health[tier].is_paused is False


def test_one_controller_finds_what_another_left_in_the_remote_tier() -> None:
    config = replace(TIERED, disk_slots=0)
    first, second = simulate(config), simulate(config)
    session = Session(first)
    session.turn(30)
    settle(first)
    second.tiers.remote = first.tiers.remote
    elsewhere = Session(second, start=900)
    elsewhere.history = list(session.history)
    stream = elsewhere.turn(3)
    assert tiers_of(stream) == [0, 0, 0, 32]


def test_what_another_controller_has_computed_comes_over_the_network_once() -> None:
    first, second = simulate(), simulate()
    session = Session(first)
    session.turn(30)
    settle(first)
    second.tiers.remote = first.tiers.remote
    elsewhere = Session(second, start=900, history=session.history)
    assert tiers_of(elsewhere.turn(3)) == [0, 0, 0, 32]
    settle(second)
    kv, tree = second.scheduler.kv, second.tree
    kv.make_room(second.engine.config.num_blocks)
    for node in sorted(tree.nodes(), key=lambda node: -node.depth):
        tree.tiers.mover.drop_host(node)
    tree.drop_lost()
    again = Session(second, start=700, history=session.history)
    found = tiers_of(again.turn(3))
    assert found[REMOTE] == 0
    assert found[DISK] >= 32


@pytest.mark.parametrize("dead", [False, True])
def test_a_probe_that_is_not_answered_holds_nobody_for_long(dead: bool) -> None:
    simulation = simulate(pace_s=0.001)
    simulation.tiers.faults.dead |= {REMOTE} if dead else set()
    simulation.tier_pace = 0.0 if not dead else 0.5
    for i in range(4):
        before = simulation.now
        request = simulation.submit([50 * i + j for j in range(9)], 2)
        while simulation.streams[request].ended is None:
            simulation.step()
        assert simulation.now - before < 0.4
        assert i == 0 or simulation.now - before < 0.1, "only the first one waits"


def test_in_full_tiers_the_latest_sessions_are_found_whole() -> None:
    """All tiers have been full for long, and what comes back is less than the disk holds: new chunks must get
    there before they lose their places above."""
    simulation = simulate(replace(TIERED, num_blocks=30, host_slots=16, disk_slots=100, remote=False))
    sessions: list[Session] = []
    found = known = 0
    for number in range(40):
        sessions.append(Session(simulation, start=100 * number))
        sessions[-1].turn(18, 1)
        if number >= 25:
            back = sessions[number - 8]
            known += (len(back.history) - 1) // CHUNK * CHUNK
            found += sum(tiers_of(back.turn(3, 1))) // CHUNK * CHUNK
    assert found >= 0.95 * known


def test_what_has_not_been_used_for_long_expires_in_every_tier() -> None:
    simulation = simulate(replace(TIERED, session_ttl_s=50.0, remote=False))
    short, long = Session(simulation), Session(simulation, start=500)
    short.turn(20)
    long.turn(20, ttl=500.0)
    sink(simulation, DISK)
    simulation.now += 60.0
    settle(simulation)
    assert {node.key[:2] for node in simulation.tree.nodes() if node.depth == 1} == {(500).to_bytes(2, "little")}
    assert miss_of(short.turn(3)) == ("ttl", 0)
    assert sum(tiers_of(long.turn(3))) == 20
    simulation.now += 600.0
    settle(simulation)
    assert not simulation.tree.node_count


def forgotten(session: Session) -> None:
    """No request will continue the session any more."""
    tokens = session.history
    session.simulation.forget(Request.of(0, Submit(0, pack_int32(tokens), len(tokens), 1, Sampling())))
    settle(session.simulation)


@pytest.mark.parametrize("ttl", [0.0, 500.0])
def test_the_remote_tier_is_told_a_requests_own_time_while_it_runs(
    ttl: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks of the prompt and of the answer are written before the request ends."""
    simulation = simulate(replace(TIERED, session_ttl_s=50.0, disk_slots=0))
    session, receive, kept = Session(simulation), simulation.tiers.receive, list[float]()

    def note(message: TierOrder) -> None:
        if isinstance(message, TierMoves):
            kept.extend(move.kept_s for move in message.moves if move.is_write and move.tier == REMOTE)
        receive(message)

    monkeypatch.setattr(simulation.tiers, "receive", note)
    stream = simulation.streams[session.send(20, max_tokens=40, ttl=ttl)]
    simulation.step_until(lambda: len(stream.output) > 30)
    assert len(kept) >= (20 + 20) // CHUNK
    assert all(ttl - 1.0 < seconds <= ttl for seconds in kept), kept


@pytest.mark.parametrize("place", [None, DISK, REMOTE])
def test_what_only_a_deleted_session_has_is_gone_from_every_tier(place: TierKind | None) -> None:
    simulation = simulate(TIERED)
    session = Session(simulation)
    session.turn(CHUNK * 2 + 3)
    session.turn(CHUNK + 1)
    if place is not None:
        sink(simulation, place)
    settle(simulation)
    assert simulation.tree.node_count
    forgotten(session)
    assert not simulation.tree.node_count
    assert not simulation.tree.tiers.stats()[DISK].used
    assert not any(simulation.tiers.remote)
    assert sum(tiers_of(session.turn(3))) == 0
    forgotten(Session(simulation, start=900))


def test_what_others_have_too_outlives_a_deleted_session() -> None:
    simulation = simulate(TIERED)
    session, fork = Session(simulation), Session(simulation)
    session.turn(CHUNK * 2)
    fork.history = list(session.history)
    session.turn(CHUNK * 2)
    fork.turn(CHUNK * 3)
    pairs = list(zip(session.history, fork.history, strict=False))
    running = fork.send(CHUNK)
    forgotten(session)
    forgotten(fork)
    fork.ended(running)
    common = next(at for at, (one, other) in enumerate(pairs) if one != other) // CHUNK * CHUNK
    assert sum(tiers_of(session.turn(3))) >= common
    assert sum(tiers_of(fork.turn(3))) > common


def test_a_disk_that_stalls_is_given_up_after_a_while() -> None:
    """It was fast so far: it is waited for, but not for ever."""
    session = sunken(DISK, remote=False, pace_s=0.001)
    simulation = session.simulation
    simulation.tree.tiers.health[DISK].read_us = 1.0
    simulation.scheduler.costs._costs[2] = 1000.0
    simulation.tier_pace = 0.0
    other = simulation.submit(list(range(5)), 60)
    request = session.send(3)
    simulation.step_until(lambda: simulation.streams[request].ended)
    assert simulation.now < 10.0
    assert len(simulation.streams[other].output) > 20, "others went on meanwhile"
    assert miss_of(session.ended(request)) == ("slow", 0)


def test_an_announced_session_is_near_when_it_comes() -> None:
    session = sunken(DISK, remote=False)
    simulation = session.simulation
    tokens = session.history
    announced = Request.of(0, Submit(0, pack_int32(tokens), len(tokens), 1, Sampling()))
    assert simulation.expect(announced) == (32, 32)
    settle(simulation)
    assert simulation.expect(announced) == (32, 0)
    assert tiers_of(session.turn(3)) == [0, 32, 0, 0]
    simulation.now += 100.0
    settle(simulation)
    assert all(not node.wants for node in simulation.tree.nodes())


def test_an_announcement_comes_after_those_who_wait() -> None:
    """It would fill host memory twice. Who has sent a request does not wait for it."""
    config = EngineConfig(
        num_blocks=60,
        chunk_size=CHUNK,
        max_context=230,
        token_budget=400,
        max_rows=8,
        host_slots=20,
        disk_slots=400,
        preemption="swap",
        swap_us_per_block=1.0,
    )
    simulation = Simulation(config, check=False)
    simulation.pace_s = 0.003
    announced, asked = [i % 50 for i in range(160)], [(7 * i + 3) % 49 for i in range(32)]
    other = [(11 * i + 3) % 47 for i in range(200)]
    for prompt in (announced, asked, other, other[::-1]):
        simulation.submit(prompt, 2)
        simulation.run()
        rest(simulation)
    request = Request.of(0, Submit(0, pack_int32(announced), len(announced), 1, Sampling()))
    assert simulation.expect(request) == (160, 160)
    rest(simulation)
    number = simulation.submit(asked, 2)
    simulation.run()
    assert tiers_of(simulation.streams[number]) == [0, 0, 31, 0]


def rest(simulation: Simulation) -> None:
    """Until nothing moves and nothing is to be moved, or for a while."""
    for _ in range(600):
        if not simulation.step() and simulation.engine.is_written:
            return


@pytest.mark.parametrize("tier_pace", [0.2, 0.5, 0.9])
def test_a_prompt_larger_than_host_memory_is_on_disk_whole_in_the_end(tier_pace: float) -> None:
    """What finds no host slot when it was computed is saved when others have gone on to the disk."""
    config = replace(
        TIERED, num_blocks=300, max_context=1000, token_budget=400, host_slots=60, disk_slots=400, remote=False
    )
    simulation = Simulation(config, check=False)
    simulation.pace_s, simulation.tier_pace = 0.01, tier_pace
    simulation.ask([i % 50 for i in range(200 * CHUNK)], 4)
    for _ in range(2000):
        if not simulation.step() and simulation.engine.is_written:
            break
    whole = [node for node in simulation.tree.nodes() if node.token_count == CHUNK]
    assert len(whole) == 200
    assert all(node.disk_ready for node in whole)


@pytest.mark.parametrize("tier", [DISK, REMOTE])
def test_chunks_that_a_tier_has_lost_are_counted(tier: TierKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one once, if any rank misses it; neither what is found nor what fails is one."""
    simulation = simulate(replace(TIERED, ranks=2))
    session, totals = Session(simulation), simulation.engine.counters
    session.turn(30)
    sink(simulation, tier)
    assert sum(tiers_of(session.turn(3))) == 32
    sink(simulation, tier)
    simulation.tiers.faults.dead.add(tier)
    session.turn(3)
    assert totals.tiers[tier].failures
    assert not totals.lost_chunks
    simulation.tiers.faults.dead.clear()
    simulation.now += 100.0
    session.turn(3)
    sink(simulation, tier)
    if tier is DISK:
        simulation.tiers.disk[1].clear()
    else:
        simulation.tiers.remote[1].clear()
    missed: set[int] = set()
    receive = simulation.engine.receive

    def watch(answer: Event, now: float) -> None:
        if isinstance(answer, MovesDone):
            missed.update(outcome.id for outcome in answer.outcomes if outcome.status == MoveStatus.MISS)
        receive(answer, now)

    monkeypatch.setattr(simulation.engine, "receive", watch)
    session.turn(3)
    assert totals.lost_chunks == len(missed) >= 8


def random_engine(rng: random.Random) -> EngineConfig:
    """Small pools of any proportion, tiers of any kind."""
    return EngineConfig(
        num_blocks=rng.choice([20, 30, 60]),
        chunk_size=rng.choice([1, 3, 4, 8]),
        max_context=80,
        token_budget=rng.choice([17, 40, 100]),
        max_rows=rng.choice([4, 16]),
        host_slots=rng.choice([3, 8, 20, 60]),
        disk_slots=rng.choice([0, 10, 80]),
        remote=rng.random() < 0.5,
        ranks=rng.choice([1, 2]),
        tier_policy=rng.choice(["predicted", "look-ahead", "lru", "fifo"]),
        session_ttl_s=rng.choice([0.0, 30.0]),
        preemption=rng.choice(["auto", "swap", "recompute"]),
    )


def random_traffic(seed: int, *, check: bool, modules: float = 0.0) -> Traffic:
    """Everything at once: all kinds of requests, cuts, preemptions, tiers that fail, lose, and die."""
    rng = random.Random(seed)
    cuts, preempts = rng.choice([0.0, 0.5]), rng.choice([0.0, 0.05])
    mix = Mix(cuts=cuts, ttl=0.3, hints=0.5, preempts=preempts, modules=modules, calls=modules / 20)
    traffic = Traffic(random_engine(rng), mix, seed, check=check)
    simulation = traffic.simulation
    simulation.pace_s = rng.choice([1.0, 0.01, 0.002])
    faults = simulation.tiers.faults
    faults.fail, faults.lose = rng.choice([0.0, 0.0, 0.1]), rng.choice([0.0, 0.0, 0.1])
    faults.dead = {tier for tier in (DISK, REMOTE) if rng.random() < 0.1}
    return traffic


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("modules", [0.0, 0.7])
def test_every_request_ends_with_the_right_text(modules: float, seed: int) -> None:
    random_traffic(seed, check=seed % 6 == 0, modules=modules).run(40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", seeds(100))
def test_thousands_of_requests(seed: int) -> None:
    """In all: 60,000 over a hundred engines."""
    random_traffic(seed, check=False).run(300)
    random_traffic(seed, check=False, modules=0.7).run(300)
