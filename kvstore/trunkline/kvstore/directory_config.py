"""The configuration of the directory of tiers below the device."""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.kvstore.eviction import EvictionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryConfig:
    """Sizes of the tiers and rules for moves. Sizes are in slots of one chunk, the same on every rank."""

    host_slots: int = 0
    disk_slots: int = 0
    """Slots of the disk tier. It needs host slots, because all moves go through host memory."""
    remote: bool = False
    """Whether there is a remote tier. It needs host slots as well."""
    policy: EvictionPolicy = EvictionPolicy.LOOK_AHEAD
    host_free: int | float = 0.05
    """Host slots to keep free if there is a tier below (CachedAttention §3.3.1): a number (int) or a share
    (float)."""
    write_behind: bool = True
    """Copy chunks that are in host memory only to the tiers below while these have room, so they survive a
    restart."""
    reads_in_flight: int = 32
    """Reads at once per tier: enough to keep a disk busy, and few enough that an urgent one does not wait long."""
    writes_in_flight: int = 16
    pin_quota: float = 0.5
    """Share of the largest tier that pinned chunks may take; the rest must stay movable."""
    prefetch: bool | None = None
    """Whether to fetch for all waiting jobs and not only for the next one. None: yes if the policy looks ahead."""
    exclusive: bool | None = None
    """Whether a full disk first gives up chunks that are in host memory as well.

    Then more chunks fit into both tiers together, but a session's whole history is written to disk again after
    each of its turns. None: yes if host memory has at least a quarter of the disk's size; with less there is
    little to gain."""
    first_generation: int = 0
    """Generations of disk slots are larger than this, so larger than those of earlier runs."""
    remote_known: int = 200_000
    """Most chunks to remember of which only the remote tier has a copy; each takes memory."""

    def validate(self) -> None:
        """Check the configuration.

        Raises:
            ValueError: A sentence that says what is wrong.
        """
        if min(self.host_slots, self.disk_slots, self.host_free, self.remote_known, self.first_generation) < 0:
            raise ValueError(
                "host_slots, disk_slots, host_free, remote_known and first_generation must not be negative"
            )
        if (self.disk_slots or self.remote) and not self.host_slots:
            raise ValueError("a disk or remote tier needs host slots: all moves go through host memory")
        if min(self.reads_in_flight, self.writes_in_flight) < 1:
            raise ValueError("reads_in_flight and writes_in_flight must be at least 1")
        if not 0.0 <= self.pin_quota <= 1.0:
            raise ValueError(f"pin_quota is {self.pin_quota}; it is a share, from 0 to 1")

    @property
    def prefetches(self) -> bool:
        return self.policy is EvictionPolicy.LOOK_AHEAD if self.prefetch is None else self.prefetch

    @property
    def is_exclusive(self) -> bool:
        return 4 * self.host_slots >= self.disk_slots if self.exclusive is None else self.exclusive

    @property
    def host_buffer(self) -> int:
        """Host slots to keep free: at least 1 if there is a tier below, at most half of all."""
        if not (self.disk_slots or self.remote):
            return 0
        free = self.host_free if isinstance(self.host_free, int) else round(self.host_free * self.host_slots)
        return min(max(1, free), self.host_slots // 2)

    @property
    def pins_max(self) -> int:
        return int(self.pin_quota * max(self.host_slots, self.disk_slots))
