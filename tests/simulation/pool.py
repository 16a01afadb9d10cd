"""The memory of simulated workers: device blocks and host slots that hold hashes instead of keys and values.

A slot of a block holds the hash of all tokens up to its position, and the hash before it. Whoever attends to
a context must find an unbroken chain of them, so any wrong sharing, copy, swap, eviction or reuse of a block
shows at once, at the token that would have been wrong.
"""

from __future__ import annotations

Entry = tuple[bytes, bytes]
"""(hash up to a token, hash before it)."""


class SimulatedPool:
    """Blocks and slots of one group; bytes of real KV would lie in the same places."""

    def __init__(self, num_blocks: int, chunk_size: int, host_slots: int = 0) -> None:
        self.chunk_size = chunk_size
        self.host_slots = host_slots
        self._blocks: list[list[Entry | None]] = [[None] * chunk_size for _ in range(num_blocks)]
        self._chains: list[Entry | None] = [None] * num_blocks
        """(hash after, hash before) of blocks known to hold one unbroken chain: they are walked in one step."""
        self._writers: dict[int, tuple[int, int]] = {}
        """Block → (step, stay) of its last computed token: one step's sequences do not see each other's."""
        self._host: dict[int, tuple[int, list[Entry | None]]] = {}
        self.copied_tokens = 0
        self.saved_blocks = 0
        self.loaded_blocks = 0

    def write(self, block: int, offset: int, entry: Entry, step: int, stay: int) -> None:
        """Store one computed token."""
        self._blocks[block][offset] = entry
        self._chains[block] = None
        self._writers[block] = (step, stay)

    def read(self, block: int, offset: int, step: int, stay: int) -> Entry:
        written, writer = self._writers.get(block, (0, 0))
        assert written < step or writer == stay, "a step reads what another sequence computes in it"
        entry = self._blocks[block][offset]
        assert entry is not None, "a token attends to KV that nobody computed"
        return entry

    def walk(self, table: list[int], count: int, step: int, stay: int) -> bytes:
        """Attend over the first `count` positions of a block table; the hash of all their tokens."""
        assert count <= len(table) * self.chunk_size, "a sequence's table is too short for its tokens"
        current = b""
        whole, rest = divmod(count, self.chunk_size)
        for block in table[:whole]:
            chain = self._chains[block]
            written, writer = self._writers.get(block, (0, 0))
            if chain is None or (written == step and writer != stay):
                chain = self._chain(block, self.chunk_size, step, stay)
                self._chains[block] = chain
            assert chain[1] == current, "a token attends to KV of another past"
            current = chain[0]
        if rest:
            chain = self._chain(table[whole], rest, step, stay)
            assert chain[1] == current, "a token attends to KV of another past"
            current = chain[0]
        return current

    def _chain(self, block: int, count: int, step: int, stay: int) -> Entry:
        first = current = self.read(block, 0, step, stay)
        for offset in range(1, count):
            entry = self.read(block, offset, step, stay)
            assert entry[1] == current[0], "a token attends to KV of another past"
            current = entry
        return current[0], first[1]

    def copy(self, copies: list[tuple[int, int, int, int]]) -> None:
        """One launch: (source, target, first token, count) each, in any order."""
        targets = {target for _, target, _, _ in copies}
        assert len(targets) == len(copies), "two copies of one launch write to one block"
        assert not targets & {source for source, _, _, _ in copies}, "copies of one launch depend on each other"
        for source, target, first, count in copies:
            assert 0 < count <= self.chunk_size - first
            self._blocks[target][first : first + count] = self._blocks[source][first : first + count]
            self._chains[target] = None
            self.copied_tokens += count

    def save(self, moves: list[tuple[int, int, int]]) -> None:
        """Device to host: (block, slot, generation) each."""
        assert len({slot for _, slot, _ in moves}) == len(moves), "two saves of one launch write to one slot"
        for block, slot, generation in moves:
            assert 0 <= slot < self.host_slots, f"the host pool has {self.host_slots} slots, no {slot}"
            before = self._host.get(slot, (-1, []))[0]
            assert generation > before, "a host slot was handed out again under an old generation"
            self._host[slot] = (generation, list(self._blocks[block]))
            self.saved_blocks += 1

    def load(self, moves: list[tuple[int, int, int]]) -> None:
        """Host to device: (block, slot, generation) each."""
        assert len({block for block, _, _ in moves}) == len(moves), "two loads of one launch write to one block"
        for block, slot, generation in moves:
            assert slot in self._host, "a slot that nobody saved to is loaded"
            assert self._host[slot][0] == generation, "a slot is loaded that holds another generation"
            self._blocks[block] = list(self._host[slot][1])
            self._chains[block] = None
            self.loaded_blocks += 1
