"""How a sequence comes to own chunks and blocks, and how it lets go of them.

The three acts of ChunkAttention §3.1 (insert a path, append to the leaf chunk, remove the path) on top of
the tree: `admit`, `seal`, `leave`. They keep the promise that no KV is computed or stored twice: admission
reuses every matching token, sealing merges equal chunks, leaving keeps what was computed as cache.
"""

from __future__ import annotations

from enum import Enum, auto

from trunkline.controller.block_pool import BlockPool
from trunkline.controller.draft import PlanDraft
from trunkline.controller.sequence import Sequence
from trunkline.controller.tree import PENDING, ChunkTree, Match, Node
from trunkline.kvstore.layout import BlockId, pack_int32
from trunkline.worker.messages import Join


class Admission(Enum):
    """What became of an attempt to admit a sequence."""

    ADMITTED = auto()
    NO_BLOCKS = auto()
    """The pool cannot hold its prompt now."""
    PENDING = auto()
    """Somebody is computing a chunk of its prompt; it waits, holding nothing."""


class Residence:
    """Moves blocks between the pool, the tree and sequences."""

    def __init__(self, pool: BlockPool, tree: ChunkTree, *, prefix_cache: bool) -> None:
        self.pool = pool
        self.tree = tree
        self.chunk_size = tree.chunk_size
        self.prefix_cache = prefix_cache
        self.next_stay = 1

    @property
    def available(self) -> int:
        """Blocks that are free or can be made free without touching a running sequence."""
        return self.pool.free_count + self.tree.evictable

    def make_room(self, blocks: int) -> bool:
        """Evict until `blocks` are free; False if that is not possible."""
        missing = blocks - self.pool.free_count
        return missing <= 0 or self.tree.evict(missing) == missing

    def admit(self, sequence: Sequence, spare: int, now: float, draft: PlanDraft) -> Admission:
        """Reserve all that the sequence's known tokens need beyond what the tree has, or nothing.

        Args:
            spare: blocks that must stay available for the growth of running sequences.
        """
        root = self.tree.root(sequence.salt)
        tokens = sequence.tokens.to_bytes()
        match = self.tree.match(root, tokens, draft.step) if self.prefix_cache else Match([], None, None, 0)
        if match.pending is not None:
            sequence.waits_on = match.pending
            return Admission.PENDING
        anchor = match.path[-1] if match.path else root
        self.tree.hold(anchor)
        if match.partial is not None:
            self.tree.hold(match.partial)
        needed = sequence.blocks_needed(self.chunk_size) - len(match.path)
        adopt = match.partial is not None and self._adoptable(match.partial, match.partial_tokens)
        if self.available < needed - adopt + spare and match.partial is not None and not adopt:
            # A copy needs its source beside its destination: in a full pool do without.
            self.tree.release(match.partial, now)
            match.partial, match.partial_tokens = None, 0
        if self.available < needed - adopt + spare:
            if match.partial is not None:
                self.tree.release(match.partial, now)
            self.tree.release(anchor, now)
            return Admission.NO_BLOCKS
        sequence.root = root
        sequence.path = match.path
        blocks = self._first_block(match, adopt, now, draft)
        made = self.make_room(needed - len(blocks))
        assert made
        blocks += [self.pool.allocate() for _ in range(needed - len(blocks))]
        self._copy_head(match, adopt, blocks, draft)
        sequence.resident = len(match.path) * self.chunk_size + match.partial_tokens
        self._insert_pending(sequence, tokens, blocks, now)
        self.tree.release(anchor, now)
        self._enter(sequence, draft)
        return Admission.ADMITTED

    def _adoptable(self, leaf: Node, agreed: int) -> bool:
        """A finished tail that is wholly wanted and held by nobody but this admission changes hands."""
        return agreed == leaf.token_count < self.chunk_size and leaf.active == 1 and not leaf.children

    def _first_block(self, match: Match, adopt: bool, now: float, draft: PlanDraft) -> list[BlockId]:
        if match.partial is None:
            return []
        if adopt:
            self.tree.release(match.partial, now)
            return [self.tree.remove(match.partial)]
        draft.copy_sources.append(match.partial)
        return []

    def _copy_head(self, match: Match, adopt: bool, blocks: list[BlockId], draft: PlanDraft) -> None:
        if match.partial is not None and not adopt:
            draft.copies.append((match.partial.block, blocks[0], 0, match.partial_tokens))

    def _insert_pending(self, sequence: Sequence, tokens: bytes, blocks: list[BlockId], now: float) -> None:
        """Name the full chunks this sequence will compute, so that others wait for them; the rest is private."""
        size = 4 * self.chunk_size
        full = sequence.tokens.count // self.chunk_size if self.prefix_cache else 0
        new = list(blocks)
        while len(sequence.path) < full:
            at = len(sequence.path) * size
            node = self.tree.insert(sequence.anchor, tokens[at : at + size], new.pop(0), PENDING, now)
            sequence.path.append(node)
        sequence.private = new
        self.tree.hold(sequence.anchor)

    def _enter(self, sequence: Sequence, draft: PlanDraft) -> None:
        total = sequence.tokens.count
        # With everything cached the last token is still computed, without storing it: its logits are needed.
        sequence.computed = min(sequence.resident, total - 1)
        sequence.stay = self.next_stay
        self.next_stay += 1
        first = 0 if sequence.sampling.needs_history else sequence.computed
        draft.joins.append(
            Join(
                sequence=sequence.stay,
                tokens=sequence.tokens.to_bytes(first),
                first=first,
                prompt_len=sequence.prompt_len,
                blocks=pack_int32(sequence.block_table()),
                sampling=sequence.sampling,
            )
        )

    def mark_ready(self, sequence: Sequence, step: int) -> None:
        """Publish the chunks whose last token is computed by `step`, which is being planned."""
        for node in sequence.path[sequence.resident // self.chunk_size : sequence.computed // self.chunk_size]:
            if node.ready_step == PENDING:
                node.ready_step = step
                self.tree.absorb_prefixes(node)

    def seal(self, sequence: Sequence, kv_tokens: int, now: float) -> list[tuple[int, BlockId]]:
        """Move private chunks that are full and computed into the tree.

        If the tree already has an equal chunk, ours is given back and theirs is used.

        Returns:
            block-table entries that changed by such merging: (index, block).
        """
        merged: list[tuple[int, BlockId]] = []
        while sequence.private and kv_tokens >= (len(sequence.path) + 1) * self.chunk_size:
            index = len(sequence.path)
            anchor = sequence.anchor
            key = sequence.tokens.to_bytes(index * self.chunk_size, (index + 1) * self.chunk_size)
            node = anchor.children.get(key)
            if node is None:
                node = self.tree.insert(anchor, key, sequence.private.pop(0), 0, now)
                self.tree.absorb_prefixes(node)
            elif node.ready_step == PENDING:
                break  # its producer is not done; ours stays private and is tried again later
            else:
                self.pool.release(sequence.private.pop(0))
                merged.append((index, node.block))
            self.tree.hold(node)
            self.tree.release(anchor, now)
            sequence.path.append(node)
        return merged

    def leave(self, sequence: Sequence, kv_tokens: int, now: float) -> None:
        """Let go of everything; KV of the first `kv_tokens` tokens stays cached while there is room."""
        keep = len(sequence.path)
        while keep and sequence.path[keep - 1].ready_step == PENDING:
            keep -= 1
        unfinished = sequence.path[keep:]
        held = sequence.anchor
        sequence.path = sequence.path[:keep]
        self.tree.hold(sequence.anchor)
        self.tree.release(held, now)
        sequence.private = [self.tree.remove(node) for node in reversed(unfinished)][::-1] + sequence.private
        if self.prefix_cache:
            self.seal(sequence, kv_tokens, now)
            self._keep_tail(sequence, kv_tokens, now)
        for block in sequence.private:
            self.pool.release(block)
        self.tree.release(sequence.anchor, now)
        sequence.path, sequence.private = [], []

    def _keep_tail(self, sequence: Sequence, kv_tokens: int, now: float) -> None:
        """The computed head of the first chunk that is not full becomes a partial leaf."""
        start = len(sequence.path) * self.chunk_size
        stop = min(kv_tokens, start + self.chunk_size)
        if stop - start >= self.chunk_size or stop <= start or not sequence.private:
            return
        key = sequence.tokens.to_bytes(start, stop)
        if self.tree.covered_by_sibling(sequence.anchor, key) is None:
            leaf = self.tree.insert(sequence.anchor, key, sequence.private.pop(0), 0, now)
            self.tree.absorb_prefixes(leaf)
