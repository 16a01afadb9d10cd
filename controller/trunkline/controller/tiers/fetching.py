"""Look-ahead for waiting requests: what they will need from far tiers, and how long that is waited for. Pure.

A request says when it comes which chunks it will use; the directory fetches them into host memory while it waits
(CachedAttention §3.3.1), probes the remote tier for what is not known here, and keeps what others would evict.
When its turn comes and chunks are still far away, it is worth waiting for them if computing them would take
longer, but no longer than twice as long as was predicted, or than half the time that it would save: then they
are computed after all (a tier may be slow, or gone).

Waiting requests hold nothing, and those behind them go on.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Final

from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.sequences.sequence import SequenceGroup
from trunkline.controller.tiers.costs import StepCosts
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.tier import TierKind

PROBE_PATIENCE_S: Final = 0.25
"""A remote tier that does not say within this time what it has is not waited for."""
PATIENCE_FACTOR: Final = 2.0
"""Of the time that was predicted, …"""
PATIENCE_SHARE: Final = 0.5
"""… or of the time that computing would take: whichever is longer."""
PATIENCE_LEAST_S: Final = 0.05
"""Predictions of short transfers are worth little: threads wake up, others read the same disk."""


@dataclass(slots=True)
class _Wait:
    """What is known of a waiting request."""

    far: dict[Node, TierKind] = field(default_factory=dict)
    """Where chunks were when it came that were neither on the device nor in host memory."""
    probe_until: float = 0.0
    """It waits until then for what the remote tier says; 0: it does not."""
    fetch_until: float = 0.0
    """Its chunks are waited for until then; 0: its turn has not come yet."""
    gave_up: bool = False


def tier_of(node: Node) -> TierKind:
    """The nearest tier in which a chunk is."""
    if node.on_device:
        return TierKind.DEVICE
    if node.host_ready:
        return TierKind.HOST
    return TierKind.DISK if node.disk_ready else TierKind.REMOTE


class Fetching:
    """Waiting requests by id."""

    def __init__(self, tiers: Directory[Node], costs: StepCosts, chunk_size: int) -> None:
        self._tiers = tiers
        self._costs = costs
        self._chunk_size = chunk_size
        self._waits: dict[int, _Wait] = {}
        self._timed: dict[int, _Wait] = {}
        """Those of them whose patience may end: a few, while all others only queue."""

    def expect(self, group: SequenceGroup, path: AbstractSequence[Node]) -> None:
        """A request that waits will use these chunks."""
        wait = self._waits.setdefault(group.id, _Wait())
        for node in path:
            if not node.is_loadable:
                wait.far.setdefault(node, tier_of(node))
        if path:
            self._tiers.want(group.id, tuple(float(x) for x in group.key), path)

    def probing(self, group: SequenceGroup, now: float) -> None:
        """The remote tier is asked what it has of the request's prompt."""
        wait = self._waits.setdefault(group.id, _Wait())
        wait.probe_until = now + PROBE_PATIENCE_S
        self._timed[group.id] = wait

    def probed(self, group: SequenceGroup) -> None:
        """It has answered."""
        self._waits.setdefault(group.id, _Wait()).probe_until = 0.0

    def is_probing(self, group: SequenceGroup, now: float) -> bool:
        """Whether the request should not start yet."""
        wait = self._waits.get(group.id)
        return wait is not None and wait.probe_until > now

    def worth_waiting(self, group: SequenceGroup, far: list[Node], now: float) -> bool:
        """It is the request's turn, and these are the next chunks of its prompt: the first is far away."""
        wait = self._waits.setdefault(group.id, _Wait())
        if wait.gave_up:
            return False
        count, predicted_us = self._best(far)
        if not count:
            wait.gave_up = True
            # Nothing will be read now that could correct a prediction which was wrong.
            self._tiers.doubt_costs()
            return False
        if not wait.fetch_until:
            saved_us = count * self._chunk_size * self._costs.token_us
            patience_us = max(PATIENCE_FACTOR * predicted_us, PATIENCE_SHARE * saved_us)
            wait.fetch_until = now + max(PATIENCE_LEAST_S, patience_us / 1e6)
            self._timed[group.id] = wait
        if now >= wait.fetch_until:
            wait.gave_up = True
            return False
        if not self._tiers.is_coming(far[0]):
            self.expect(group, far)
        return True

    def _best(self, far: list[Node]) -> tuple[int, float]:
        """How many of the chunks to wait for, run by run of one tier, so that loading them and computing the
        others takes least; and the predicted time of loading."""
        compute_us = self._chunk_size * self._costs.token_us
        best, best_us, best_load_us = 0, len(far) * compute_us, 0.0
        for count in range(1, len(far) + 1):
            if count < len(far) and tier_of(far[count]) == tier_of(far[count - 1]):
                continue
            load_us = self._tiers.predicted_us(far[:count])
            total_us = load_us + (len(far) - count) * compute_us
            if total_us < best_us:
                best, best_us, best_load_us = count, total_us, load_us
        return best, best_load_us

    def give_up(self, group: SequenceGroup) -> None:
        """It is not to wait for chunks that are far away."""
        self._waits.setdefault(group.id, _Wait()).gave_up = True

    def gave_up(self, group: SequenceGroup) -> bool:
        """Whether chunks of its prompt that are known are not waited for."""
        wait = self._waits.get(group.id)
        return wait is not None and wait.gave_up

    def origin(self, group: SequenceGroup, node: Node, nearest: TierKind) -> TierKind:
        """Where a chunk was when the request came: far away, or else `nearest`."""
        wait = self._waits.get(group.id)
        return wait.far.get(node, nearest) if wait is not None else nearest

    def done(self, group: SequenceGroup) -> None:
        """It has started, or ended: nothing is fetched for it any more."""
        self._timed.pop(group.id, None)
        if self._waits.pop(group.id, None) is not None:
            self._tiers.unwant(group.id)

    def next_deadline(self, now: float) -> float:
        """When somebody's patience ends next; infinity if nobody waits."""
        times = [t for wait in self._timed.values() for t in (wait.probe_until, wait.fetch_until) if t > now]
        return min(times, default=float("inf"))
