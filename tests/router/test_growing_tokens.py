"""Prompts that share the memory of their tokens, and never see each other's."""

from __future__ import annotations

import random

import numpy as np
import pytest
from seeds import seeds

from trunkline.router.text.growing_tokens import GrowingTokens


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_what_goes_on_is_in_the_same_memory() -> None:
    memory = GrowingTokens(ids(1, 2, 3))
    first = memory.first(3)
    assert memory.extended(3, ids(4, 5)) is memory
    assert memory.extended(2, ids(3, 4)) is memory, "it agrees so far"
    assert memory.extended(4, ids(5, 6)) is memory
    assert memory.first(6).tolist() == [1, 2, 3, 4, 5, 6]
    assert np.shares_memory(first, memory.first(6))
    other = memory.extended(3, ids(4, 9))
    assert other is not memory
    assert (other.first(5).tolist(), memory.first(6).tolist()) == ([1, 2, 3, 4, 9], [1, 2, 3, 4, 5, 6])


def test_a_long_conversation_is_copied_seldom() -> None:
    memory = GrowingTokens(np.arange(10_000, dtype=np.int32))
    copies = 0
    for turn in range(400):
        longer = memory.extended(10_000 + 50 * turn, np.full(50, turn, np.int32))
        copies += longer is not memory
        memory = longer
    assert copies < 12
    assert memory.nbytes < 4 * 30_000 * 1.2


@pytest.mark.parametrize("seed", seeds(3))
def test_prompts_never_change(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [(GrowingTokens(ids()), ids(), [0][:0])]
    for _ in range(3000):
        memory, _, tokens = rng.choice(prompts[-20:])
        kept, more = tokens[: rng.randint(0, len(tokens))], [rng.randrange(3) for _ in range(rng.randrange(90))]
        longer = memory.extended(len(kept), ids(*more))
        prompts.append((longer, longer.first(len(kept) + len(more)), kept + more))
        for _, seen, right in rng.sample(prompts, min(5, len(prompts))):
            assert seen.tolist() == right
