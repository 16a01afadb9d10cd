"""The memory of simulated workers: device blocks and host slots that hold hashes instead of keys and values.

A slot of a block holds the hash of all tokens up to its position, and the hash before it. Whoever attends to
a context must find an unbroken chain of them, so any wrong sharing, copy, swap, eviction or reuse of a block
shows at once, at the token that would have been wrong.

Saves and loads take their time, as real ones do: each batch is carried out as late as a seed says, but never later
than a plan's fences allow (`trunkline.worker.messages.StepPlan`). Until a load is carried out its block holds
nothing that could be read, so a fence that is missing shows as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

EAGER = 0.4
Move = tuple[int, int, int]
"""(block, slot, generation)."""


class Entry(NamedTuple):
    """What is stored of a token."""

    after: bytes
    """Hash up to the token …"""
    before: bytes
    """… and before it."""
    token: int
    frame: int
    """Position at which its key was rotated."""
    saw: int
    """Tokens before it that it could see."""
    reach: int = 0
    """Sum of the distances to them; of a prompt with modules."""


@dataclass(slots=True)
class _Batch:
    step: int
    moves: list[Move]
    fence: int
    """Of a load: saves of plans up to this one come first."""
    is_late: bool = False
    """Of a save: the step must have computed."""
    layers: bytes = b""
    """Of a load: of each move, the layers (`LoadedLayers`); empty: all of all."""


class SimulatedPool:
    """Blocks and slots of one group; bytes of real KV would lie in the same places."""

    observer: Callable[[bytes, list[Entry | None]], None] | None = None
    """Called with what arrives in a slot under a name."""

    def __init__(self, num_blocks: int, chunk_size: int, host_slots: int = 0, seed: int = 0) -> None:
        self.chunk_size = chunk_size
        self.host_slots = host_slots
        self._blocks: list[list[Entry | None]] = [[None] * chunk_size for _ in range(num_blocks)]
        self._chains: list[tuple[bytes, bytes] | None] = [None] * num_blocks
        """(hash after, hash before) of blocks known to hold one unbroken chain: they are walked in one step."""
        self._writers: dict[int, tuple[int, int]] = {}
        """Block → (step, id in the batch) of its last computed token: a step's sequences see only their own."""
        self.host: dict[int, tuple[int, list[Entry | None]]] = {}
        """Slot → (generation, content)."""
        self.names: dict[bytes, tuple[int, int]] = {}
        """Chunk name → (slot, generation) of what was, or is to be, saved under it last."""
        self._named: dict[tuple[int, int], bytes] = {}
        """The other way round, of slots whose content is not known yet."""
        self._saves: deque[_Batch] = deque()
        self._loads: deque[_Batch] = deque()
        self._computed_step = 0
        self._random = Random(seed)
        self.copied_tokens = 0
        self.saved_blocks = 0
        self.loaded_blocks = 0

    # Tokens

    def write(self, block: int, offset: int, entry: Entry, step: int, batch_seq_id: int) -> None:
        """Store one computed token."""
        self._blocks[block][offset] = entry
        self._chains[block] = None
        self._writers[block] = (step, batch_seq_id)

    def read(self, block: int, offset: int, step: int, batch_seq_id: int) -> Entry:
        written, writer = self._writers.get(block, (0, 0))
        assert written < step or writer == batch_seq_id, "a step reads what another sequence computes in it"
        entry = self._blocks[block][offset]
        assert entry is not None, "a token attends to KV that nobody computed, or that is not loaded yet"
        return entry

    def walk(self, table: list[int], count: int, step: int, batch_seq_id: int, unseen: int = 0) -> bytes:
        """Attend over the first `count` positions of a block table but for the first `unseen`; the hash of all
        their tokens."""
        assert count <= len(table) * self.chunk_size, "a sequence's table is too short for its tokens"
        current = b""
        first, place = divmod(unseen, self.chunk_size)
        whole, rest = divmod(count, self.chunk_size)
        if unseen:
            assert unseen < count, "a window of one token says nothing of the past"
            for offset in range(place, min(self.chunk_size, count - first * self.chunk_size)):
                entry = self.read(table[first], offset, step, batch_seq_id)
                assert offset == place or entry.before == current, "a token attends to KV of another past"
                current = entry.after
            first += 1
        for block in table[first:whole]:
            chain = self._chains[block]
            written, writer = self._writers.get(block, (0, 0))
            if chain is None or (written == step and writer != batch_seq_id):
                chain = self._chain(block, self.chunk_size, step, batch_seq_id)
                self._chains[block] = chain
            assert chain[1] == current, "a token attends to KV of another past"
            current = chain[0]
        if rest and whole >= first:
            chain = self._chain(table[whole], rest, step, batch_seq_id)
            assert chain[1] == current, "a token attends to KV of another past"
            current = chain[0]
        return current

    def _chain(self, block: int, count: int, step: int, batch_seq_id: int) -> tuple[bytes, bytes]:
        first = current = self.read(block, 0, step, batch_seq_id)
        for offset in range(1, count):
            entry = self.read(block, offset, step, batch_seq_id)
            assert entry.before == current.after, "a token attends to KV of another past"
            current = entry
        return current.after, first.before

    def copy(self, copies: list[tuple[int, int, int, int]]) -> None:
        """One launch: (source, target, first token, count) each, in any order."""
        targets = {target for _, target, _, _ in copies}
        assert len(targets) == len(copies), "two copies of one launch write to one block"
        assert not targets & {source for source, _, _, _ in copies}, "copies of one launch depend on each other"
        for source, target, first, count in copies:
            assert 0 < count <= self.chunk_size - first
            # A prompt's last token is always computed; others may be left out before anything was. `read` says so.
            last = self._blocks[source][first + count - 1]
            assert last is not None, "what is copied is not there (yet)"
            self._blocks[target][first : first + count] = self._blocks[source][first : first + count]
            self._chains[target] = None
            self.copied_tokens += count

    # Names

    def name_saves(self, names: list[bytes], saves: list[Move]) -> None:
        """The names of the chunks that a plan saves, if it says them."""
        assert len(names) in (0, len(saves)), "names do not go with saves"
        for name, (_, slot, generation) in zip(names, saves, strict=False):
            self.name(name, slot, generation)

    def name(self, name: bytes, slot: int, generation: int) -> None:
        """A chunk is coming to a slot."""
        self.names[name] = slot, generation
        self._named[slot, generation] = name

    def arrived(self, slot: int, generation: int) -> None:
        """A slot has the content of this generation."""
        name = self._named.pop((slot, generation), None)
        if name is not None and self.observer is not None:
            self.observer(name, self.host[slot][1])

    def named(self, name: bytes) -> list[Entry | None] | None:
        """Return what host memory holds under a name, after the saves that are under way; None: nothing, or it was
        overwritten."""
        self._hurry(self._saves, self._computed_step)
        slot, generation = self.names.get(name, (-1, 0))
        held = self.host.get(slot)
        return list(held[1]) if held is not None and held[0] == generation else None

    # Moves

    def order(
        self,
        step: int,
        saves: list[Move],
        loads: list[Move],
        save_fence: int,
        load_fence: int,
        layers: bytes = b"",
    ) -> None:
        """A plan arrives: its saves and loads begin some time, and it waits for what its fences say."""
        assert save_fence <= step
        assert load_fence <= step
        assert len(layers) in (0, len(loads)), "layers do not go with loads"
        assert len({block for block, _, _ in loads}) == len(loads), "two loads of one launch write to one block"
        if saves:
            self._saves.append(_Batch(step, saves, 0))
        if loads:
            self._loads.append(_Batch(step, loads, save_fence, layers=layers))
        self._hurry(self._saves, save_fence)
        for (block, _, _), which in zip(loads, layers or bytes(len(loads)), strict=True):
            # From now on anything may be in there.
            self._fill(block, [None] * self.chunk_size, which)
        self._hurry(self._loads, load_fence)

    def computed(self, step: int, late_saves: list[Move]) -> None:
        """The step is computed; some of what is on its way arrives."""
        self._computed_step = step
        if late_saves:
            self._saves.append(_Batch(step, late_saves, 0, is_late=True))
        for queue in (self._saves, self._loads):
            while queue and self._random.random() < EAGER:
                self._carry_out(queue, queue[0].step)

    def settle(self, step: int) -> None:
        """What plans up to this one ordered is done."""
        self._hurry(self._saves, step)
        self._hurry(self._loads, step)

    def _hurry(self, queue: deque[_Batch], step: int) -> None:
        while queue and queue[0].step <= step:
            self._carry_out(queue, queue[0].step)

    def _carry_out(self, queue: deque[_Batch], step: int) -> None:
        """The oldest batch, after what must come before it."""
        if queue is self._saves:
            self._hurry(self._loads, step - 1)
        else:
            self._hurry(self._saves, queue[0].fence)
        batch = queue.popleft()
        if queue is self._saves:
            self._save(batch)
        else:
            self._load(batch)

    def _save(self, batch: _Batch) -> None:
        assert not batch.is_late or batch.step <= self._computed_step, "a step waits for what it is to compute"
        assert len({slot for _, slot, _ in batch.moves}) == len(batch.moves), "two saves write to one slot"
        for block, slot, generation in batch.moves:
            assert 0 <= slot < self.host_slots, f"the host pool has {self.host_slots} slots, no {slot}"
            before = self.host.get(slot, (-1, []))[0]
            assert generation > before, "a host slot was handed out again under an old generation"
            self.host[slot] = (generation, self._content(block))
            self.arrived(slot, generation)
            self.saved_blocks += 1

    def _load(self, batch: _Batch) -> None:
        which = batch.layers or bytes(len(batch.moves))
        for (block, slot, generation), layers in zip(batch.moves, which, strict=True):
            assert slot in self.host, "a slot that nobody saved to is loaded"
            assert self.host[slot][0] == generation, "a slot is loaded that holds another generation"
            self._fill(block, self.host[slot][1], layers)
            self.loaded_blocks += 1

    def _content(self, block: int) -> list[Entry | None]:
        """What is saved of a block."""
        return list(self._blocks[block])

    def _fill(self, block: int, content: list[Entry | None], layers: int) -> None:
        """Let a block hold what is loaded, in some layers (`LoadedLayers`)."""
        assert not layers, "a model of one kind of layers is loaded in parts"
        self._blocks[block] = list(content)
        self._chains[block] = None


def chain_of(content: list[Entry | None]) -> list[Entry]:
    """Return the entries of a block that hold its chunk, perhaps some more. What an open chunk leaves of
    its block holds remains of earlier chunks, which differ from write to write."""
    chain: list[Entry] = []
    for entry in content:
        if entry is None or (chain and entry.before != chain[-1].after):
            break
        chain.append(entry)
    return chain
