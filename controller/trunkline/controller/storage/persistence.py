"""What a controller reads after a restart: the index of the disk tier's chunks.

The engine reports what has changed on disk (verified writes, freed slots, chunks that moved behind a cut), and the
index follows a moment later. At the start the radix tree is built again from the index, with nodes whose chunks
are on disk only (`engine/disk_chunks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import structlog

from trunkline.controller.engine.disk_chunks import DiskChange, StoredChunks
from trunkline.controller.storage.database import DatabaseInUseError, DatabaseUnavailableError
from trunkline.controller.storage.tier_index import TierIndex

log = structlog.get_logger()


class Persistence:
    """The index, if there is a disk tier; otherwise nothing is written or found."""

    def __init__(self, index_path: str, fingerprint: bytes, wall: float, monotonic: float) -> None:
        """
        Args:
            index_path: Path of the index's file; "" for none.
            fingerprint: The tiers' fingerprint.
            wall: Seconds since the epoch, now.
            monotonic: The same moment by the controller's clock.

        Raises:
            DatabaseInUseError: Another process has the file.
        """
        self.index: TierIndex | None = None
        self.problem = ""
        """Why there is no index although there should be one: the disk may be lost. A group goes on without."""
        try:
            if index_path:
                self.index = TierIndex.open(Path(index_path), fingerprint, wall - monotonic)
        except DatabaseInUseError:
            raise
        except DatabaseUnavailableError as error:
            self.problem = str(error)

    @property
    def first_generation(self) -> int:
        """Return the number above which this run's generations of disk slots begin."""
        return self.index.first_generation if self.index is not None else 0

    def load(self, slots: int, now: float) -> StoredChunks | None:
        """Return the chunks that an earlier run, or earlier workers, left on disk; None if there is no disk tier.

        Args:
            slots: Number of slots that the disk tier has now.
        """
        if self.index is None or not slots:
            return None
        self.index.flush()  # changes that an earlier group of workers made may still be on their way into the file
        stored = self.index.load(slots, now)
        if stored.chunks:
            log.info("chunks found on disk", chunks=len(stored.chunks), dropped=stored.dropped)
        return stored

    def note(self, changes: Sequence[DiskChange]) -> None:
        """Write changes of the disk tier into the index."""
        if self.index is not None and changes:
            self.index.note(changes)

    def close(self) -> None:
        """Write all pending changes, and release the file."""
        if self.index is not None:
            self.index.close()
