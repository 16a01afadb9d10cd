"""Which other groups can give a controller the KV of a prompt that it lacks, so that it need not compute it. Pure.

      chunks of the prompt      0   1   2   3   4   5   6   7
      the chosen controller     ██████                              has them in some tier
      group A                   ██████████████                      has them in host memory
      group B                   ██████████████████████
      group C                               ██████████████
      holders                           └──── B ─────┘└ C ┘         no gap from the controller's own chunks on

Each holder is the one whose run goes furthest from where the last one ends: so the fewest holders cover the most.
Only whole chunks in host memory count, and only those of groups that name their chunks alike and export them. What
such groups have on disk only can be brought to their host memory (`sleeping`).

Of a prompt with several chains of names (`names.py`) the last one counts: behind modules the prompt's own tokens,
behind a cut what is left, as a plain prompt. Texts of modules have names that only their controllers know, and KV
that was kept behind a cut is looked for below a root that only its controller has.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkline.router.routing.controllers import FloatArray
from trunkline.router.routing.index import DISK, HOST, ChunkIndex, IntArray, Match
from trunkline.router.routing.overlaps import Found

HOLDERS_MAX: Final = 4
"""Largest number of groups from which the chunks of one prompt are pulled."""
_TOLD: Final = 0b0111
"""The tiers in which a controller has told that it has a chunk; another request may still fail to compute one that
is only expected."""


class Run(NamedTuple):
    """A run of a prompt's chunks, and a controller that has them."""

    controller: int
    start: int
    """Index of the first chunk in the chain."""
    stop: int


def pullable(index: ChunkIndex, match: Match, members: IntArray, peers: IntArray) -> IntArray:
    """Return how many chunks each of `members` could pull, without a gap from its own ones on.

    Args:
        peers: the controllers that export chunks.
    """
    own = match.counts[members].sum(axis=1)
    if not len(match.masks) or not len(peers):
        return np.zeros_like(own)
    held = index.held_by_any(match, peers, HOST)
    gaps = np.append(np.flatnonzero(~held), len(held))
    reach: IntArray = gaps[gaps.searchsorted(own)] - own
    return reach


def holders(
    index: ChunkIndex, match: Match, chosen: int, peers: IntArray, leaves: NDArray[np.bool_], inflight: FloatArray
) -> tuple[list[Run], int]:
    """Return the runs of chunks that a controller lacks and peers have in host memory, and the index of the first
    chunk behind them.

    Args:
        leaves: whether each controller drains. Of runs of one length that of such a controller is better, as its
            copy will go; then that of a controller with fewer requests.
        inflight: requests that each controller has.
    """
    count = len(match.masks)
    has = (index.held_by(match, np.array([chosen]), slice(0, count))[:, 0] & _TOLD) > 0
    at = int(np.append(has, False).argmin())
    others = peers[peers != chosen]
    runs: list[Run] = []
    while at < count and len(runs) < HOLDERS_MAX:
        some = others[(index.held_by(match, others, slice(at, at + 1))[0] & (1 << HOST)) > 0]
        if not len(some):
            break
        held = (index.held_by(match, some, slice(at, count)) & (1 << HOST)) > 0
        lengths = np.append(held, np.zeros((1, len(some)), bool), axis=0).argmin(axis=0)
        best = np.lexsort((inflight[some], ~leaves[some], -lengths))[0]
        stop = at + int(lengths[best])
        runs.append(Run(int(some[best]), at, stop))
        at = stop + int(np.append(has[stop:], False).argmin())
    return runs, at


def keeps_cut(found: Found, controllers: IntArray) -> NDArray[np.bool_]:
    """Return which controllers have kept the KV behind a prompt's cut, so that they do not use the last chain."""
    keeps = np.zeros(len(controllers), bool)
    if found.names.chains[-1].way:
        for chain, counts in found.overlaps[:-1]:
            keeps |= counts[controllers].sum(axis=1) >= chain.least
    return keeps


def pulled_tokens(found: Found, chunks: IntArray, members: IntArray, cached: IntArray) -> IntArray:
    """Return how many tokens each of `members` need not compute if it pulls.

    Args:
        chunks: how many each could pull (`pullable`).
        cached: tokens that each has already, by tier.
    """
    size = found.names.chains[-1].tokens
    tokens: IntArray = chunks * size
    if found.names.root:  # an open tail may have tokens of the first of these chunks
        tokens += found.last.counts[members].sum(axis=1) * size - cached.sum(axis=1)
        return tokens.clip(0)
    tokens[keeps_cut(found, members)] = 0
    return tokens


def sleeping(index: ChunkIndex, match: Match, at: int, peers: IntArray) -> Run | None:
    """Return the longest run from a chunk on that a peer has, of which the first chunk is on the peer's disk only;
    None: there is none."""
    count = len(match.masks)
    if at >= count or not len(peers):
        return None
    first = index.held_by(match, peers, slice(at, at + 1))[0]
    some = peers[(first & _TOLD) == 1 << DISK]
    if not len(some):
        return None
    near = (1 << HOST) | (1 << DISK)
    held = (index.held_by(match, some, slice(at, count)) & near) > 0
    lengths = np.append(held, np.zeros((1, len(some)), bool), axis=0).argmin(axis=0)
    best = int(lengths.argmax())
    return Run(int(some[best]), at, at + int(lengths[best]))
