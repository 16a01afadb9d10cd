"""How long waiting requests wait for chunks that are fetched for them. Pure.

If chunks of a request are still far away when its turn comes, it waits for them only if computing them would take
longer. It waits at most twice the predicted time, or half the time saved, whichever is longer; then they are
computed after all (a tier may be slow or gone). Waiting requests hold nothing, and requests behind them go on.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.sequences.sequence import SequenceGroup
from trunkline.controller.tiers.costs import StepCosts
from trunkline.controller.totals import Totals
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.tier import TierKind

PROBE_PATIENCE_S: Final = 0.25
"""Seconds that a request waits for the remote tier to say what it has."""
PATIENCE_FACTOR: Final = 2.0
"""Factor of the predicted time of a fetch: a request waits this long, or as `PATIENCE_SHARE` says, whichever is
longer."""
PATIENCE_SHARE: Final = 0.5
"""Share of the time that a fetch saves: a request waits this long, or as `PATIENCE_FACTOR` says, whichever is
longer."""
PATIENCE_LEAST_S: Final = 0.05
"""Shortest wait for a fetch, in seconds: predictions of short transfers are unreliable."""
FIRST_PULL_S: Final = 0.25
"""Shortest wait for a pull from a peer from which nothing was pulled yet, in seconds: ranks may be connecting and
making keys, and how fast the peer is can only be learnt from a pull that is waited for."""


@dataclass(slots=True)
class _Wait:
    """What one waiting request waits for, with the deadlines."""

    far: dict[Node, TierKind] = field(default_factory=dict)
    """Tier of each of the request's chunks that was neither on the device nor in host memory when the request
    arrived."""
    probe_until: float = 0.0
    """Time at which the request stops waiting for an answer of the remote tier; 0: it does not wait for one."""
    fetch_until: float = 0.0
    """Time at which the request stops waiting for its chunks; 0: its turn has not come yet."""
    last: Node | None = None
    """The last chunk that was worth waiting for. Until it is near, or out of reach, only the deadline ends the
    wait: chunks that are being read would be computed as well, because the first ones made reads seem slower."""
    gave_up: bool = False


class Fetching:
    """Which chunks are fetched for waiting requests, and how long each request waits for them."""

    def __init__(
        self, tiers: Directory[Node], costs: StepCosts, chunk_size: int, totals: Totals | None = None
    ) -> None:
        """
        Args:
            totals: where chunks are counted that were not pulled in time; None: they are not counted.
        """
        self._tiers = tiers
        self._costs = costs
        self._totals = totals or Totals()
        self._chunk_size = chunk_size
        self._waits: dict[int, _Wait] = {}
        self._timed: dict[int, _Wait] = {}
        """The few waiting requests that have a deadline."""
        self._done: list[int] = []
        """Requests that have started or ended since the last `settle`."""

    def expect(self, group: SequenceGroup, path: AbstractSequence[Node], behind: int = 0) -> None:
        """Fetch the chunks that a waiting request will use, the first `behind` of them in layers without a window
        only."""
        self.settle()
        wait = self._waits.setdefault(group.id, _Wait())
        for index, node in enumerate(path):
            if not (node.is_loadable if index < behind else self._tiers.is_near(node)):
                wait.far.setdefault(node, self._tier_of(node))
        if path:
            self._tiers.want(group.id, tuple(float(x) for x in group.key), path, behind)

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

    def worth_waiting(self, group: SequenceGroup, far: list[Node], now: float, saved: int = 0) -> bool:
        """Return whether a request whose turn it is should wait for chunks of its prompt, which are far away.

        It also starts the request's deadline, and fetches the chunks if they are not coming yet.

        Args:
            saved: number of chunks that need not be computed if all of `far` come; 0: these are the next ones.
        """
        saved = saved or len(far)
        wait = self._waits.setdefault(group.id, _Wait())
        if wait.gave_up:
            return False
        if not self._may_last_come(wait, far):
            count, predicted_us = self._best(far, saved)
            if not count:
                wait.gave_up = True
                # Nothing is read now that could correct a wrong prediction.
                self._tiers.doubt_costs()
                return False
            wait.last = far[count - 1]
            if not wait.fetch_until:
                saved_us = (saved if count == len(far) else count) * self._chunk_size * self._costs.token_us
                patience_us = max(PATIENCE_FACTOR * predicted_us, PATIENCE_SHARE * saved_us)
                wait.fetch_until = now + max(self._least_s(far[:count]), patience_us / 1e6)
                self._timed[group.id] = wait
        if now >= wait.fetch_until:
            wait.gave_up = True
            self._totals.gave_up_pulls("slow", sum(self._tier_of(node) is TierKind.PEER for node in far))
            return False
        if not self._tiers.is_coming(far[0]):
            self.expect(group, far)
        return True

    def _may_last_come(self, wait: _Wait, far: list[Node]) -> bool:
        """Return whether the last chunk that was worth waiting for is still far away, and within reach. What is
        behind it does not matter."""
        if wait.last is None or wait.last not in far:
            return False
        return self._tiers.predicted_us(far[: far.index(wait.last) + 1]) < inf

    def _best(self, far: list[Node], saved: int) -> tuple[int, float]:
        """Return how many of these chunks to load, so that loading them and computing the others is fastest, and
        the predicted loading time in µs. Considered are the ends of runs of chunks in one tier, or of one peer; of
        chunks in a window, which save others if all of them are there, all or none."""
        compute_us = self._chunk_size * self._costs.token_us
        best, best_us, best_load_us = 0, saved * compute_us, 0.0
        for count in range(1 if saved == len(far) else len(far), len(far) + 1):
            if count < len(far) and self._tiers.source_of(far[count]) == self._tiers.source_of(far[count - 1]):
                continue
            load_us = self._tiers.predicted_us(far[:count])
            total_us = load_us + (len(far) - count) * compute_us
            if total_us < best_us:
                best, best_us, best_load_us = count, total_us, load_us
        return best, best_load_us

    def _least_s(self, far: list[Node]) -> float:
        """Return the shortest time for which to wait for chunks."""
        peers = {node.peer for node in far if self._tier_of(node) is TierKind.PEER}
        return PATIENCE_LEAST_S if all(map(self._tiers.peers.is_measured, peers)) else FIRST_PULL_S

    def _tier_of(self, node: Node) -> TierKind:
        tier = self._tiers.tier_of(node)
        return TierKind.REMOTE if tier is None else tier

    def awaits_pulls(self, group: SequenceGroup, now: float) -> bool:
        """Return whether a job should wait for chunks of its text that only peers have."""
        wait = self._waits.get(group.id)
        if wait is None or TierKind.PEER not in wait.far.values():
            return False
        far = [node for node in wait.far if not node.is_loadable]
        tiers = {self._tiers.tier_of(node) for node in far}
        return None not in tiers and TierKind.PEER in tiers and self.worth_waiting(group, far, now)

    def has_pulled(self, group: SequenceGroup) -> bool:
        """Return whether chunks that only peers had were pulled for a job, and all that it waited for is near."""
        wait = self._waits.get(group.id)
        return wait is not None and TierKind.PEER in wait.far.values() and all(n.is_loadable for n in wait.far)

    def pass_on(self, job: SequenceGroup, group: SequenceGroup) -> None:
        """Note for a waiting request where the chunks were that a job has fetched for it."""
        fetched = self._waits.get(job.id)
        if fetched is not None:
            far = self._waits.setdefault(group.id, _Wait()).far
            for node, tier in fetched.far.items():
                far.setdefault(node, tier)

    def give_up(self, group: SequenceGroup) -> None:
        """Let a request compute chunks that are far away."""
        self._waits.setdefault(group.id, _Wait()).gave_up = True

    def gave_up(self, group: SequenceGroup) -> bool:
        """Return whether a request computes chunks although they are stored in some tier."""
        wait = self._waits.get(group.id)
        return wait is not None and wait.gave_up

    def origin(self, group: SequenceGroup, node: Node, nearest: TierKind) -> TierKind:
        """Return the tier in which a chunk was when the request arrived; `nearest` if it was not far away, or if
        it was computed instead of being pulled from a peer."""
        wait = self._waits.get(group.id)
        tier = wait.far.get(node, nearest) if wait is not None else nearest
        return nearest if tier is TierKind.PEER and nearest is TierKind.DEVICE else tier

    def done(self, group: SequenceGroup) -> None:
        """Stop fetching for a request that has started or ended, with the next `settle`."""
        self._timed.pop(group.id, None)
        if self._waits.pop(group.id, None) is not None:
            self._done.append(group.id)

    def settle(self) -> None:
        """Tell the tiers which requests want nothing any more. That takes a moment for each chunk, and no plan has
        to wait for it."""
        for request in self._done:
            self._tiers.unwant(request)
        self._done.clear()

    def next_deadline(self, now: float) -> float:
        """Return the next deadline of a waiting request; infinity if there is none."""
        times = [t for wait in self._timed.values() for t in (wait.probe_until, wait.fetch_until) if t > now]
        return min(times, default=float("inf"))
