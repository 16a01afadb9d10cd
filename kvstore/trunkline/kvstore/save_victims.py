"""Choose the host copy that makes room for a chunk which a step plan saves. Pure.

Saves are part of step plans, so there is no time to write a copy to a lower tier first: what makes room is dropped
at once. Candidates are tried in this order:

1. *clean* copies, whose chunks have another copy in a lower tier, least valuable first;
2. *dirty* copies, which are their chunks' only ones, but only if no tier below takes copies, or if the save is
   forced because its chunk loses its block. Such a copy must be worth less than the chunk, unless it is forced.

The floors of other tenants' shares are respected, except that a forced save ignores them if nothing else is left.
"""

from __future__ import annotations

from trunkline.kvstore.chunks import ChunkT
from trunkline.kvstore.copies import Copies, may_leave
from trunkline.kvstore.tier import TierKind
from trunkline.kvstore.tier_policy import EvictionPolicy, HeapVerdict, WaitingJobs


def victim_of_save(
    copies: Copies[ChunkT],
    jobs: WaitingJobs[ChunkT],
    policy: EvictionPolicy,
    chunk: ChunkT,
    step: int,
    can_drop_only_copies: bool,
    *,
    forced: bool,
) -> ChunkT | None:
    """Return the chunk whose host copy makes room for `chunk` in the plan of `step`; None: there is none.

    Args:
        can_drop_only_copies: Whether a copy may be dropped that is its chunk's only one.
        forced: The chunk loses its block and is claimed.
    """
    shares = copies.shares
    outranks_all = forced or policy is EvictionPolicy.FIFO  # by arrival a newcomer is the last to go
    above, spares_floors = chunk.parent, True
    # A chunk is found only if the one above it is. That one's block may be given up in this very plan.
    only_above = above if above is not None and not (above.disk_ready or above.remote) else None

    def judge_clean(victim: ChunkT) -> HeapVerdict:
        if victim is only_above:
            return HeapVerdict.SKIP
        if spares_floors and shares.is_protected(victim, TierKind.HOST, chunk):
            return HeapVerdict.STOP
        spared = copies.host.is_busy(victim.host, step) or (jobs.is_next(victim) and not forced)
        return HeapVerdict.SKIP if spared else HeapVerdict.TAKE

    def judge_dirty(victim: ChunkT) -> HeapVerdict:
        if spares_floors and shares.is_protected(victim, TierKind.HOST, chunk):
            return HeapVerdict.STOP
        if not outranks_all and not shares.outranks(chunk, victim, TierKind.HOST):
            return HeapVerdict.STOP
        spared = victim is only_above or copies.host.is_busy(victim.host, step) or not may_leave(victim)
        return HeapVerdict.SKIP if spared else HeapVerdict.TAKE

    def search() -> ChunkT | None:
        victim = copies.clean_victim(judge_clean)
        if victim is None and can_drop_only_copies:
            victim = copies.dirty_victim(judge_dirty)
        return victim

    victim = search()
    if victim is None and forced:
        spares_floors = False
        victim = search()
    return victim
