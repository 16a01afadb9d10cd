"""Swapping and asynchronous saving as residency: claims, saves and loads between a pool, a tree and a host pool
that are too small.

A full chunk is copied to the host when it fills, whoever wants it (CachedAttention §3.2.2); a tail when its block
is needed. A claim only says which copies must stay.
"""

from __future__ import annotations

import numpy as np
from controller.kv_harness import Bench, make_sequence

from trunkline.kvstore.chunks import NO_SLOT, pack_int32
from trunkline.kvstore.tier import TierKind


def places(bench: Bench) -> dict[int, int]:
    """Generation by host slot of all copies."""
    copies = bench.tree.tiers.copies.host
    return {node.host: copies.generation(node.host) for node in bench.tree.nodes() if node.host_ready}


def test_full_chunks_are_saved_as_they_fill_and_tails_when_their_blocks_are_needed() -> None:
    bench = Bench(8, 8)
    waiting = make_sequence(list(range(11)))
    plan = bench.admit(waiting)
    assert [block for block, _, _ in plan.late_saves] == waiting.block_table()[:2]
    assert not plan.saves, "nothing of it is computed before this plan"
    bench.leave(waiting, claim=True)
    blocks = {node.key: node.block for node in bench.tree.nodes()}
    squeezed = bench.squeeze(8)
    assert [block for block, _, _ in squeezed.saves] == [blocks[pack_int32(range(8, 11))]]
    assert not squeezed.loads
    assert bench.kv.pool.free_count == 8
    bench.check([], [waiting])


def test_saved_chunks_are_loaded_again() -> None:
    bench = Bench(8, 8)
    waiting = bench.cache(list(range(11)), claim=True)
    bench.squeeze(8)
    saved = places(bench)
    loading = bench.admit(waiting)
    assert {slot: generation for _, slot, generation in loading.loads} == saved
    assert sorted(block for block, _, _ in loading.loads) == sorted(waiting.block_table())
    assert waiting.cached_tokens == 11
    assert waiting.claim is None
    assert (bench.tree.totals.tiers[TierKind.DEVICE].reads, bench.tree.totals.tiers[TierKind.DEVICE].writes) == (
        3,
        3,
    )
    bench.check([waiting], [])


def test_unclaimed_chunks_are_saved_as_long_as_there_is_room() -> None:
    bench = Bench(8, 3)
    bench.cache(list(range(11)))
    assert len(bench.squeeze(8).saves) == 1
    assert sorted(node.token_count for node in bench.tree.nodes()) == [3, 4, 4]
    bench.cache(list(range(50, 61)))
    bench.squeeze(8)
    assert bench.tree.node_count == 3, "the host has no room for all six"
    assert bench.tree.tiers.copies.host.used_count == 3
    bench.check([], [])


def test_a_chunk_with_a_copy_is_not_saved_again() -> None:
    bench = Bench(6, 6)
    waiting = bench.cache(list(range(8)), claim=True)
    assert not bench.squeeze(6).saves
    bench.admit(waiting)
    bench.leave(waiting)
    assert not bench.squeeze(6).saves
    assert bench.tree.totals.tiers[TierKind.DEVICE].reads == 2
    assert bench.tree.node_count == 2, "both are on the host still"
    other = make_sequence(list(range(9)), request=7)
    assert len(bench.admit(other).loads) == 2
    assert other.cached_tokens == 8
    bench.check([other], [])


def test_nothing_is_saved_below_a_chunk_without_a_copy() -> None:
    """Whoever looked for it would not get that far."""
    bench = Bench(8, 1)
    bench.cache(list(range(12)))
    assert [node.token_count for node in bench.tree.nodes() if node.host_ready] == [4]
    assert next(node for node in bench.tree.nodes() if node.host_ready).key == pack_int32(range(4))
    bench.squeeze(8)
    assert [node.key for node in bench.tree.nodes()] == [pack_int32(range(4))]
    bench.check([], [])


def test_a_chunk_that_found_no_slot_is_saved_later() -> None:
    bench = Bench(8, 2)
    first = bench.cache(list(range(8)), claim=True)
    second = bench.cache(list(range(50, 58)))
    assert not any(node.host_ready for node in second.path)
    bench.kv.drop_claim(first)
    bench.tree.flush()
    row = make_sequence(list(range(70, 74)), request=5)
    bench.admit(row)
    row.private.append(bench.kv.pool.allocate())
    row.tokens.extend(np.arange(4, dtype=np.int32))
    row.computed = 8
    bench.fill(row, 8)
    assert bench.tree.saves.waiting, "a row filled it: the next plan saves it"
    plan = bench.plan()
    bench.tree.saves.add_waiting(plan)
    assert [block for block, _, _ in plan.saves] == [row.path[1].block]
    assert not bench.tree.saves.waiting
    bench.check([row], [])


def test_a_chunk_is_not_saved_before_the_plan_that_computes_it_has_run() -> None:
    bench = Bench(8, 4)
    sequence = make_sequence(list(range(4)))
    plan = bench.plan()
    bench.kv.admit(sequence, 0, plan)
    sequence.computed = 4
    sequence.path[0].ready_step = plan.step
    bench.tree.saves.later(sequence.path[0])
    bench.tree.saves.add_waiting(plan)
    assert not plan.saves
    bench.tree.saves.add_waiting(later := bench.plan())
    assert len(later.saves) == 1


def test_a_saved_tail_is_loaded_into_a_block_of_its_own_and_its_head_suffices() -> None:
    bench = Bench(8, 8)
    tokens = list(range(7))
    waiting = bench.cache(tokens, claim=True)
    bench.squeeze(8)
    other = make_sequence([*range(6), 60, 61], request=5)
    plan = bench.admit(other)
    assert len(plan.loads) == 2
    assert not plan.copies
    assert other.cached_tokens == 6
    bench.check([other], [waiting])
    bench.admit(waiting)
    assert waiting.cached_tokens == 7
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
    assert bench.tree.tiers.copies.host.used_count == 1
    assert {node.key for node in bench.tree.nodes()} == {pack_int32(range(30, 34))}
    bench.check([runs], [waiting])


def test_a_chunk_computed_again_returns_to_the_device() -> None:
    """A row fills a chunk that the host has already: the node gets the row's block, nothing moves."""
    bench = Bench(8, 4)
    waiting = bench.cache(list(range(8)), claim=True)
    bench.squeeze(8)
    row = make_sequence(list(range(4)), request=5)
    bench.admit(row)
    row.private.append(bench.kv.pool.allocate())
    row.tokens.extend(np.arange(4, 8, dtype=np.int32))
    row.computed = 8
    assert bench.fill(row, 8) == []
    assert [node.on_device and node.host != NO_SLOT for node in row.path] == [True, True]
    bench.check([row], [waiting])


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    """A chunk that was used again has a new turn; its old one does not count."""
    bench = Bench(8, 0)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        bench.cache(tokens)
    first = min(bench.tree.nodes(), key=lambda node: node.last_use)
    bench.tree.hold(first)
    bench.tree.release(first, bench.step + 1)
    assert bench.tree.evict(1) == 1
    assert list(bench.tree.nodes()) == [first]
