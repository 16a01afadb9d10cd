"""A kv to try things on, one sequence and one plan at a time."""

from __future__ import annotations

import numpy as np

from trunkline.controller.allocation.kv_manager import Admission, KVCacheManager
from trunkline.controller.allocation.tree_entry import enter_full_chunks
from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.engine.integrity import check_kv_cache
from trunkline.controller.messages import BeamSearch, Submit
from trunkline.controller.sequences.plan_builder import PlanBuilder
from trunkline.controller.sequences.sequence import Request, Sequence, SequenceGroup, TokenBuffer
from trunkline.kvstore.chunks import BlockId, pack_int32
from trunkline.kvstore.tier_policy import DirectoryConfig
from trunkline.worker.messages import Sampling

CHUNK = 4


def tokens_of(start: int, count: int) -> list[int]:
    """Tokens in whose order nothing repeats."""
    return [(start + 7 * i) % 50 for i in range(count)]


def make_kv_manager(num_blocks: int, host_slots: int) -> KVCacheManager:
    pool = BlockPool(num_blocks)
    tiers = DirectoryConfig(host_slots=host_slots)
    return KVCacheManager(pool, RadixCache(pool, CHUNK, tiers=tiers), prefix_cache=True)


def make_sequence(
    tokens: list[int],
    *,
    request: int = 1,
    n: int = 1,
    salt: bytes = b"",
    beam: BeamSearch | None = None,
    output: int = 0,
) -> Sequence:
    """A sequence whose last `output` tokens are no prompt."""
    prompt = tokens[: len(tokens) - output]
    submit = Submit(request, pack_int32(prompt), len(prompt), 100, Sampling(), salt=salt, n=n, beam=beam)
    group = SequenceGroup(Request.of(request, submit), request, 1000, submit.sampling)
    group.members[0].tokens = TokenBuffer(np.array(tokens, np.int32))
    return group.members[0]


class Bench:
    """One plan after the other for single sequences; a plan computes all that was admitted in it."""

    def __init__(self, num_blocks: int, host_slots: int) -> None:
        self.kv = make_kv_manager(num_blocks, host_slots)
        self.tree = self.kv.tree
        self.step = 0

    def plan(self) -> PlanBuilder:
        self.step += 1
        return PlanBuilder(self.step, CHUNK, float(self.step))

    def admit(self, sequence: Sequence) -> PlanBuilder:
        plan = self.plan()
        assert self.kv.admit(sequence, 0, plan) is Admission.ADMITTED
        sequence.computed = sequence.tokens.count
        self.kv.mark_ready(sequence, plan)
        for source in plan.copy_sources:
            self.tree.release(source, self.step, 1)
        plan.copy_sources = []
        return plan

    def leave(self, sequence: Sequence, *, claim: bool = False) -> None:
        self.kv.leave(sequence, sequence.computed, self.step, claim=claim)

    def fill(self, sequence: Sequence, kv_tokens: int) -> list[tuple[int, BlockId]]:
        """Let the tree have the chunks that a running sequence has filled; what its block table shares now."""
        return enter_full_chunks(self.tree, self.kv.pool, sequence, kv_tokens, self.step)

    def cache(self, tokens: list[int], *, claim: bool = False) -> Sequence:
        """A sequence that has come and gone."""
        sequence = make_sequence(tokens, request=self.step + 100)
        self.admit(sequence)
        self.leave(sequence, claim=claim)
        return sequence

    def squeeze(self, blocks: int) -> PlanBuilder:
        """A plan that needs so many blocks, and gives them back."""
        plan = self.plan()
        assert self.kv.make_room(blocks, plan)
        return plan

    def check(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        check_kv_cache(self.kv, running, waiting)
