"""Which chunks are copied from the device to host memory, and by which plan (asynchronous save, CachedAttention
§3.2.2). Pure.

      full ──► `waiting` ──► saves of a later plan, beside its computation
        └────► late saves of the plan that computes the chunk, layer by layer
      block needed ──► saved by the plan that takes the block, if there is room

A chunk is saved when it fills, not when its block is needed, so that the block can then be given away at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from trunkline.controller.cache.block_pool import Fences
from trunkline.controller.cache.radix_tree import Node
from trunkline.kvstore.directory import Directory
from trunkline.kvstore.window_share import LoadedLayers

SAVES_PER_PLAN: Final = 64
"""Largest number of optional saves in one plan: a burst must not fill the queue of the copy thread."""


@dataclass(slots=True)
class TierCopyPlan:
    """The part of a step plan that copies chunks between device and host: (block, slot, generation) of each."""

    step: int
    saves: list[tuple[int, int, int]] = field(default_factory=list, kw_only=True)
    late_saves: list[tuple[int, int, int]] = field(default_factory=list, kw_only=True)
    """Saves of chunks that this very step computes."""
    save_names: list[bytes] = field(default_factory=list, kw_only=True)
    """Names of the chunks of `saves`; empty without peers."""
    late_names: list[bytes] = field(default_factory=list, kw_only=True)
    """Names of the chunks of `late_saves`; empty without peers."""
    loads: list[tuple[int, int, int]] = field(default_factory=list, kw_only=True)
    load_layers: list[LoadedLayers] = field(default_factory=list, kw_only=True)
    """The layers of each of `loads`."""


class HostSaves:
    """The chunks that wait to be saved, and how saves get into plans."""

    def __init__(
        self,
        tiers: Directory[Node],
        fences: Fences,
        num_blocks: int,
        chunk_size: int,
        *,
        wants_copy: Callable[[Node], bool],
        on_room: Callable[[], None],
    ) -> None:
        """
        Args:
            wants_copy: whether a chunk should have a copy in host memory and has none.
            on_room: called when other chunks may have lost their copies to make room for one.
        """
        self._tiers = tiers
        self._fences = fences
        self._length_max = 2 * num_blocks + 64
        self._chunk_size = chunk_size
        self._wants_copy = wants_copy
        self._on_room = on_room
        self.waiting: deque[Node] = deque()
        """Full chunks that have no copy yet, in the order in which they filled."""

    def later(self, node: Node, *, partial: bool = False) -> None:
        """Have a chunk saved by one of the next plans. A chunk that is not full is saved only if it will not grow
        (`partial`)."""
        if not self._tiers.config.host_slots or (node.token_count < self._chunk_size and not partial):
            return
        if len(self.waiting) > self._length_max:
            self.waiting = deque(dict.fromkeys(other for other in self.waiting if other.on_device))
        self.waiting.append(node)

    def add_waiting(self, plan: TierCopyPlan) -> None:
        """Add saves of waiting chunks to a plan, oldest first, as long as there is room for them."""
        for _ in range(min(len(self.waiting), SAVES_PER_PLAN)):
            node = self.waiting[0]
            if node.ready_step >= plan.step and node.parent is not None:
                return  # this very plan computes it
            if self._wants_copy(node) and not self.add(node, plan):
                if not self._tiers.can_demote():
                    self.waiting.popleft()  # it gets another chance when its block is needed
                return  # writes under way will make room; without this chunk, none below it would be saved
            self.waiting.popleft()

    def add(self, node: Node, plan: TierCopyPlan, *, is_late: bool = False, forced: bool = False) -> bool:
        """Add the save of a chunk to a plan, if host memory has room for it; return whether it has.

        Args:
            is_late: the plan's own step computes the chunk.
            forced: as in `Directory.save`.
        """
        place = self._tiers.save(node, plan.step, forced=forced)
        if place is None:
            return False
        slot, generation = place
        self._on_room()
        self._fences.saved(node.block, slot, plan.step)
        (plan.late_saves if is_late else plan.saves).append((node.block, slot, generation))
        if self._tiers.config.peers:
            (plan.late_names if is_late else plan.save_names).append(node.name)
        return True
