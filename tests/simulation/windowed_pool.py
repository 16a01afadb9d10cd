"""The memory of simulated workers of a model in which some layers have a window: these layers' KV, kept apart."""

from __future__ import annotations

from simulation.pool import Entry, Move, SimulatedPool

from trunkline.kvstore.window_share import LoadedLayers


class WindowedPool(SimulatedPool):
    """Blocks with what layers with a window keep beside the rest; thin ones have lost it."""

    whole_blocks: int = 0
    """Blocks with memory for layers with a window at a time; 0: all."""

    def __init__(self, num_blocks: int, chunk_size: int, host_slots: int = 0, seed: int = 0) -> None:
        super().__init__(num_blocks, chunk_size, host_slots, seed)
        self._windowed: list[list[Entry | None]] = [[None] * chunk_size for _ in range(num_blocks)]

    def write(self, block: int, offset: int, entry: Entry, step: int, batch_seq_id: int) -> None:
        super().write(block, offset, entry, step, batch_seq_id)
        self._windowed[block][offset] = entry

    def copy(self, copies: list[tuple[int, int, int, int]]) -> None:
        super().copy(copies)
        for source, target, first, count in copies:
            self._windowed[target][first : first + count] = self._windowed[source][first : first + count]

    def thin(self, blocks: list[int], step: int) -> None:
        """Lose what layers with a window keep in these blocks, once the copies of them are over that plans before
        `step`, or its own saves, have ordered."""
        gone = set(blocks)
        for queue, last in ((self._saves, step), (self._loads, step - 1)):
            touching = [
                batch.step
                for batch in queue
                if batch.step <= last and any(block in gone for block, _, _ in batch.moves)
            ]
            self._hurry(queue, max(touching, default=0))
        for block in blocks:
            self._windowed[block] = [None] * self.chunk_size

    def _content(self, block: int) -> list[Entry | None]:
        """What layers of both kinds have: nothing of a block that is thin."""
        both = zip(self._blocks[block], self._windowed[block], strict=True)
        return [entry if entry == windowed else None for entry, windowed in both]

    def _fill(self, block: int, content: list[Entry | None], layers: int) -> None:
        if layers != LoadedLayers.WINDOWED:
            super()._fill(block, content, LoadedLayers.ALL)
        if layers != LoadedLayers.PLAIN:
            self._windowed[block] = list(content)

    def computed(self, step: int, late_saves: list[Move]) -> None:
        super().computed(step, late_saves)
        whole = sum(any(block) for block in self._windowed)
        assert not self.whole_blocks or whole <= self.whole_blocks, "there is no such memory"

    def look(self, table: list[int], start: int, stop: int) -> None:
        """Attend over positions of a block table in the layers with a window."""
        for position in range(start, stop):
            index, offset = divmod(position, self.chunk_size)
            self.look_at(table[index], offset)

    def look_at(self, block: int, offset: int) -> None:
        """Attend over a token of a block in the layers with a window."""
        entry = self._windowed[block][offset]
        assert entry is not None, "a token attends to KV of layers with a window that is gone"
        assert entry == self._blocks[block][offset], "layers with a window have KV of another past"
