"""Random lives over `KVCacheManager` alone, with pools that are all too small.

A little batch kept by hand does everything that a scheduler does to `KVCacheManager`, without a scheduler's order,
over a pool that holds hashes: each token's context is read back from where the plans put it. Saves and loads are
carried out as late as the fences let them.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from controller.kv_harness import CHUNK, make_kv_manager, make_sequence
from seeds import seeds
from simulation.model import EMPTY, extend_hash
from simulation.pool import Entry, SimulatedPool

from trunkline.controller.allocation.kv_manager import Admission
from trunkline.controller.engine.integrity import check_kv_cache
from trunkline.controller.sequences.plan_builder import PlanBuilder
from trunkline.controller.sequences.sequence import Sequence, TokenBuffer
from trunkline.kvstore.chunks import BlockId
from trunkline.kvstore.tier import TierKind


class Batch:
    """A batch kept by hand: sequences come, are computed in pieces, fork, decode, are preempted, end."""

    def __init__(self, seed: int, *, blocks: int, slots: int, prefix_cache: bool) -> None:
        self.rng = random.Random(seed)
        self.kv = make_kv_manager(blocks, slots, prefix_cache=prefix_cache)
        self.memory = SimulatedPool(blocks, CHUNK, slots, seed)
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.rows: list[Sequence] = []
        self.unforked: dict[int, int] = {}
        """By request, the children that it still gets."""
        self.copied: set[int] = set()
        self.step = 0
        self.made = 0
        self.ended = 0

    @property
    def running(self) -> list[Sequence]:
        return self.rows + self.prefilling

    def run_step(self) -> None:
        rng, self.step = self.rng, self.step + 1
        self._arrive()
        for sequence in [s for s in self.running if rng.random() < 0.03]:
            self._preempt(sequence, claim=rng.random() < 0.7)
        draft = PlanBuilder(self.step, CHUNK, float(self.step))
        self.kv.pool.taken.clear()
        self._grow(draft)
        sources = self._copy_tails(draft)
        work = [(sequence, sequence.computed, 1, 0) for sequence in self.rows]
        for sequence in self.rows:
            sequence.computed += 1
        work += self._prefill(draft)
        self.kv.tree.save_waiting(draft)
        for source in draft.copy_sources:
            self.kv.tree.release(source, float(self.step))
        for block in sources:
            self.kv.pool.release(block)
        self._execute(draft, work)
        self._finish([item[0] for item in work])
        check_kv_cache(self.kv, self.running, self.waiting)

    def _arrive(self) -> None:
        rng = self.rng
        if len(self.waiting) < 6 and rng.random() < 0.5:
            self.made += 1
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
            sequence = make_sequence(
                tokens, request=self.made, n=rng.randrange(1, 4), salt=rng.choice([b"", b"x"])
            )
            self.unforked[self.made] = sequence.group.request.submit.n - 1
            self.waiting.append(sequence)
        for sequence in self.waiting.copy():
            if rng.random() < 0.01:
                self.kv.drop_claim(sequence)
                self.waiting.remove(sequence)
        if rng.random() < 0.005:
            self.kv.tree.flush()

    def _preempt(self, sequence: Sequence, *, claim: bool) -> None:
        (self.rows if sequence in self.rows else self.prefilling).remove(sequence)
        stored = max(sequence.computed, sequence.resident)
        if sequence.tails and not self.unforked.get(sequence.request):
            stored -= stored % CHUNK  # its own tail is not copied yet
        self.kv.leave(sequence, min(stored, sequence.tokens.count), float(self.step), claim=claim)
        self.waiting.append(sequence)

    def _grow(self, draft: PlanBuilder) -> None:
        for sequence in self.rows.copy():
            if sequence not in self.rows or sequence.computed < CHUNK * len(sequence.block_table()):
                continue
            while sequence in self.rows and not self.kv.make_room(1, draft):
                self._preempt(self.running[-1], claim=self.rng.random() < 0.7)
            if sequence in self.rows:
                sequence.private.append(self.kv.pool.allocate())

    def _copy_tails(self, draft: PlanBuilder) -> list[BlockId]:
        sources = []
        for sequence in self.rows:
            if sequence.tails:
                source = sequence.tails.pop()
                draft.copies.append((source, sequence.private[-1], 0, sequence.prompt_len % CHUNK))
                sources.append(source)
        return sources

    def _prefill(self, draft: PlanBuilder) -> list[tuple[Sequence, int, int, int]]:
        self.rng.shuffle(self.waiting)
        for sequence in self.waiting.copy():
            left = self.unforked.get(sequence.request, 0)
            tails = left if sequence.tokens.count % CHUNK else 0
            outcome = self.kv.admit(sequence, self.rng.randrange(2), draft, tails=tails)
            if outcome is Admission.ADMITTED:
                self.waiting.remove(sequence)
                self.prefilling.append(sequence)
        work = []
        for sequence in self.prefilling.copy():
            start, total = sequence.computed, sequence.tokens.count
            count = min(self.rng.randrange(1, 9), total - start)
            work.append((sequence, start, count, sequence.resident))
            fences = self.kv.tree.fences
            fences.reads(fences.ready_after(sequence.block_table()))
            sequence.computed = start + count
            self.kv.mark_ready(sequence, draft)
            if start + count == total:
                self.prefilling.remove(sequence)
                self.rows.append(sequence)
                self._fork(sequence)
        return work

    def _fork(self, parent: Sequence) -> None:
        for index in range(1, self.unforked.pop(parent.request, 0) + 1):
            partial = parent.tokens.count % CHUNK > 0
            child = Sequence(parent.group, index, TokenBuffer(parent.tokens.view()), parent.sampling)
            self.kv.fork(parent, child, parent.tails.pop() if partial else None)
            if partial:
                self.kv.pool.share(parent.private[-1])
                child.tails = [parent.private[-1]]
            child.tokens.extend(np.array([self.rng.randrange(2)], np.int32))
            self.rows.append(child)

    def _execute(self, draft: PlanBuilder, work: list[tuple[Sequence, int, int, int]]) -> None:
        """As the workers do: saves, loads, copies; then each token reads its context and is stored."""
        moved = [BlockId(block) for source, target, _, _ in draft.copies for block in (source, target)]
        taken = self.kv.pool.taken
        save_fence, load_fence = self.kv.tree.fences.close(self.step, taken, moved)
        self.memory.order(self.step, draft.saves, draft.loads, save_fence, load_fence)
        self.memory.copy(draft.copies)
        for sequence, start, count, write_from in work:
            table: list[int] = list(sequence.block_table())
            past = self.memory.walk(table, start, self.step, id(sequence))
            for position in range(start, start + count):
                current = extend_hash(past, int(sequence.tokens.view()[position]))
                if position >= write_from:
                    block = table[position // CHUNK]
                    entry = Entry(current, past, int(sequence.tokens.view()[position]), position, position)
                    self.memory.write(block, position % CHUNK, entry, self.step, id(sequence))
                past = current
            assert past == self._expected(sequence, start + count)
        self.memory.computed(self.step, draft.late_saves)

    def _expected(self, sequence: Sequence, stop: int) -> bytes:
        current = EMPTY
        for token in sequence.tokens.view(0, stop).tolist():
            current = extend_hash(current, token)
        return current

    def _finish(self, computed: list[Sequence]) -> None:
        for sequence in computed:
            if sequence not in self.rows:
                continue
            sequence.tokens.extend(np.array([self.rng.randrange(2)], np.int32))
            if sequence.computed % CHUNK == 0 and self.kv.prefix_cache:
                self.kv.seal(sequence, sequence.computed, float(self.step))
            if self.rng.random() < 0.06 or sequence.tokens.count > 36:
                self.rows.remove(sequence)
                stored = sequence.computed - (sequence.computed % CHUNK if sequence.tails else 0)
                self.kv.leave(sequence, stored, float(self.step))
                self.ended += 1


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize(
    ("blocks", "slots", "prefix_cache"),
    [(12, 0, True), (12, 4, True), (16, 40, True), (24, 10, True), (14, 1, True), (16, 8, False)],
)
def test_random_lives(blocks: int, slots: int, prefix_cache: bool, seed: int) -> None:
    batch = Batch(seed, blocks=blocks, slots=slots, prefix_cache=prefix_cache)
    for _ in range(400):
        batch.run_step()
    tree = batch.kv.tree
    assert batch.ended > 20
    assert (tree.totals.tiers[TierKind.DEVICE].reads > 5, tree.totals.tiers[TierKind.DEVICE].writes > 5) == (
        slots > 0 and prefix_cache,
    ) * 2
    for sequence in batch.running:
        batch.kv.leave(sequence, 0, 0.0)
    for sequence in batch.waiting:
        batch.kv.drop_claim(sequence)
    tree.flush()
    check_kv_cache(batch.kv, [], [])
    assert batch.kv.pool.free_count == blocks
    assert tree.tiers.copies.host.used_count == tree.node_count == 0
    assert not list(tree.roots())
