"""Token ids in an array that read like a list."""

from __future__ import annotations

import random

import numpy as np
import pytest
import seeds

from trunkline.kvstore.chunks import pack_int32
from trunkline.router.text.token_ids import TokenIds


@pytest.mark.parametrize("seed", seeds.seeds(2))
def test_they_read_like_a_list(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        first, rest = ([rng.randrange(1 << 31) for _ in range(rng.randrange(20))] for _ in range(2))
        listed = first + rest
        ids = TokenIds.of(np.array(first, np.int32), rest)
        assert list(ids) == listed
        assert ids == listed
        assert listed == ids
        assert ids == TokenIds(np.array(listed, np.int32))
        assert ids != [*listed, 0]
        assert (len(ids), bool(ids), pack_int32(ids)) == (len(listed), bool(listed), pack_int32(listed))
        start, stop = rng.randrange(-3, 41), rng.randrange(-3, 41)
        assert ids[start:stop] == listed[start:stop]
        assert [*ids[start:], *ids[:start]] == [*listed[start:], *listed[:start]]
        if listed:
            place = rng.randrange(-len(listed), len(listed))
            assert (ids[place], type(ids[place])) == (listed[place], int)
            assert (listed[place] in ids, ids.index(listed[place])) == (True, listed.index(listed[place]))
