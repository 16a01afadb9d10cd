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
behind a cut what is left, as a plain prompt, unless KV was kept behind the cut (`kept_runs`). Each text
of a module has holders of its own. Whether they have computed it at the position at which it is wanted is not
known: a text is announced under one name wherever it was computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkline.controller.messages import Holder, KeptChunks
from trunkline.router.routing.controllers import FloatArray
from trunkline.router.routing.index import DEVICE, DISK, HOST, TOLD, Columns, IntArray, Match
from trunkline.router.routing.names import Chain
from trunkline.router.routing.overlaps import Found
from trunkline.router.routing.request import Sleeping

HOLDERS_MAX: Final = 4
"""Largest number of groups from which the chunks of one prompt are pulled."""


class Run(NamedTuple):
    """A run of a prompt's chunks, and a controller that has them."""

    controller: int
    start: int
    """Index of the first chunk in the chain."""
    stop: int


class Given(NamedTuple):
    """What peers have of a prompt that a controller lacks; fields as in `Decision`."""

    holders: list[Holder]
    sleeping: Sleeping | None
    texts: dict[int, list[Holder]]
    kept: KeptChunks | None


NOTHING: Final = Given([], None, {}, None)


def pullable(found: Found, members: IntArray, whole: IntArray, peers: Columns, *, has_tail: bool) -> IntArray:
    """Return how many tokens controllers need not compute if they pull, without a gap from their own chunks on.

    Args:
        members: the controllers.
        whole: how many tokens each has cached.
        peers: the controllers that export chunks.
        has_tail: whether one of them has an open tail, too, so that `whole` is not of whole chunks only.
    """
    host, size = peers.host, found.names.chains[-1].tokens
    ends = found.last.ends(host) * size
    if found.names.root:
        own = whole // size * size if has_tail else whole
        reach: IntArray = ends.take(ends.searchsorted(own)) - whole
        return reach.clip(0) if has_tail else reach  # a tail may have tokens of the first of these chunks
    own = found.last.counts[members].sum(axis=1) * size
    reach = ends[ends.searchsorted(own)] - own
    if found.names.kept is None:
        return reach
    reach[keeps_cut(found, members)] = 0
    for chain, match in _kept(found):
        stops = match.ends(host)
        have = match.counts[members].sum(axis=1)
        tokens = stops[stops.searchsorted(have)] * size - chain.unseen_tokens
        reach = np.maximum(reach, np.where(tokens + chain.unseen_tokens >= chain.least * size, tokens - whole, 0))
    return reach


def keeps_cut(found: Found, controllers: IntArray) -> NDArray[np.bool_]:
    """Return which controllers have kept the KV behind a prompt's cut, so that they do not use the last chain."""
    keeps = np.zeros(len(controllers), bool)
    if found.names.chains[-1].way:
        for chain, counts in found.overlaps[:-1]:
            keeps |= counts[controllers].sum(axis=1) >= chain.least
    return keeps


def _kept(found: Found) -> Iterator[tuple[Chain, Match]]:
    """Yield the chains of what was kept behind a cut, with what controllers have of them."""
    yield from zip(found.names.chains[:-1], found.matches, strict=False)


class KeptRuns(NamedTuple):
    """What a controller can have of what was kept behind a cut, with the help of peers."""

    chain: Chain
    runs: list[Run]
    """The runs that it lacks and peers have."""
    tokens: int
    """Number of tokens that the prompt sees of what it has then."""


def kept_runs(
    found: Found, shift: int, peers: Columns, leaves: NDArray[np.bool_], inflight: FloatArray
) -> KeptRuns | None:
    """Return the longest chain of what was kept behind a prompt's cut that a controller can have with the help of
    peers; None: it lacks nothing of it, or cannot have enough. The arguments are those of `holders`."""
    best = None
    for chain, match in _kept(found):
        runs, at = holders(match, shift, peers, leaves, inflight)
        tokens = at * chain.tokens - chain.unseen_tokens
        if at >= chain.least and (best is None or tokens > best.tokens):
            best = KeptRuns(chain, runs, tokens)
    return best if best is not None and best.runs else None


def holders(
    match: Match,
    shift: int,
    peers: Columns,
    leaves: NDArray[np.bool_],
    inflight: FloatArray,
    *,
    start: int = 0,
) -> tuple[list[Run], int]:
    """Return the runs of chunks that a controller lacks and peers have in host memory, and the index of the first
    chunk behind them.

    Args:
        shift: place of the controller's own column.
        peers: the controllers that export chunks.
        leaves: whether each controller drains. Of runs of one length that of such a controller is better, as its
            copy will go; then that of a controller with fewer requests.
        inflight: requests that each controller has.
        start: how many of the first chunks the controller has, if that is known.
    """
    own, host = TOLD << shift, peers.bits << HOST
    at, count = start, match.known
    runs: list[Run] = []
    while True:
        while at < count and match.mask(at) & own:
            at += 1
        if at == count or len(runs) == HOLDERS_MAX:
            return runs, at
        best, stop = host, at
        while stop < count and (both := best & match.mask(stop)):
            best, stop = both, stop + 1
        if stop == at:
            return runs, at
        owners = [peers.owners[place - HOST] for place in _places(best)]
        giver = min(owners, key=lambda owner: (not leaves[owner], inflight[owner]))
        runs.append(Run(giver, at, stop))
        at = stop


def sleeping(match: Match, at: int, peers: Columns) -> Run | None:
    """Return the longest run from a chunk on that a peer has on disk or in host memory, the first chunk of it on
    disk only; None: there is none."""
    if at >= match.known:
        return None
    first = match.mask(at)
    best = peers.bits & (first >> DISK) & ~(first >> HOST) & ~(first >> DEVICE)
    stop = at
    while stop < match.known:
        mask = match.mask(stop)
        both = best & (mask >> HOST | mask >> DISK)
        if not both:
            break
        best, stop = both, stop + 1
    return Run(peers.owners[next(_places(best))], at, stop) if stop > at else None


def _places(bits: int) -> Iterator[int]:
    """Yield the places of the bits that are set."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
