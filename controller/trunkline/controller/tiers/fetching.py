"""Look-ahead for waiting requests: fetch what they will need from far tiers, and limit how long they wait. Pure.

When a request arrives, the chunks that it will use are known. The directory fetches them into host memory while
the request waits (CachedAttention §3.3.1), and keeps chunks that other requests would evict. If chunks are still
far away when its turn comes, the request waits for them only if computing them would take longer. It waits at most
twice the predicted time, or half the time saved, whichever is longer; then they are computed after all (a tier may
be slow or gone).

Waiting requests hold nothing, and requests behind them go on.
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
"""How long a request waits for the remote tier to say what it has."""
PATIENCE_FACTOR: Final = 2.0
"""A request waits for a fetch this many times as long as predicted, …"""
PATIENCE_SHARE: Final = 0.5
"""… or this share of the time that computing would take: whichever is longer."""
PATIENCE_LEAST_S: Final = 0.05
"""The shortest wait: predictions of short transfers are unreliable."""


@dataclass(slots=True)
class _Wait:
    """What a waiting request waits for."""

    far: dict[Node, TierKind] = field(default_factory=dict)
    """The tier of each of its chunks that was neither on the device nor in host memory when it arrived."""
    probe_until: float = 0.0
    """When it stops waiting for an answer of the remote tier; 0: it does not wait for one."""
    fetch_until: float = 0.0
    """When it stops waiting for its chunks; 0: its turn has not come yet."""
    gave_up: bool = False


class Fetching:
    """Waiting requests and the chunks that are fetched for them."""

    def __init__(self, tiers: Directory[Node], costs: StepCosts, chunk_size: int) -> None:
        self._tiers = tiers
        self._costs = costs
        self._chunk_size = chunk_size
        self._waits: dict[int, _Wait] = {}
        self._timed: dict[int, _Wait] = {}
        """The few of them that have a deadline."""

    def expect(self, group: SequenceGroup, path: AbstractSequence[Node]) -> None:
        """Fetch the chunks that a waiting request will use."""
        wait = self._waits.setdefault(group.id, _Wait())
        for node in path:
            if not node.is_loadable:
                wait.far.setdefault(node, self._tier_of(node))
        if path:
            self._tiers.want(group.id, tuple(float(x) for x in group.key), path)

    def probing(self, group: SequenceGroup, now: float) -> None:
        """Note that the remote tier was asked what it has of a request's prompt."""
        wait = self._waits.setdefault(group.id, _Wait())
        wait.probe_until = now + PROBE_PATIENCE_S
        self._timed[group.id] = wait

    def probed(self, group: SequenceGroup) -> None:
        """Note that the remote tier has answered."""
        self._waits.setdefault(group.id, _Wait()).probe_until = 0.0

    def is_probing(self, group: SequenceGroup, now: float) -> bool:
        """Return whether a request should wait for the answer of the remote tier."""
        wait = self._waits.get(group.id)
        return wait is not None and wait.probe_until > now

    def worth_waiting(self, group: SequenceGroup, far: list[Node], now: float) -> bool:
        """Return whether a request whose turn it is should wait for the next chunks of its prompt, which are far
        away.

        It also starts the request's deadline, and fetches the chunks if they are not coming yet.
        """
        wait = self._waits.setdefault(group.id, _Wait())
        if wait.gave_up:
            return False
        count, predicted_us = self._best(far)
        if not count:
            wait.gave_up = True
            # Nothing is read now that could correct a wrong prediction.
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
        """Return how many of these chunks to load, so that loading them and computing the others is fastest, and
        the
        predicted loading time in µs. Considered are the ends of runs of chunks in one tier."""
        compute_us = self._chunk_size * self._costs.token_us
        best, best_us, best_load_us = 0, len(far) * compute_us, 0.0
        for count in range(1, len(far) + 1):
            if count < len(far) and self._tier_of(far[count]) == self._tier_of(far[count - 1]):
                continue
            load_us = self._tiers.predicted_us(far[:count])
            total_us = load_us + (len(far) - count) * compute_us
            if total_us < best_us:
                best, best_us, best_load_us = count, total_us, load_us
        return best, best_load_us

    def _tier_of(self, node: Node) -> TierKind:
        tier = self._tiers.tier_of(node)
        return TierKind.REMOTE if tier is None else tier

    def give_up(self, group: SequenceGroup) -> None:
        """Let a request compute chunks that are far away."""
        self._waits.setdefault(group.id, _Wait()).gave_up = True

    def gave_up(self, group: SequenceGroup) -> bool:
        """Return whether a request computes chunks although they are stored in some tier."""
        wait = self._waits.get(group.id)
        return wait is not None and wait.gave_up

    def origin(self, group: SequenceGroup, node: Node, nearest: TierKind) -> TierKind:
        """Return the tier in which a chunk was when the request arrived; `nearest` if it was not far away."""
        wait = self._waits.get(group.id)
        return wait.far.get(node, nearest) if wait is not None else nearest

    def done(self, group: SequenceGroup) -> None:
        """Stop fetching for a request that has started or ended."""
        self._timed.pop(group.id, None)
        if self._waits.pop(group.id, None) is not None:
            self._tiers.unwant(group.id)

    def next_deadline(self, now: float) -> float:
        """Return the next deadline of a waiting request; infinity if there is none."""
        times = [t for wait in self._timed.values() for t in (wait.probe_until, wait.fetch_until) if t > now]
        return min(times, default=float("inf"))
