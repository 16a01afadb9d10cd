"""The scheduler's part for texts of modules: who waits for them, who asked for them, what is held."""

from __future__ import annotations

from trunkline.controller.allocation.kv_manager import KVCacheManager
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.scheduling.module_calls import ModuleCalls
from trunkline.controller.scheduling.module_jobs import ModuleJobs
from trunkline.controller.scheduling.queue import RequestQueue
from trunkline.controller.sequences.sequence import Sequence, SequenceGroup
from trunkline.controller.tiers.fetching import Fetching


class ModuleEncoding:
    """See `trunkline.controller.scheduling.module_jobs` and `trunkline.controller.scheduling.module_calls`."""

    def __init__(self, kv: KVCacheManager, queue: RequestQueue, fetching: Fetching) -> None:
        self.jobs = ModuleJobs(kv.tree, queue, fetching)
        self.calls = ModuleCalls(kv, self.jobs)
        self._queue = queue
        self.finishing: list[Sequence] = []
        """Texts whose last part is computed by the plan made last: they end with the next."""

    @property
    def is_working(self) -> bool:
        """Whether something is being encoded, or asked for."""
        return bool(len(self.jobs) or len(self.calls))

    @property
    def held(self) -> list[Node]:
        """Chunks that are held by others than running sequences."""
        return [*self.jobs.held, *self.calls.held]

    def hold_for_first(self, step: int) -> SequenceGroup | None:
        """Hold texts of modules for the first request in the queue, and return that request."""
        first = next((group for group in self._queue if not group.encodes), None)
        if len(self.jobs) or self.jobs.held:
            self.jobs.hold_for(first, step)
        return first

    def make_way(self, blocked: SequenceGroup, now: float, *, going: bool) -> bool:
        """A group lacks blocks: let go of something that is held although nobody runs who needs it; whether there
        was anything.

        Args:
            going: whether anything may change by itself; if not, even what is pinned must go.
        """
        return self.jobs.make_way(blocked, going=going) or (not going and self.calls.make_way(now))
