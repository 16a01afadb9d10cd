"""Swapping as residency: claims, saves and loads between a pool, a tree and a host pool that are too small."""

from __future__ import annotations

import numpy as np
from controller.bench import CHUNK, Bench, make_sequence

from trunkline.controller.draft import PlanDraft
from trunkline.controller.tree import NO_SLOT
from trunkline.kvstore.layout import pack_int32


def test_claimed_chunks_are_saved_and_loaded_again() -> None:
    bench = Bench(8, 8)
    tokens = list(range(11))
    waiting = bench.cache(tokens, claim=True)
    blocks = {node.key: node.block for node in bench.tree.nodes()}
    draft = bench.squeeze(8)
    assert {block for block, _, _ in draft.saves} == set(blocks.values())
    assert not draft.loads
    assert bench.residence.pool.free_count == 8
    bench.check([], [waiting])
    saved = {slot: generation for _, slot, generation in draft.saves}
    loading = bench.admit(waiting)
    assert {slot: generation for _, slot, generation in loading.loads} == saved
    assert sorted(block for block, _, _ in loading.loads) == sorted(waiting.block_table())
    assert waiting.resident == 11
    assert waiting.claim is None
    assert (bench.tree.saved_blocks, bench.tree.loaded_blocks) == (3, 3)
    bench.check([waiting], [])


def test_unclaimed_chunks_are_dropped() -> None:
    bench = Bench(8, 8)
    bench.cache(list(range(11)))
    assert not bench.squeeze(8).saves
    assert bench.tree.node_count == 0
    bench.check([], [])


def test_without_a_plan_nothing_can_be_saved() -> None:
    bench = Bench(8, 8)
    waiting = bench.cache(list(range(11)), claim=True)
    assert bench.residence.make_room(8)
    assert bench.tree.node_count == 0
    bench.check([], [waiting])
    assert not bench.admit(waiting).loads


def test_a_chunk_with_a_copy_is_not_saved_again() -> None:
    bench = Bench(6, 6)
    waiting = bench.cache(list(range(8)), claim=True)
    assert len(bench.squeeze(6).saves) == 2
    bench.admit(waiting)
    bench.leave(waiting)
    assert not bench.squeeze(6).saves
    assert bench.tree.node_count == 2, "both are on the host still"
    other = make_sequence(list(range(9)), request=7)
    assert len(bench.admit(other).loads) == 2
    assert other.resident == 8
    bench.check([other], [])


def test_the_first_chunks_are_claimed_if_the_host_pool_is_small() -> None:
    bench = Bench(8, 2)
    waiting = bench.cache(list(range(16)), claim=True)
    assert waiting.claim is not None
    assert len(waiting.claim) == 2
    assert len(bench.squeeze(8).saves) == 2
    bench.check([], [waiting])
    assert len(bench.admit(waiting).loads) == 2
    assert waiting.resident == 8


def test_copies_that_nobody_claims_make_room_on_the_host() -> None:
    bench = Bench(8, 2)
    first = bench.cache(list(range(8)), claim=True)
    bench.squeeze(8)
    bench.residence.drop_claim(first)
    second = bench.cache(list(range(50, 54)), claim=True)
    draft = bench.squeeze(8)
    assert len(draft.saves) == 1
    assert [node.token_count for node in bench.tree.nodes()] == [4, 4], "the first one's end went"
    bench.check([], [second])
    other = make_sequence(list(range(8)), request=9)
    assert len(bench.admit(other).loads) == 1
    assert other.resident == 4
    bench.check([other], [second])


def test_a_slot_that_a_plan_loads_is_not_written_in_it() -> None:
    """Saves run before loads: the copy would be gone. The chunk that finds no slot is dropped instead."""
    bench = Bench(4, 1)
    first = bench.cache(list(range(4)), claim=True)
    bench.squeeze(4)
    draft = bench.admit(first)
    slot = draft.loads[0][1]
    second = bench.cache(list(range(50, 54)), claim=True, draft=PlanDraft(bench.step, CHUNK))
    assert second.claim is not None, "the first one's copy may be dropped from here on, but not in this plan"
    assert bench.residence.make_room(3, draft)
    assert not draft.saves
    bench.check([first], [second])
    third = bench.cache(list(range(60, 64)), claim=True)
    assert [save[1] for save in bench.squeeze(3).saves] == [slot]
    bench.check([first], [second, third])


def test_a_saved_tail_is_loaded_into_a_block_of_its_own_and_its_head_suffices() -> None:
    bench = Bench(8, 8)
    tokens = list(range(7))
    waiting = bench.cache(tokens, claim=True)
    bench.squeeze(8)
    other = make_sequence([*range(6), 60, 61], request=5)
    draft = bench.admit(other)
    assert len(draft.loads) == 2
    assert not draft.copies
    assert other.resident == 6
    bench.check([other], [waiting])
    bench.admit(waiting)
    assert waiting.resident == 7
    bench.check([other, waiting], [])


def test_a_tail_that_another_claims_is_copied_not_taken() -> None:
    bench = Bench(8, 8)
    waiting = bench.cache(list(range(6)), claim=True)
    other = make_sequence([*range(6), 8], request=5)
    assert len(bench.admit(other).copies) == 1
    assert not bench.admit(waiting).copies, "it is its own now"
    bench.check([other, waiting], [])


def test_flushing_drops_copies_and_claimed_chunks_but_nothing_that_is_held() -> None:
    bench = Bench(12, 4)
    waiting = bench.cache(list(range(8)), claim=True)
    bench.squeeze(12)
    bench.cache(list(range(30, 41)))
    runs = make_sequence(list(range(30, 36)), request=6)
    bench.admit(runs)
    assert bench.tree.flush() == 2
    assert bench.tree.host.used_count == 0
    assert {node.key for node in bench.tree.nodes()} == {pack_int32(range(30, 34))}
    bench.check([runs], [waiting])


def test_salts_whose_chunks_are_gone_are_forgotten() -> None:
    bench = Bench(8, 2)
    waiting = make_sequence(list(range(8)), salt=b"tenant")
    bench.admit(waiting)
    bench.leave(waiting, claim=True)
    bench.squeeze(8)
    assert bench.tree.find_root(b"tenant") is not None, "its chunks are on the host"
    bench.residence.drop_claim(waiting)
    bench.cache(list(range(8)), claim=True)
    bench.squeeze(8)
    assert bench.tree.find_root(b"tenant") is None


def test_a_chunk_computed_again_returns_to_the_device() -> None:
    """A row fills a chunk that the host has already: the node gets the row's block, nothing moves."""
    bench = Bench(8, 4)
    waiting = bench.cache(list(range(8)), claim=True)
    bench.squeeze(8)
    row = make_sequence(list(range(4)), request=5)
    bench.admit(row)
    row.private.append(bench.residence.pool.allocate())
    row.tokens.extend(np.arange(4, 8, dtype=np.int32))
    row.computed = 8
    assert bench.residence.seal(row, 8, 1.0) == []
    assert [node.on_device and node.slot != NO_SLOT for node in row.path] == [True, True]
    bench.check([row], [waiting])
