"""The host pool's slots: generations, busy slots, and which copy goes first."""

from __future__ import annotations

import random

from trunkline.kvstore.host_slots import HostSlots
from trunkline.kvstore.layout import SlotId


def take(slots: HostSlots[str], owner: str, step: int) -> SlotId:
    slot = slots.allocate(owner, step)
    assert slot is not None
    return slot


def test_a_slot_taken_anew_has_a_new_generation() -> None:
    slots: HostSlots[str] = HostSlots(1)
    slot = take(slots, "a", 1)
    first = slots.generation(slot)
    assert (slots.owner(slot), slots.read(slot, 2)) == ("a", first)
    slots.release(slot)
    assert take(slots, "b", 3) == slot
    assert slots.generation(slot) > first
    assert slots.owner(slot) == "b"
    assert (slots.writes, slots.reads) == (2, 1)


def test_a_slot_is_written_or_read_once_before_it_is_written_again_in_a_plan() -> None:
    slots: HostSlots[str] = HostSlots(2)
    written, other = take(slots, "a", 5), take(slots, "b", 4)
    slots.read(other, 5)
    slots.release(written)
    slots.release(other)
    assert slots.free_count == 2
    assert slots.allocate("c", 5) is None
    assert {take(slots, "c", 6), take(slots, "d", 6)} == {written, other}


def test_the_copy_that_was_used_longest_ago_goes_first() -> None:
    slots: HostSlots[str] = HostSlots(4)
    a, b, c, d = (take(slots, name, 1) for name in "abcd")
    for slot in (b, a, c):
        slots.offer(slot)
    assert list(slots.droppable(2)) == [b, a, c]
    slots.read(b, 2)
    assert list(slots.droppable(2)) == [a, c], "b is busy in this plan"
    assert list(slots.droppable(3)) == [a, c, b]
    slots.keep(a)
    slots.offer(d)
    assert list(slots.droppable(3)) == [c, b, d]
    assert not slots.is_droppable(a)


def test_slots_add_up_whatever_happens() -> None:
    rng = random.Random(4)
    slots: HostSlots[int] = HostSlots(7)
    used: dict[SlotId, int] = {}
    generations = [0] * 7
    for step in range(1, 3000):
        busy: set[SlotId] = set()
        for _ in range(rng.randrange(4)):
            slot = slots.allocate(step, step)
            if slot is None:
                assert len(used) + len(busy - used.keys()) == 7
                continue
            assert slot not in used
            assert slot not in busy
            assert slots.generation(slot) > generations[slot]
            generations[slot] = slots.generation(slot)
            used[slot] = step
            busy.add(slot)
        for slot in rng.sample(sorted(used), rng.randrange(len(used) + 1)):
            action = rng.randrange(4)
            if action == 0:
                slots.release(slot)
                del used[slot]
            elif action == 1:
                assert slots.read(slot, step) == generations[slot]
                busy.add(slot)
            elif action == 2:
                slots.offer(slot)
            else:
                slots.keep(slot)
        assert slots.free_slots() == set(range(7)) - used.keys()
        assert all(slots.owner(slot) == owner for slot, owner in used.items())
        assert set(slots.droppable(step + 1)) <= used.keys()
