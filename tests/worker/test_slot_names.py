"""Which slot is asked for a chunk: against a search through all slots, whatever order they are filled in."""

from __future__ import annotations

import random

import pytest
from seeds import seeds

from trunkline.worker.tiers.slot_names import SlotNames, Use


@pytest.mark.parametrize("seed", seeds(5))
def test_a_chunk_is_found_as_long_as_some_slot_holds_it(seed: int) -> None:
    rng, names = random.Random(seed), SlotNames()
    held: dict[int, bytes] = {}
    """The name in each slot, the one that was filled last at the end."""
    found: list[tuple[Use, bytes]] = []
    for _ in range(2000):
        slot, name = rng.randrange(8), bytes([rng.randrange(5)])
        held.pop(slot, None)
        if rng.random() < 0.7:
            names.put(slot, name)
            held[slot] = name
        else:
            names.drop([slot])
        found = [(use, of) for use, of in found if use.slot != slot]
        for wanted in map(bytes, ([at] for at in range(5))):
            use = names.find(wanted)
            slots = [at for at, of in held.items() if of == wanted]
            assert (use.slot if use is not None else None) == (slots[-1] if slots else None)
            if use is not None:
                found.append((use, wanted))
        assert all(names.holds(use, of) for use, of in found[-50:]), "its content has not changed since"
        assert len(names) == len(set(held.values()))
    names.drop(range(8))
    assert not any(names.holds(use, of) for use, of in found)
