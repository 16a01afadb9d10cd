"""Fences by hand. That copies under way never meet the steps is shown by the simulated workers, in all traffic."""

from __future__ import annotations

from trunkline.controller.cache.block_pool import Fences
from trunkline.kvstore.chunks import BlockId, SlotId


def block(index: int) -> BlockId:
    return BlockId(index)


def slot(index: int) -> SlotId:
    return SlotId(index)


def test_a_block_that_was_saved_is_written_after_the_save() -> None:
    fences = Fences(4, 4)
    fences.saved(block(2), slot(0), 1)
    assert fences.close(1, [], []) == (0, 0)
    assert fences.close(2, [block(1)], []) == (0, 0)
    assert fences.close(3, [block(2)], []) == (1, 0)
    assert fences.close(4, [block(2)], []) == (0, 0), "that save is over"


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
