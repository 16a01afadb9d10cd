"""The simulated workers themselves: what plans written by hand give, and how wrong ones are noticed."""

from __future__ import annotations

import pytest
from simulation.model import prefix_hash
from simulation.pool import Entry, SimulatedPool
from simulation.worker import SimulatedWorkers

from trunkline.kvstore.beams import assign_tails
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import BeamPosition, Fork, Join, Sampling, StepPlan

CHUNK = 4
PROMPT = [11, 12, 13, 14, 15, 16]


def workers() -> SimulatedWorkers:
    return SimulatedWorkers(num_blocks=16, chunk_size=CHUNK, host_slots=4)


def join(blocks: list[int], sampling: Sampling | None = None, beam_position: BeamPosition | None = None) -> Join:
    return Join(
        1,
        pack_int32(PROMPT),
        0,
        len(PROMPT),
        pack_int32(blocks),
        sampling or Sampling(seed=5),
        beam_position=beam_position,
    )


def prompt_step(joined: Join, forks: list[Fork]) -> StepPlan:
    return StepPlan(1, 1, joins=[joined], prefill=pack_int32([1, 0, len(PROMPT), 0, 1]), forks=forks)


def decode(step: int, rows: list[int], copies: tuple[int, ...] = (), blocks: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(step, 1, copies=pack_int32(copies), blocks=pack_int32(blocks), rows=pack_int32(rows), runs=b"")


def test_a_forgotten_copy_of_a_tail_is_noticed() -> None:
    group = workers()
    group.execute(prompt_step(join([0, 1]), [Fork(1, 2, pack_int32([0, 2]), 6)]))
    with pytest.raises(AssertionError, match="nobody computed"):
        group.execute(decode(2, [1, 2]))


@pytest.mark.parametrize(("blocks", "message"), [([0, 1], "its own"), ([3, 2], "does not share")])
def test_a_wrong_fork_is_noticed(blocks: list[int], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        workers().execute(prompt_step(join([0, 1]), [Fork(1, 2, pack_int32(blocks), 6)]))


def test_two_sequences_that_write_to_one_block_are_noticed() -> None:
    group = workers()
    group.execute(prompt_step(join([0, 1]), []))
    other = Join(2, pack_int32(PROMPT), 0, len(PROMPT), pack_int32([0, 1]), Sampling())
    with pytest.raises(AssertionError, match="others refer to"):
        group.execute(StepPlan(2, 1, joins=[other], prefill=pack_int32([2, 5, 1, 5, 1])))


def saved_pool() -> SimulatedPool:
    """A prompt is computed, and its first block saved to slot 3 some time."""
    group = SimulatedWorkers(8, CHUNK, 4, 0)
    group.execute(prompt_step(join([0, 1]), []))
    group.pool.order(2, [(0, 3, 1)], [], 0, 0)
    return group.pool


def test_host_slots_keep_generations_apart() -> None:
    pool = saved_pool()
    pool.order(3, [], [(5, 3, 1)], 2, 3)
    assert pool.walk([5], CHUNK, step=4, batch_seq_id=1) == prefix_hash(PROMPT[:CHUNK])
    for move, message in [
        ((0, 3, 1), "old generation"),
        ((0, 4, 1), "no 4"),
    ]:
        with pytest.raises(AssertionError, match=message):
            pool.order(4, [move], [], 4, 0)
    for move, message in [((5, 3, 2), "another generation"), ((5, 2, 1), "nobody saved")]:
        with pytest.raises(AssertionError, match=message):
            pool.order(5, [], [move], 0, 5)


def test_a_load_is_not_there_before_a_fence_says_so() -> None:
    pool = saved_pool()
    pool.order(3, [], [(5, 3, 1)], 2, 0)
    with pytest.raises(AssertionError, match="not loaded yet"):
        pool.walk([5], CHUNK, step=3, batch_seq_id=1)
    pool.order(4, [], [], 0, 3)
    assert pool.walk([5], CHUNK, step=4, batch_seq_id=1) == prefix_hash(PROMPT[:CHUNK])


def test_a_block_that_is_written_again_before_its_save_is_saved_wrongly() -> None:
    """A missing save fence shows when what was saved is read: some time, with some seed."""
    noticed = 0
    for fence in (0, 2):
        pool = saved_pool()
        pool.order(3, [], [], fence, 0)
        for offset in range(CHUNK):
            pool.write(0, offset, Entry(b"other", b"", 1, offset, offset), 3, 9)
        pool.order(4, [], [(5, 3, 1)], 2, 4)
        try:
            assert pool.walk([5], CHUNK, step=4, batch_seq_id=1) == prefix_hash(PROMPT[:CHUNK])
        except AssertionError:
            assert not fence
            noticed += 1
    assert noticed == 1


def test_a_late_save_waits_for_what_it_saves() -> None:
    pool = saved_pool()
    pool.computed(3, [(1, 2, 1)])
    pool.order(4, [], [(6, 2, 1)], 3, 4)
    assert pool.read(6, 0, 4, 1).token == PROMPT[CHUNK]


def test_a_part_of_a_search_cannot_leave_or_decode() -> None:
    for wrong in (decode(2, [1]), StepPlan(2, 1, leaves=pack_int32([2]))):
        group = workers()
        positions = [BeamPosition(9, i, 2, 0.0, 4) for i in range(2)]
        group.execute(
            prompt_step(
                join([0, 1], beam_position=positions[0]), [Fork(1, 2, pack_int32([0, 2]), 0, positions[1])]
            )
        )
        with pytest.raises(AssertionError, match="a part of a beam search"):
            group.execute(wrong)


@pytest.mark.parametrize("parents", [[0, 0, 2, 0], [3, 3, 3, 3], [1, 0, 3, 2], [2, 1, 1, 0], [0]])
def test_tails_are_handed_on_once(parents: list[int]) -> None:
    """Nobody's tail is both a source of a copy and written to, and the beams own all tails as before."""
    tails = assign_tails(parents)
    assert sorted(tails) == list(range(len(parents)))
    copied = {tail for parent, tail in zip(parents, tails, strict=True) if parent != tail}
    assert not copied & set(parents)
    assert len(copied) == len(parents) - len(set(parents))
