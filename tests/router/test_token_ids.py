"""Token ids in an array that read like a list."""

from __future__ import annotations

import random

import numpy as np
import pytest
import seeds

from trunkline.kvstore.chunks import pack_int32
from trunkline.router.errors import ApiError
from trunkline.router.jobs.job import check_ids
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


def test_given_ids() -> None:
    """A client's ids are checked in one pass; what is no int32 stays a list, and is named as the first bad id."""
    ids = TokenIds.given([3, 0, 7])
    assert isinstance(ids, TokenIds)
    assert ids.packed == pack_int32([3, 0, 7])
    assert (ids.are_below(8), ids.are_below(7)) == (True, False)
    assert TokenIds(np.array([], np.int32)).are_below(1)
    check_ids(ids, 8, "prompt")
    for bad in (8, -1, 1 << 31, -(1 << 31) - 1, 1 << 80):
        given = TokenIds.given([3, bad, 9, 7])
        assert isinstance(given, TokenIds) == (abs(bad) < 1 << 31)
        with pytest.raises(ApiError, match=f"`prompt`: {bad} is not a token id; they are 0 to 7"):
            check_ids(given, 8, "prompt")
