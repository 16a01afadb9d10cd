"""Fences: by hand, and at random against a memory in which saves and loads happen as late as fences let them.

The naive model knows nothing of fences. It keeps every save and load that was ordered as something that may still
happen until a fence has said that it is over, and looks at what each plan touches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from seeds import seeds

from trunkline.controller.cache.block_pool import Fences
from trunkline.kvstore.chunks import BlockId, SlotId


def block(index: int) -> BlockId:
    return BlockId(index)


def slot(index: int) -> SlotId:
    return SlotId(index)


def test_a_block_saved_and_written_in_one_plan() -> None:
    """Evicted and given away at once: the plan waits for its own saves, and later plans for that fence need not be
    repeated only if it covered them."""
    fences = Fences(4, 4)
    fences.saved(block(2), slot(0), 5)
    assert fences.close(5, [block(2)], []) == (5, 0)
    assert fences.close(6, [block(2)], []) == (5, 0), "late saves of plan 5 were not part of its own fence"


def test_a_slot_is_loaded_after_its_save() -> None:
    fences = Fences(4, 4)
    fences.saved(block(2), slot(1), 1)
    fences.close(1, [], [])
    fences.loaded(block(3), slot(1), 2)
    assert fences.close(2, [block(3)], [])[0] == 1
    fences.loaded(block(0), slot(1), 3)
    assert fences.close(3, [block(0)], [])[0] == 0


def test_a_loaded_block_is_read_after_the_load() -> None:
    fences = Fences(4, 4)
    fences.loaded(block(3), slot(1), 2)
    assert fences.close(2, [block(3)], []) == (0, 0), "whoever is to read it does not compute yet"
    assert fences.ready_after([block(0)]) == 0
    assert fences.ready_after([block(0), block(3)]) == 2
    fences.reads(2)
    assert fences.close(4, [], []) == (0, 2)
    assert fences.ready_after([block(3)]) == 0
    assert fences.close(5, [], []) == (0, 0)


@dataclass
class Memory:
    """What may still happen, by plan."""

    saves: list[tuple[int, int, int, bool]] = field(default_factory=list)
    """(plan, block, slot, late) of saves that nothing says are over."""
    loads: list[tuple[int, int, int]] = field(default_factory=list)

    def fence(self, step: int, save_fence: int, load_fence: int) -> None:
        """The plan waits: the saves of its own are meant, too, but not those that follow its computation."""
        self.saves = [s for s in self.saves if s[0] > save_fence or (s[0] == step and s[3])]
        self.loads = [s for s in self.loads if s[0] > load_fence]

    def is_saving(self, block: int) -> bool:
        return any(b == block for _, b, _, _ in self.saves)

    def is_filling(self, slot: int) -> bool:
        return any(s == slot for _, _, s, _ in self.saves)

    def is_loading(self, block: int) -> bool:
        return any(b == block for _, b, _ in self.loads)


def run_plans(rng: random.Random, fences: Fences, blocks: int, slots: int) -> tuple[int, int]:
    """Random plans as a scheduler makes them; how many had to wait for saves, and for loads."""
    memory = Memory()
    filled: set[int] = set()
    waits = [0, 0]
    for step in range(1, 80):
        order = rng.sample(range(blocks), blocks)
        evicted = order[: rng.randrange(3)]  # they are saved, and may be given away at once
        fresh = order[3 : 3 + rng.randrange(3)] + [b for b in evicted if rng.random() < 0.7]
        others = order[6:]
        saves = [(b, s) for b, s in zip(evicted, rng.sample(range(slots), 3), strict=False)]
        loads: list[tuple[int, int]] = []
        for b in [b for b in fresh if rng.random() < 0.5]:
            sources = sorted(filled - {s for _, s in saves})
            if sources:
                loads.append((b, rng.choice(sources)))
        late_slots = [s for s in range(slots) if s not in {x for _, x in [*saves, *loads]}]
        late = [(b, s) for b, s in zip([b for b in fresh if rng.random() < 0.3], late_slots, strict=False)]
        late = [(b, s) for b, s in late if b not in {x for x, _ in loads}]
        for b, s in [*saves, *late]:
            fences.saved(block(b), slot(s), step)
            filled.add(s)
        for b, s in loads:
            fences.loaded(block(b), slot(s), step)
        read = [b for b in others if rng.random() < 0.3]
        if rng.random() < 0.5:
            fences.reads(fences.ready_after([block(b) for b in read]))
        else:
            read = []
        copied = [block(b) for b in others if rng.random() < 0.1]
        save_fence, load_fence = fences.close(step, [block(b) for b in fresh], copied)
        waits = [waits[0] + (save_fence > 0), waits[1] + (load_fence > 0)]
        assert 0 <= save_fence <= step
        assert 0 <= load_fence <= step
        memory.saves += [(step, b, s, False) for b, s in saves]
        memory.fence(step, save_fence, load_fence)
        for b in fresh:
            assert not memory.is_saving(b), "a block is written that is still being saved"
            # Loads go one after the other: its own comes after an earlier one by itself.
            alone = b in {x for x, _ in loads}
            assert alone or not memory.is_loading(b), "a block is written that is still being loaded"
        for _, s in loads:
            assert not memory.is_filling(s), "a slot is loaded before it is saved"
        memory.loads += [(step, b, s) for b, s in loads]
        memory.loads = [x for x in memory.loads if x[0] > load_fence]
        assert not any(memory.is_loading(b) for b in [*read, *copied]), "a block is read before it is loaded"
        memory.saves += [(step, b, s, True) for b, s in late]
    return waits[0], waits[1]


def test_random_plans_never_meet_a_copy_under_way() -> None:
    waits = [0, 0]
    for seed in seeds(60):
        found = run_plans(random.Random(seed), Fences(12, 6), 12, 6)
        waits = [a + b for a, b in zip(waits, found, strict=True)]
    assert min(waits) > 500, "or nothing was tested"
