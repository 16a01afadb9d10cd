"""What a session keeps behind a cut: found by who sees the same, by nobody else; computed again where it is gone.

The simulated workers check each token that is seen, and at which position its key was rotated; the oracle knows
only what is left of the prompt. So these tests look at what was computed and what was said of it.
"""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from controller.tier_harness import CHUNK, TIERED, Drops, Session, cut_of, sink, sunken, tiers_of
from seeds import seeds
from simulation.driver import Simulation
from simulation.streams import Stream, verify

from trunkline.controller.engine_config import EngineConfig
from trunkline.kvstore.root_keys import CUT_ROOT, drops_of
from trunkline.kvstore.tier import TierKind

CONFIG = EngineConfig(num_blocks=60, chunk_size=CHUNK, max_context=64, token_budget=40, max_rows=8)


def found(stream: Stream) -> int:
    assert stream.cached_tokens is not None
    return stream.cached_tokens


def cuts_of(simulation: Simulation) -> list[Drops]:
    tree = simulation.tree
    packed = [drops_of(root.key) for root in tree.roots() if root.key.startswith(CUT_ROOT)]
    return [tuple((a, b) for a, b in np.frombuffer(drops, "<i8").reshape(-1, 2).tolist()) for drops in packed]


@pytest.fixture
def session() -> Session:
    """A client whose first turn has 30 tokens and 4 of output."""
    session = Session(Simulation(CONFIG))
    session.turn(30)
    return session


@pytest.mark.parametrize(
    "drops",
    [
        ((4, 16),),
        ((0, 16),),
        ((0, 20),),
        ((5, 18),),
        ((6, 7),),
        ((5, 8), (9, 11)),
        ((3, 13), (14, 15), (17, 21)),
        ((1, 2), (3, 4), (5, 6), (20, 30)),
        ((0, 31),),
    ],
)
def test_the_kv_behind_a_cut_is_kept(session: Session, drops: Drops) -> None:
    """Whatever is cut off, and however it lies on chunks: of what is left only the tail is computed again."""
    simulation = session.simulation
    computed = simulation.workers.computed_tokens
    before = len(session.history)
    stream = session.turn(5, drops=drops)
    assert cut_of(stream) == "kept"
    dropped = sum(b - a for a, b in drops)
    stored = before - 1 - before % CHUNK  # the last sampled token has no KV, and tails may not be found
    assert found(stream) >= stored - dropped - CHUNK
    assert simulation.workers.computed_tokens - computed <= 5 + 4 + 2 * CHUNK


def test_who_cuts_again_the_same_way_finds_it_again(session: Session) -> None:
    simulation = session.simulation
    for _ in range(4):
        stream = session.turn(3, drops=((4, 16),))
        assert cut_of(stream) == "kept"
        assert found(stream) >= len(stream.prompt) - 3 - CHUNK
    assert cuts_of(simulation) == [((4, 16),)]


def test_a_session_is_cut_again_and_again(session: Session) -> None:
    """As a policy does it: the oldest part behind the head goes each time the context is full (CachedAttention
    §3.4). The client's history grows beyond every limit."""
    simulation = session.simulation
    cut, computed = 4, simulation.workers.computed_tokens
    for _ in range(12):
        while len(session.history) - (cut - 4) + 8 + 4 > CONFIG.max_context:
            cut += 16
        stream = session.turn(8, drops=((4, cut),) if cut > 4 else ())
        assert cut_of(stream) in ("kept", "")
    assert len(session.history) > 2 * CONFIG.max_context
    assert simulation.workers.computed_tokens - computed <= 12 * (8 + 4 + 2 * CHUNK)


@pytest.mark.parametrize("seed", seeds(1))
def test_hundreds_of_ranges_are_dropped_turn_by_turn(seed: int) -> None:
    """As an agent clears the results of its tools: old ranges stay, new ones come behind them. Some are single
    tokens, several within a chunk, some are chunks long."""
    rng = random.Random(seed)
    simulation = Simulation(msgspec.structs.replace(CONFIG, num_blocks=600, max_context=2000, token_budget=2000))
    session, drops, end = Session(simulation), list[tuple[int, int]](), 0
    session.turn(1500)
    for more in (100, 30, 1, 1):
        for _ in range(more):
            start = end + rng.choice([1, 1, 2, 3, 7])
            end = start + rng.choice([1, 1, 2, 3, 9])
            drops.append((start, end))
        assert end < len(session.history) - 1
        computed = simulation.workers.computed_tokens
        assert cut_of(session.turn(5, drops=tuple(drops))) == "kept"
        assert simulation.workers.computed_tokens - computed <= 5 + 4 + 2 * CHUNK
    assert len(drops) == 132


def test_other_sessions_that_share_the_head_find_it_still() -> None:
    """A system prompt stands before the cut: it is not moved, and not computed again for anybody."""
    simulation = Simulation(CONFIG)
    session, head = Session(simulation), list(range(100, 108))
    session.turn(30)
    assert cut_of(session.turn(4, drops=((8, 20),))) == "kept"
    other = Session(simulation, start=500, history=list(head))
    assert found(other.turn(6)) == 8
    assert cut_of(session.turn(4, drops=((8, 20),))) == "kept"


def test_who_sees_everything_finds_nothing_that_moved(session: Session) -> None:
    simulation = session.simulation
    past = list(session.history)
    session.turn(4, drops=((4, 16),))
    session.turn(4, drops=((4, 16),))
    whole = Session(simulation, start=700, history=past)
    stream = whole.turn(3)
    assert found(stream) == 16, "what was cut off, and the head; the rest hangs behind the cut now"
    longer = Session(simulation, start=700, history=list(session.history))
    assert found(longer.turn(3)) < 40, "KV computed behind the cut is not for who sees more"


def test_a_prompt_that_is_what_is_left_finds_only_the_head(session: Session) -> None:
    """Its keys would have to be rotated elsewhere, and what was computed saw more."""
    simulation = session.simulation
    session.turn(4, drops=((4, 16),))
    plain = Session(simulation, start=700, history=session.history[:4] + session.history[16:])
    assert found(plain.turn(3)) == 4


@pytest.mark.parametrize(
    "other", [((4, 12),), ((4, 20),), ((4, 16), (20, 24)), ((0, 16),), ((16, 20),), ((20, 24),)]
)
def test_other_cuts_are_other_contexts(session: Session, other: Drops) -> None:
    """Whoever sees less may go on with KV computed while more was seen; who sees more must not."""
    for _ in range(2):
        session.turn(4, drops=((4, 16),))
    behind = len(session.history)
    stream = session.turn(4, drops=other)  # the simulated workers check what each key saw
    sees_less = all(any(a <= x and y <= b for a, b in other) for x, y in ((4, 16),))
    if not sees_less:
        assert found(stream) <= 34, f"of {behind} tokens, those behind the cut saw less"


def test_salts_stay_apart_behind_a_cut() -> None:
    simulation = Simulation(CONFIG)
    session = Session(simulation, salt=b"a")
    session.turn(30)
    session.turn(4, drops=((4, 16),))
    other = Session(simulation, salt=b"b")
    other.history = list(session.history)
    stream = other.turn(3, drops=((4, 16),))
    assert found(stream) == 0
    assert cut_of(stream) == "recomputed"


def test_what_another_uses_now_is_not_taken_from_it(session: Session) -> None:
    """Its chunks are in somebody's table; moving them would rename what that one is computing below."""
    simulation = session.simulation
    other = simulation.submit([*session.history, 1, 2, 3], 20)
    simulation.step_until(lambda: len(simulation.streams[other].output) >= 3)
    stream = session.turn(4, drops=((4, 16),))
    assert cut_of(stream) == "recomputed"
    assert found(stream) == 4, "the head"
    verify(simulation.streams[other], CONFIG.max_context)


def test_both_go_on_when_two_cut_the_same_past_at_once(session: Session) -> None:
    simulation = session.simulation
    fork = Session(simulation, start=900, history=list(session.history))
    requests = [session.send(4, drops=((4, 16),)), fork.send(4, drops=((4, 16),))]
    simulation.run()
    streams = [session.ended(requests[0]), fork.ended(requests[1])]
    assert [cut_of(stream) for stream in streams] == ["kept", "kept"]


@pytest.mark.parametrize("victim", ["everything", "the kept part"])
def test_what_is_gone_is_computed_again(session: Session, victim: str) -> None:
    simulation = session.simulation
    tree = simulation.tree
    if victim == "everything":
        simulation.flush_cache()
    else:
        tree.evict(tree.node_count - 2)
    stream = session.turn(4, drops=((4, 16),))
    assert cut_of(stream) == "recomputed"
    assert found(stream) == (0 if victim == "everything" else 4)
    again = session.turn(4, drops=((4, 16),))
    assert found(again) >= len(again.prompt) - 4 - CHUNK, "as a plain prompt it is found again"


def test_edits_of_what_had_to_be_computed_again_keep_kv(session: Session) -> None:
    """It is a plain prompt of what was left; the ranges that are dropped next are cut out of that one."""
    simulation, drops = session.simulation, [(4, 16), (18, 19)]
    simulation.flush_cache()
    assert cut_of(session.turn(4, drops=tuple(drops))) == "recomputed"
    for more in ((21, 22), (24, 31), (33, 34)):
        drops.append(more)
        computed = simulation.workers.computed_tokens
        for _ in range(2):
            assert cut_of(session.turn(2, 2, drops=tuple(drops))) == "kept"
        assert simulation.workers.computed_tokens - computed <= 2 * (2 + 2 + 2 * CHUNK)


def test_a_piece_before_the_last_cut_cannot_be_computed_alone(session: Session) -> None:
    """Token 12 is seen, but its chunk is gone, and computing could go on behind token 15 only. Chunks 0 and 2 are
    there, which are more than a plain prompt finds."""
    simulation = session.simulation
    tree = simulation.tree
    tree.evict(tree.node_count - 3)
    stream = session.turn(4, drops=((4, 8), (13, 15)))
    assert cut_of(stream) == "recomputed"
    assert found(stream) == 4


@pytest.mark.parametrize("change", [{"positions_shift": False}, {"prefix_cache": False}])
def test_groups_that_cannot_keep_kv_behind_a_cut_compute_it(change: dict[str, bool]) -> None:
    simulation = Simulation(msgspec.structs.replace(CONFIG, **change))
    session = Session(simulation)
    session.turn(30)
    stream = session.turn(4, drops=((4, 16),))
    assert cut_of(stream) == "recomputed"
    assert not cuts_of(simulation)


def test_roots_of_cuts_go_with_their_last_chunk() -> None:
    simulation = Simulation(CONFIG)
    for start in range(100, 900, 100):
        session = Session(simulation, start=start)
        session.turn(30)
        session.turn(4, drops=((4, 16),))
    tree = simulation.tree
    tree.evict(60)
    assert not list(tree.roots())
    assert not tree._cuts


def preempt(simulation: Simulation, request: int) -> None:
    """In the middle of its output; nothing of it stays on the device."""
    simulation.step_until(lambda: len(simulation.streams[request].output) >= 2)
    scheduler = simulation.scheduler
    scheduler.preempt(scheduler.running()[0].group, simulation.now)
    scheduler.kv.make_room(TIERED.num_blocks)


@pytest.mark.parametrize("tier", [TierKind.HOST, TierKind.DISK, TierKind.REMOTE])
@pytest.mark.parametrize("is_preempted", [False, True])
def test_edits_go_on_in_any_tier(tier: TierKind, *, is_preempted: bool) -> None:
    """Between turns all chunks sink to a tier; each turn drops one more range, and may be preempted itself."""
    session, drops = sunken(tier), list[tuple[int, int]]()
    simulation = session.simulation
    for more in ((5, 6), (9, 11), (14, 21), (22, 23), (29, 30)):
        drops.append(more)
        computed, request = simulation.workers.computed_tokens, session.send(5, drops=tuple(drops))
        if is_preempted:
            preempt(simulation, request)
        simulation.run()
        assert cut_of(session.ended(request)) == "kept"
        assert simulation.workers.computed_tokens - computed <= 5 + 4 + 2 * CHUNK + is_preempted * (2 * CHUNK + 4)
        sink(simulation, tier)


PROMPT = list(range(100, 130))


def test_samples_whose_holes_do_not_fit_do_not_preempt_themselves_for_ever() -> None:
    """Every second token is dropped: what is left fits three times, the table with its holes does not."""
    simulation = Simulation(msgspec.structs.replace(CONFIG, num_blocks=21, max_context=60))
    prompt = [5 + i % 7 for i in range(40)]
    simulation.ask(prompt, 2, seed=3)
    drops = tuple((i, i + 1) for i in range(1, 36, 2))
    request = simulation.submit(prompt, 18, seed=1, n=3, drops=drops)
    simulation.finish(200)
    assert cut_of(simulation.streams[request]) == "recomputed"
    assert simulation.scheduler.counters.preemptions == 0


@pytest.mark.parametrize(
    ("drops", "n", "kind"),
    [
        (((4, 16),), 2, "kept"),
        (((5, 6), (9, 10)), 1, "kept"),
        (((5, 6), (9, 10)), 2, "recomputed"),
        (((5, 6), (25, 26)), 1, "kept"),
        (((5, 6), (25, 26)), 2, "recomputed"),
    ],
)
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_what_is_seen_between_cuts_of_a_tail_is_computed_again_for_samples(
    drops: tuple[tuple[int, int], ...], n: int, kind: str, steps: int
) -> None:
    """A range that ends in the last segment may stand in a tail, which each sample has for itself: of several that
    are preempted only one would find it again. So it is a plain prompt from the start."""
    simulation = Simulation(CONFIG)
    simulation.ask(PROMPT, 4)
    request = simulation.submit(PROMPT, 12, n=n, drops=drops)
    group = next(iter(simulation.scheduler.queue))
    assert (group.cut is not None) == (kind == "kept"), "at once, not when it is admitted"
    for _ in range(steps):
        simulation.step()
    scheduler = simulation.scheduler
    for running in {sequence.group.id: sequence.group for sequence in scheduler.running()}.values():
        scheduler.preempt(running, simulation.now)
        scheduler.kv.make_room(6)
    simulation.finish(300)
    assert cut_of(simulation.streams[request]) == kind


@pytest.mark.parametrize("new", [2, 3, 4, 5])
def test_samples_have_tails_though_the_prompt_became_another_one(new: int) -> None:
    """A table that ends with a chunk needs no tails; the plain prompt of what is seen does. Which of both it is
    turns out when the chunks on disk are found not to be worth waiting for."""
    session = sunken(TierKind.DISK, remote=False)
    simulation = session.simulation
    simulation.tree.tiers.health[TierKind.DISK].read_us = 1e9
    prompt = [*session.history, *range(900, 900 + new)]
    request = simulation.submit(prompt, 6, n=3, drops=((5, 18),))
    simulation.finish()
    assert cut_of(simulation.streams[request]) == "recomputed"
    assert sum(tiers_of(simulation.streams[request])) == 0
