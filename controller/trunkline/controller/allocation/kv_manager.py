"""How a sequence comes to own chunks and blocks, and how it lets go of them.

The three acts of ChunkAttention §3.1 (insert a path, append to the leaf chunk, remove the path) on top of
the tree: `admit`, `seal`, `leave`; and `fork`, which makes samples and beams of one prompt (PagedAttention
§4.4). They keep the promise that no KV is computed or stored twice: admission reuses every matching token, sealing
merges equal chunks, a fork shares all blocks but the tail, leaving keeps what was computed as cache.

Swapping (§4.5) and the tiers of CachedAttention are in here as two sides of residency: `leave` has chunks saved,
and `admit` has chunks loaded that it finds on the host only. Both go on beside the computation
(`trunkline.controller.cache.fences`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

import msgspec

from trunkline.controller.allocation.modules import seen_tokens
from trunkline.controller.allocation.prefix_match import match_prefix
from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import PENDING, Match, Node
from trunkline.controller.sequences.plan_builder import PlanBuilder
from trunkline.controller.sequences.sequence import ALL_ENTRIES, PrefixMatch, Sequence, Stem
from trunkline.kvstore.extents import BlockId
from trunkline.kvstore.int32_codec import pack_int32
from trunkline.worker.messages import Join, Sampling


class Admission(Enum):
    """What became of an attempt to admit a sequence."""

    ADMITTED = auto()
    NO_BLOCKS = auto()
    """The pool cannot hold its prompt now."""
    PENDING = auto()
    """Somebody is computing a chunk of its prompt; it waits, holding nothing."""
    FAR = auto()
    """Chunks of its prompt are in tiers from which they cannot be loaded yet; it waits, holding nothing."""
    LACKING = auto()
    """Texts of its modules are nowhere, or too far away to be waited for; they must be encoded first."""


class KVCacheManager:
    """Moves blocks between the pool, the tree and sequences."""

    def __init__(self, pool: BlockPool, tree: RadixCache, *, prefix_cache: bool, ttl: float = 0.0) -> None:
        """
        Args:
            prefix_cache: without it nothing that was let go of is ever found again; then the tree has no tiers.
            ttl: seconds for which a request's KV is kept behind its end, unless it says otherwise; 0: no limit.
        """
        self.pool = pool
        self.tree = tree
        self.ttl = ttl
        self.chunk_size = tree.chunk_size
        self.prefix_cache = prefix_cache
        self.next_batch_seq_id = 1

    @property
    def available(self) -> int:
        """Blocks that are free or can be made free without touching a running sequence."""
        return self.pool.free_count + self.tree.evictable

    def make_room(self, blocks: int, draft: PlanBuilder | None = None) -> bool:
        """Evict until `blocks` are free; False if that is not possible.

        With a draft, claimed chunks are saved in that plan before their blocks are used again; without, dropped.
        """
        missing = blocks - self.pool.free_count
        return missing <= 0 or self.tree.evict(missing, draft) == missing

    def fits_group(self, sequences: list[Sequence], spare: int, step: int) -> bool:
        """Whether all these sequences of a group can be admitted one after the other (gang scheduling, §4.5).

        Holds if nothing else runs, `spare` is 0 and the group's blocks are no more than the pool's.
        """
        return self._group_blocks(sequences, step) + spare <= self.available

    def _group_blocks(self, sequences: list[Sequence], step: int) -> int:
        """Blocks that admitting all these sequences takes from `available`, at most.

        Full chunks on which they agree from the start count once: the first computes them, or has them loaded, and
        the others find them. Chunks that a running sequence holds on the device count nothing; idle ones do: they
        can no longer be evicted then.
        """
        size = 4 * self.chunk_size
        prefixes: dict[tuple[int, bytes], int] = {}
        """(number of the prefix before it, chunk) → number of the prefix, consecutive from 1."""
        active = private = 0
        for sequence in sequences:
            full = self._shareable_tokens(sequence) // self.chunk_size if self.prefix_cache else 0
            private += sequence.blocks_needed(self.chunk_size) - full
            tokens = sequence.tokens.to_bytes(0, full * self.chunk_size)
            node = self.tree.find_root(sequence.salt) if self._is_plain(sequence) else None
            prefix = 0
            for at in range(0, len(tokens), size):
                key = tokens[at : at + size]
                node = node.children.get(key) if node is not None else None
                if node is not None and node.ready_step >= step:
                    node = None  # whoever computes it may be gone before it is done
                known = prefixes.get((prefix, key))
                if known is None:
                    known = prefixes[prefix, key] = len(prefixes) + 1
                    active += node is not None and node.on_device and node.active > 0
                prefix = known
        return len(prefixes) - active + private

    @staticmethod
    def _is_plain(sequence: Sequence) -> bool:
        """Whether all its chunks are in its salt's tree."""
        return sequence.group.cut is None and sequence.group.modules is None

    def _shareable_tokens(self, sequence: Sequence) -> int:
        """Tokens whose blocks may be another's. A sequence that comes back with others of its group stores its
        last token when it decodes, as all rows do: into a block of its own."""
        return sequence.prefill_stop

    def admit(
        self,
        sequence: Sequence,
        spare: int,
        now: float,
        draft: PlanBuilder,
        *,
        tails: int = 0,
        wait_for: Callable[[list[Node]], bool] | None = None,
        load_entries: int = ALL_ENTRIES,
    ) -> Admission:
        """Reserve all that the sequence's known tokens need beyond what the tree has, or nothing.

        A sequence is not to leave again in the plan in which it was admitted.

        Args:
            spare: blocks that must stay available for the growth of running sequences.
            tails: sequences that will fork from it: if its tokens end within a chunk, as many blocks are reserved
                in `sequence.tails`.
            wait_for: asked, if the prompt's next chunks are further away than the host, whether to wait for them
                (`FAR`); if not, they are computed.
            load_entries: chunks that are on the host only are loaded up to this block-table entry; behind it they
                are computed again.
        """
        place = self._find(sequence, draft.step)
        if place is None:
            return Admission.LACKING
        stem, match = place
        if match.pending is not None:
            sequence.waits_on = match.pending
            self.tree.prune_root(stem.root)
            return Admission.PENDING
        entries = len(match.path)
        if load_entries <= entries and match.partial is not None and not match.partial.on_device:
            match.partial, match.partial_tokens = None, 0
        usable = (n.is_loadable if i < load_entries else n.on_device for i, n in enumerate(match.path))
        near = next((i for i, is_usable in enumerate(usable) if not is_usable), entries)
        if near < entries:
            far = match.path[near:load_entries]
            if far and wait_for is not None and wait_for(far):
                self.tree.prune_root(stem.root)
                return Admission.FAR
            match = Match(match.path[:near], None, None, 0)
        outcome = None
        if self._covers(sequence, match):
            outcome = self._reserve(sequence, stem, match, spare, now, draft, tails)
        if outcome is None:
            self.tree.prune_root(stem.root)
            if sequence.group.modules is not None:
                return Admission.LACKING
            sequence.group.compact()
            return self.admit(
                sequence, spare, now, draft, tails=tails, wait_for=wait_for, load_entries=load_entries
            )
        return outcome

    def _covers(self, sequence: Sequence, match: Match) -> bool:
        """Whether all is there that is seen before the last part that was cut off, and all texts of modules: it
        cannot be computed alone."""
        cut, modules = sequence.group.cut, sequence.group.modules
        if modules is not None:
            return len(match.path) >= modules.entries
        found = len(match.path) * self.chunk_size + match.partial_tokens
        return cut is None or found >= max(cut.cut.closed_end, cut.cut.table_start * self.chunk_size)

    def _find(self, sequence: Sequence, step: int) -> PrefixMatch | None:
        if not self.prefix_cache:
            return PrefixMatch(Stem(self.tree.root(sequence.salt)), Match([], None, None, 0))
        return match_prefix(self.tree, sequence, self._shareable_tokens(sequence), step)

    def _reserve(
        self, sequence: Sequence, stem: Stem, match: Match, spare: int, now: float, draft: PlanBuilder, tails: int
    ) -> Admission | None:
        """None: there is no room for a part of a chunk without which the sequence cannot go on as it is."""
        if not sequence.tokens.count % self.chunk_size:
            tails = 0  # not before now: to find it may have made it a plain prompt of other length
        anchor = match.path[-1] if len(match.path) > stem.base else stem.root
        held = [*stem.pins, anchor]
        for node in held:
            self.tree.hold(node)
        if match.partial is not None:
            self.tree.hold(match.partial)
        # Once each: two modules of a prompt may be the same text.
        absent = list(dict.fromkeys(node for node in match.path if not node.on_device))
        needed = sequence.blocks_needed(self.chunk_size) - len(match.path) + len(absent) + tails
        adopt = self._adoptable(sequence, match)
        copied = match.partial if match.partial is not None and match.partial.on_device and not adopt else None
        if copied is not None and self.available < needed + spare:
            # A copy needs its source beside its destination: in a full pool do without.
            self.tree.release(copied, now)
            match.partial, match.partial_tokens = None, 0
        covers = self._covers(sequence, match)
        if self.available < needed - adopt + spare or not covers:
            if match.partial is not None:
                self.tree.release(match.partial, now)
            for node in held:
                self.tree.release(node, now)
            return Admission.NO_BLOCKS if covers else None
        sequence.stem = stem
        sequence.path = match.path
        self.tree.tiers.used(match.path, now)
        blocks = self._allocate(match, absent, needed, adopt, now, draft)
        sequence.tails = [blocks.pop() for _ in range(tails)]
        sequence.resident = len(match.path) * self.chunk_size + match.partial_tokens
        self._insert_pending(sequence, blocks, now)
        self.tree.release(anchor, now)
        self.drop_claim(sequence)
        self._enter(sequence, draft)
        return Admission.ADMITTED

    def _adoptable(self, sequence: Sequence, match: Match) -> bool:
        """A finished tail that is wholly wanted, and held or claimed by nobody else, changes hands."""
        leaf = match.partial
        if leaf is None or not leaf.on_device or leaf.children or leaf.active > 1:
            return False
        if sequence.group.encodes or leaf.pins:
            return False  # it is the end of a text, which is wanted as it is
        others = leaf.claims - (sequence.claim is not None and leaf in sequence.claim)
        return match.partial_tokens == leaf.token_count < self.chunk_size and not others

    def _allocate(
        self, match: Match, absent: list[Node], needed: int, adopt: bool, now: float, draft: PlanBuilder
    ) -> list[BlockId]:
        """Blocks for what is matched but not on the device, and the sequence's own; returns its own, in order.

        The head of a differing chunk comes into the first of them: it is there already, or copied, or loaded.
        """
        head, blocks = match.partial, list[BlockId]()
        if head is not None and adopt:
            self.tree.release(head, now)
            blocks.append(self.tree.remove(head))
        # First say what is read: making room may save chunks, and their slots must not be these.
        far_head = head if head is not None and not adopt and not head.on_device else None
        reads = [self.tree.read(node, draft) for node in absent]
        head_read = self.tree.read(far_head, draft) if far_head is not None else None
        made = self.make_room(needed - len(blocks), draft)
        assert made
        for node, read in zip(reversed(absent), reversed(reads), strict=True):
            self.tree.place(node, self.pool.allocate())
            self.tree.load(read, node.block, draft)
        blocks += [self.pool.allocate() for _ in range(needed - len(absent) - len(blocks))]
        if head is None or adopt:
            return blocks
        if head_read is None:
            draft.copies.append((head.block, blocks[0], 0, match.partial_tokens))
            draft.copy_sources.append(head)
        else:
            # What the slot holds beyond the common head is written over by the sequence's own tokens.
            self.tree.load(head_read, blocks[0], draft)
            self.tree.release(head, now)
        return blocks

    def _insert_pending(self, sequence: Sequence, blocks: list[BlockId], now: float) -> None:
        """Name the full chunks this sequence will compute, so that others wait for them; the rest is private."""
        full = self._shareable_tokens(sequence) // self.chunk_size if self.prefix_cache else 0
        new = list(blocks)
        while len(sequence.path) < full:
            at = len(sequence.path) * self.chunk_size
            key = sequence.tokens.to_bytes(at, at + self.chunk_size)
            node = sequence.anchor.children.get(key)
            if node is None:
                node = self.tree.insert(sequence.anchor, key, new.pop(0), PENDING, now, sequence.stem.marker)
            else:  # in a tier that is too far away: whoever comes next waits for this computation instead
                self.tree.place(node, new.pop(0))
                node.ready_step = PENDING
            sequence.path.append(node)
        sequence.private = new
        self.tree.hold(sequence.anchor)

    def _enter(self, sequence: Sequence, draft: PlanBuilder) -> None:
        total = sequence.tokens.count
        # With everything cached the last token is still computed, without storing it: its logits are needed.
        # So are the logits of a whole prompt whose tokens are scored.
        sequence.computed = 0 if sequence.recompute_from_start else min(sequence.resident, total - 1)
        if sequence.group.cut is not None:
            sequence.computed = max(sequence.computed, sequence.group.cut.cut.first_open)
        elif sequence.group.modules is not None:
            sequence.computed = max(sequence.computed, sequence.group.modules.entries * self.chunk_size)
        sequence.batch_seq_id = self.next_batch_seq_id
        self.next_batch_seq_id += 1
        sampling = sequence.sampling
        if sampling.prompt_logprobs >= 0 and not sequence.recompute_from_start:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)  # they have been reported
        draft.joins.append(_join(sequence, sampling))

    def fork(self, parent: Sequence, child: Sequence, tail: BlockId | None) -> None:
        """Let `child` share all that `parent` holds of its tokens, which are wholly computed or planned.

        Args:
            tail: if they end within a chunk, one of the blocks that were reserved as the parent's `tails`, taken
                out of them: it becomes the child's last. Else None.
        """
        full, rest = divmod(parent.tokens.count, self.chunk_size)
        assert len(parent.path) + len(parent.private) == full + (rest > 0), "the parent grew before its fork"
        assert (tail is None) == (rest == 0), "a tail is wanted exactly if the tokens end within a chunk"
        assert all(node.ready_step != PENDING for node in parent.path), "a pending chunk has one producer"
        child.stem = parent.stem
        child.path = list(parent.path)
        child.private = parent.private[: full - len(parent.path)]
        for block in child.private:
            self.pool.share(block)
        if tail is not None:
            child.private.append(tail)
        child.resident, child.computed = parent.resident, parent.computed
        for node in (*child.stem.pins, child.anchor):
            self.tree.hold(node)

    def mark_ready(self, sequence: Sequence, draft: PlanBuilder) -> None:
        """Publish the chunks whose last token is computed by the plan being made, and have them saved
        meanwhile."""
        for node in sequence.path[sequence.resident // self.chunk_size : sequence.computed // self.chunk_size]:
            if node.ready_step == PENDING:
                self.tree.computed(node, draft.step, draft)

    def seal(self, sequence: Sequence, kv_tokens: int, now: float) -> list[tuple[int, BlockId]]:
        """Move private chunks that are full and computed into the tree.

        If the tree already has an equal chunk on the device, our reference is given back and theirs is used. The
        block may be the same: beams of a search refer to full blocks together before one of them names them.

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
                node = self.tree.insert(anchor, key, sequence.private.pop(0), 0, now, sequence.stem.marker)
                self.tree.computed(node, 0)
            elif node.ready_step == PENDING:
                break  # its producer is not done; ours stays private and is tried again later
            elif not node.on_device:
                self.tree.place(node, sequence.private.pop(0))
            else:
                block = sequence.private.pop(0)
                self.pool.release(block)
                if block != node.block:
                    merged.append((index, node.block))
            self.tree.hold(node)
            self.tree.release(anchor, now)
            sequence.path.append(node)
        return merged

    def leave(self, sequence: Sequence, kv_tokens: int, now: float, *, claim: bool = False) -> None:
        """Let go of everything; KV of the first `kv_tokens` tokens stays cached while there is room.

        Args:
            claim: the sequence comes back: until `drop_claim` its chunks are saved when their blocks are needed.
        """
        keep = len(sequence.path)
        while keep and sequence.path[keep - 1].ready_step == PENDING:
            keep -= 1
        unfinished = sequence.path[keep:]
        held = sequence.anchor
        sequence.path = sequence.path[:keep]
        self.tree.hold(sequence.anchor)
        self.tree.release(held, now)
        sequence.private = [self._take_back(node) for node in reversed(unfinished)][::-1] + sequence.private
        if self.prefix_cache:
            self.seal(sequence, kv_tokens, now)
            tail = self._keep_tail(sequence, kv_tokens, now)
            self._keep(sequence, tail, now)
            if claim:
                self.drop_claim(sequence)
                sequence.claim = self.tree.claim(sequence.path + tail)
        for block in sequence.private + sequence.tails:
            self.pool.release(block)
        for node in (*sequence.stem.pins, sequence.anchor):
            self.tree.release(node, now)
        sequence.path, sequence.private, sequence.tails = [], [], []

    def _keep(self, sequence: Sequence, tail: list[Node], now: float) -> None:
        """Its chunks are kept for its own time, texts of modules for theirs."""
        group, path = sequence.group, sequence.path
        if group.modules is not None:
            base = sequence.stem.base
            self.tree.keep(path[:base], now, group.modules.ttl or self.ttl)
            path = path[base:]
        if group.encodes:
            for node in tail:
                self.tree.save_later(node, partial=True)  # it will not grow
        self.tree.keep(path + tail, now, group.request.ttl or self.ttl)

    def _take_back(self, node: Node) -> BlockId:
        """The block of a chunk that its producer does not compute any more."""
        if not node.is_stored:
            return self.tree.remove(node)
        node.ready_step = 0
        return self.tree.unplace(node)

    def drop_claim(self, sequence: Sequence) -> None:
        """The sequence has come back, or ended while it waited: nobody waits for its chunks any more."""
        if sequence.claim is not None:
            self.tree.unclaim(sequence.claim)
            sequence.claim = None

    def _keep_tail(self, sequence: Sequence, kv_tokens: int, now: float) -> list[Node]:
        """The computed head of the first chunk that is not full becomes a partial leaf; returns who has it now."""
        start = len(sequence.path) * self.chunk_size
        stop = min(kv_tokens, start + self.chunk_size)
        if stop - start >= self.chunk_size or stop <= start or not sequence.private:
            return []
        key = sequence.tokens.to_bytes(start, stop)
        leaf = self.tree.covered_by_sibling(sequence.anchor, key)
        shared = self.pool.holders(sequence.private[0]) > 1
        if leaf is not None and leaf.key != key and sequence.group.encodes and not leaf.is_loadable:
            leaf = None  # the end of a longer text is too far away: else this one would be encoded for ever
        if leaf is not None:
            if leaf.key == key and not (leaf.on_device or shared):
                self.tree.place(leaf, sequence.private.pop(0))
            return [leaf] if leaf.ready_step != PENDING else []
        if shared:
            return []  # a fork is still to be copied from it; a chunk's block is held by nobody besides
        leaf = self.tree.insert(sequence.anchor, key, sequence.private.pop(0), 0, now, sequence.stem.marker)
        self.tree.absorb_prefixes(leaf)
        return [leaf]


def _join(sequence: Sequence, sampling: Sampling) -> Join:
    """Behind a cut and with modules the workers count tokens as they are seen (`trunkline.kvstore.cuts`)."""
    cut, modules, holes = sequence.group.cut, sequence.group.modules, sequence.group.holes
    first = 0 if sampling.needs_history else sequence.computed
    tokens, extents = sequence.tokens.view(first), sequence.stem.extents
    if cut is not None:
        extents = cut.cut.extents()
        tokens = tokens if first else cut.cut.seen(tokens)
    elif modules is not None and not first:
        tokens = seen_tokens(modules, tokens)
    return Join(
        sequence=sequence.batch_seq_id,
        tokens=pack_int32(tokens),
        first=first - holes if first else 0,
        prompt_len=sequence.prompt_len - holes,
        blocks=pack_int32(sequence.block_table()),
        sampling=sampling,
        extents=pack_int32([value for extent in extents for value in extent]) if extents else b"",
        beam_position=sequence.beam_position,
    )
