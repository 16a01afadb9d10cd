"""Sequences that share blocks: forks, beams, groups that come back together."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from controller.kv_harness import CHUNK, Bench, make_kv_manager, make_sequence
from seeds import seeds

from trunkline.controller.allocation.group_fit import fits_group
from trunkline.controller.allocation.kv_manager import Admission, KVCacheManager
from trunkline.controller.engine.integrity import check_kv_cache
from trunkline.controller.messages import BeamSearch, Submit
from trunkline.controller.sequences.plan_builder import PlanBuilder
from trunkline.controller.sequences.sequence import Request, Sequence, SequenceGroup
from trunkline.kvstore.chunks import pack_int32
from trunkline.worker.messages import Sampling


def test_beams_name_a_block_that_they_share_once() -> None:
    bench = Bench(8, 0)
    pool = bench.kv.pool
    first = make_sequence(list(range(4)))
    bench.admit(first)
    second = make_sequence(list(range(4)), request=2)
    bench.admit(second)
    shared = pool.allocate()
    pool.share(shared)
    for beam in (first, second):
        beam.private = [shared]
        beam.tokens.extend(np.arange(4, 8, dtype=np.int32))
    bench.check([first, second], [])
    assert bench.fill(first, 8) == []
    bench.check([first, second], [])
    assert bench.fill(second, 8) == []
    assert first.path == second.path
    assert pool.holders(shared) == 1
    bench.check([first, second], [])


def test_tails_are_reserved_with_the_prompt_or_not_at_all() -> None:
    kv = make_kv_manager(4, 0)
    parent = make_sequence(list(range(10)), n=3)
    assert kv.admit(parent, 0, PlanBuilder(1, CHUNK), tails=2) is Admission.NO_BLOCKS
    check_kv_cache(kv, [], [])
    assert kv.admit(parent, 0, PlanBuilder(1, CHUNK), tails=1) is Admission.ADMITTED
    kv.leave(parent, 0, 0.0)
    assert kv.pool.free_count == 4


def test_a_tail_that_forks_still_copy_is_not_cached() -> None:
    """Its block could not be freed by evicting it."""
    bench = Bench(6, 0)
    parent = make_sequence(list(range(6)))
    bench.admit(parent)
    child = make_sequence(list(range(4)), request=2)
    bench.admit(child)
    bench.kv.pool.share(parent.private[-1])
    child.tails = [parent.private[-1]]
    bench.leave(parent)
    bench.check([child], [])
    bench.leave(child)
    assert bench.kv.available == 6


@pytest.mark.parametrize("kind", [{"beam": BeamSearch(2)}, {"n": 2}])
def test_a_beam_or_sample_that_comes_back_stores_its_last_token_in_its_own_block(kind: dict[str, Any]) -> None:
    bench = Bench(8, 0)
    bench.cache(list(range(8)))
    sequence = make_sequence(list(range(8)), request=2, output=2, **kind)
    sequence.group.forked = True
    plan = bench.admit(sequence)
    assert (len(sequence.path), sequence.cached_tokens, len(plan.copies)) == (1, 7, 1)
    idle = next(node for node in bench.tree.nodes() if not node.children)
    assert sequence.private != [idle.block]
    bench.check([sequence], [])


def test_a_scored_prompt_is_computed_from_its_start_and_stored_once() -> None:
    bench = Bench(8, 0)
    bench.cache(list(range(10)))
    submit = Submit(3, pack_int32(range(10)), 10, 4, Sampling(prompt_logprobs=0))
    scored = SequenceGroup(Request.of(3, submit), 3, 100, submit.sampling).members[0]
    plan = bench.plan()
    assert bench.kv.admit(scored, 0, plan) is Admission.ADMITTED
    assert (scored.computed, scored.cached_tokens) == (0, 10)
    assert (plan.joins[0].first, len(plan.joins[0].tokens)) == (0, 40)


def admit_all(kv: KVCacheManager, members: list[Sequence], step: int) -> None:
    """One after the other, each computed before the next: nothing else runs."""
    for sequence in members:
        step += 1
        plan = PlanBuilder(step, CHUNK, float(step))
        assert kv.admit(sequence, 0, plan) is Admission.ADMITTED
        for source in plan.copy_sources:
            kv.tree.release(source, float(step))
        sequence.computed = sequence.prefill_stop
        kv.mark_ready(sequence, plan)


@pytest.mark.parametrize("seed", seeds(1))
def test_a_group_that_fits_can_be_admitted_member_by_member(seed: int) -> None:
    rng = random.Random(seed)
    fitted = refused = 0
    for _ in range(300):
        bench = Bench(rng.randrange(6, 16), rng.randrange(0, 6))
        kv = bench.kv
        trunk = [rng.randrange(3) for _ in range(rng.randrange(1, 18))]
        waiting = [
            bench.cache([*trunk[: rng.randrange(1, len(trunk) + 1)], rng.randrange(3)], claim=rng.random() < 0.5)
            for _ in range(rng.randrange(4))
        ]
        bench.squeeze(rng.randrange(kv.available + 1))
        runs = make_sequence(trunk[: rng.randrange(1, len(trunk) + 1)], request=500)
        running = [runs] if rng.random() < 0.5 else []
        for sequence in running:
            bench.admit(sequence)
        beam = BeamSearch(4) if rng.random() < 0.5 else None
        members = []
        for _ in range(rng.randrange(1, 5)):
            output = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
            members.append(make_sequence(trunk + output, request=600, beam=beam, output=len(output)))
        worst = len({tuple(s.tokens.view(0, end)) for s in members for end in range(CHUNK, s.tokens.count, CHUNK)})
        worst += len(members)  # the last chunk of each
        if not fits_group(kv, members, 0, bench.step + 1):
            refused += 1
            assert running or worst > kv.pool.num_blocks, "nothing else is in the way"
            continue
        fitted += 1
        admit_all(kv, members, bench.step)
        check_kv_cache(kv, running + members, waiting)
    assert fitted > 10
    assert refused > 5
