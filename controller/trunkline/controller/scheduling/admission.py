"""Admission: which waiting request may enter the batch next, and what of its prompt was cached when it did. Pure.

- `AdmissionOrder`: which of the waiting groups may enter the batch with this plan.
- `Quarantine`: requests that were running when workers died, until one of them is found to be the cause.
- `found_tokens`, `report`: how much of a prompt was cached, in which tiers, and why the rest was not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

import numpy as np

from trunkline.controller.allocation.kv_manager import KVCacheManager
from trunkline.controller.scheduling.fair_queue import FairQueue
from trunkline.controller.sequences.decode_rows import Int64Array
from trunkline.controller.sequences.plan_builder import PlanBuilder
from trunkline.controller.sequences.sequence import CacheReport, Phase, Sequence, SequenceGroup
from trunkline.controller.tiers.fetching import Fetching
from trunkline.kvstore.chunks import TOKEN_BYTES, chunk_name
from trunkline.kvstore.root_keys import SALT_ROOT
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import MissReason, Started

LOSSES_ALONE: Final = 2
"""Number of losses of workers in a row after which a request is tried alone."""
LOSSES_MAX: Final = 3
"""Number of losses of workers in a row after which a request ends."""
DEADLY: Final = f"the workers were lost {LOSSES_MAX} times while they computed this, and no token came between"
"""Error of a request that ends because the workers were lost too often."""


class AdmissionOrder:
    """Tells which waiting groups may enter the batch next."""

    def __init__(self, queue: FairQueue, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self._queue = queue
        self.entering: dict[int, SequenceGroup] = {}
        """Resumed groups of which some sequences are in the batch and others still wait, by request."""
        self._blocked: tuple[int, int, int] | None = None
        """(request, available blocks, running sequences) of the last admission that failed for lack of blocks."""

    def candidates(self, available: int, running: int, *, going: bool) -> Iterator[SequenceGroup]:
        """Return the groups that may start now, in order; none while the first one still lacks blocks.

        Resumed sequences hold blocks and compute nothing until their whole group is in the batch. So a group that
        has begun to enter goes before all others, and alone: two such groups could wait for each other's blocks.

        Args:
            going: whether running sequences make progress.
        """
        entering = list(reversed(self.entering.values()))
        waiting = chain(entering, (group for group in self._queue if group not in entering))
        first = next(waiting, None)
        if first is None or (going and self._blocked == (first.id, available, running)):
            return iter(())
        return chain([first], waiting)

    def blocked(self, group: SequenceGroup, available: int, running: int) -> None:
        """Note that a group lacks blocks. It counts as lacking them as long as the two numbers do not change."""
        self._blocked = (group.id, available, running)

    def unblock(self) -> None:
        """Try again with the next plan, because a sequence has entered the batch."""
        self._blocked = None

    def left(self, group: SequenceGroup) -> None:
        """Note that a whole group has left the batch."""
        self.entering.pop(group.id, None)
        self.quarantine.left(group.id)

    def note(self, group: SequenceGroup) -> None:
        """Update a group of which a sequence has entered the batch or ended."""
        is_in = group.in_batch
        (self.quarantine.came if is_in else self.quarantine.left)(group.id)
        waits = False
        for member in group.members:
            waits |= member.phase is Phase.WAITING
        if group.queued and not waits:
            self._queue.remove(group)
        if waits and is_in:
            self.entering[group.id] = group
        else:
            self.entering.pop(group.id, None)


class Quarantine:
    """Finds the request that kills the workers, and ends it. It outlives workers and schedulers.

    When workers die, it is not known which request was the cause. So all that were running are suspected, until
    they get a token.

        lost ──► 1: goes on like all ──lost again, no token between──► 2: tried alone ──lost──► 3: ends
                  ▲                                                        │
                  └──────────────── no suspect any more ◄─────a token──────┘

    A request that was running at two losses is tried alone: it enters when all others in the batch have had a
    token, and no other request enters before it has had one. So the third loss ends the culprit, and the other
    requests go on.
    """

    def __init__(self) -> None:
        self._losses: dict[int, int] = {}
        """Number of losses in a row without a token between, by request."""
        self._alone: int | None = None
        """Id of the request that is being tried alone."""
        self._fresh: set[int] = set()
        """Requests in the batch that have had no token yet; noted only while there are suspects."""

    def __len__(self) -> int:
        """Number of requests that have had no token since a loss."""
        return len(self._losses)

    def lost(self, running: Iterable[int]) -> list[int]:
        """Note that the workers were lost.

        Args:
            running: the requests that they were computing.

        Returns:
            the running requests that must end.
        """
        self._alone = None
        self._fresh.clear()
        ending = []
        for request in running:
            losses = self._losses[request] = self._losses.get(request, 0) + 1
            if losses >= LOSSES_MAX:
                ending.append(request)
        return ending

    @property
    def is_watching(self) -> bool:
        """Whether it matters which requests get tokens."""
        return bool(self._losses or self._fresh)

    def must_wait(self, request: int) -> bool:
        """Return whether a request, and all behind it, must not enter the batch now."""
        if self._alone is not None:
            return self._alone != request
        return self._losses.get(request, 0) >= LOSSES_ALONE and bool(self._fresh - {request})

    def came(self, request: int) -> None:
        """Note that a request is in the batch; repeating this is harmless."""
        if not self._losses:
            return
        self._fresh.add(request)
        if self._losses.get(request, 0) >= LOSSES_ALONE:
            self._alone = request

    def left(self, request: int) -> None:
        """Note that a request has left the batch."""
        self._fresh.discard(request)
        if self._alone == request:
            self._alone = None

    def got_tokens(self, requests: Int64Array) -> None:
        """Clear requests that got tokens: the workers survived them."""
        if self.is_watching:
            for request in sorted(set(requests.tolist())):
                self.ended(request)

    def ended(self, request: int) -> None:
        """Forget a request."""
        self._losses.pop(request, None)
        self.left(request)


def found_tokens(kv: KVCacheManager, fetching: Fetching, sequence: Sequence) -> tuple[int, str]:
    """Return how much was cached of the prompt of a sequence that a plan has just admitted for the first time, in
    tokens, and why the rest was not; "" if there is no rest."""
    group, modules = sequence.group, sequence.group.modules
    seen = sequence.prompt_len - group.holes
    if sequence.recompute_from_start or not kv.prefix_cache:
        return 0, MissReason.OFF if seen > 1 else ""
    cached = max(0, min(sequence.cached_tokens - group.holes, seen - 1))
    if modules is not None:
        cached -= modules.encoded_tokens
    if cached >= seen - 1:
        return cached, ""
    return cached, (modules.miss if modules is not None else "") or _reason(kv, fetching, sequence)


def report(fetching: Fetching, sequence: Sequence, found: tuple[int, str], plan: PlanBuilder) -> CacheReport:
    """Return the cache report of a sequence that this plan admits for the first time.

    Args:
        found: `found_tokens`.
    """
    group, size, modules = sequence.group, plan.chunk_size, sequence.group.modules
    cached, miss = found
    entries = sequence.cached_tokens // size
    by_tier = [0] * len(TierKind)
    # Only chunks that were cached: the path also has those that are still to be computed.
    path = sequence.path[:entries]
    loaded = {block for block, _, _ in plan.loads}
    counts = [size] * len(path)
    if modules is not None:
        in_texts = np.bincount(modules.seen_indices // size, minlength=modules.entries)
        counts[: modules.entries] = in_texts.tolist()
    for node, tokens in zip(path, counts, strict=True):
        nearest = TierKind.HOST if node.block in loaded else TierKind.DEVICE
        by_tier[fetching.origin(group, node, nearest)] += tokens
    last = fetching.origin(group, path[-1], TierKind.DEVICE) if path else TierKind.DEVICE
    _balance(by_tier, cached, last)
    started = Started(
        group.id,
        cached,
        by_tier,
        miss=miss,
        miss_token=cached if miss else 0,
        exact=group.cut is None and modules is None,
        module_tokens=modules.seen_tokens if modules is not None else 0,
    )
    return CacheReport(started, plan.now, entries)


def _balance(by_tier: list[int], cached: int, last: TierKind) -> None:
    """Make the counts by tier add up to the tokens that were cached.

    A partial chunk counts in the tier of the chunk before it. Holes and the last token are taken off the nearest
    tiers.
    """
    difference = cached - sum(by_tier)
    if difference > 0:
        by_tier[last] += difference
        return
    for tier, tokens in enumerate(by_tier):
        change = max(difference, -tokens)
        by_tier[tier] += change
        difference -= change


def _keys_from(keys: list[bytes], start: bytes) -> Iterator[bytes]:
    """Iterate over the keys of a sorted list that begin with `start`: of a root's many children, a few."""
    for at in range(bisect_left(keys, start), len(keys)):  # `islice` would walk over all keys before them
        if not keys[at].startswith(start):
            return
        yield keys[at]


def _reason(kv: KVCacheManager, fetching: Fetching, sequence: Sequence) -> MissReason:
    """Return why the first token that was not cached is missing."""
    tree, size = kv.tree, kv.chunk_size
    index = sequence.cached_tokens // size
    is_known = index < len(sequence.path) and sequence.path[index].is_stored
    if fetching.gave_up(sequence.group) or is_known:
        return MissReason.SLOW
    above = sequence.path[index - 1] if index > sequence.stem.base else sequence.stem.root
    key = sequence.tokens.to_bytes(index * size, min((index + 1) * size, sequence.tokens.count))
    if tree.most_similar_child(above, key, 1 << 62)[1] > sequence.cached_tokens - index * size:
        return MissReason.SLOW  # requests do not wait for a part of a chunk that is far away
    departed = tree.departed(chunk_name(above.name, sequence.stem.marker + key))
    if departed is not None:
        return departed
    # A tail that this prompt continues says nothing about other prompts.
    own = sequence.path[max(index, sequence.stem.base) :][:1]

    def is_other(child_key: bytes) -> bool:
        return not key.startswith(child_key) and above.children[child_key] not in own

    has_others = any(map(is_other, above.sorted_keys))  # one of the first, however many prompts begin at a root
    if sequence.cached_tokens or any(map(is_other, _keys_from(above.sorted_keys, key[:TOKEN_BYTES]))):
        return MissReason.DIVERGED if has_others else MissReason.NEW
    if sequence.salt and not has_others and (above.parent is not None or above.key.startswith(SALT_ROOT)):
        return MissReason.SALT
    return MissReason.NEW
