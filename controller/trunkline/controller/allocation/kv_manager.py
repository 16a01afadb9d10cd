"""The KV cache manager: gives a sequence its blocks and cached chunks, and takes them back.

      admit    match the prompt with the tree, reserve blocks for the rest (ChunkAttention §3.1: insert)
      leave    give everything back; what was computed stays cached        (remove)
      fork     let a sample or beam share all blocks but the tail          (PagedAttention §4.4)

What a sequence computes enters the tree through `trunkline.controller.allocation.tree_entry` (append).

No KV is computed or stored twice: admission reuses every matching token, equal chunks merge when they enter the
tree, forking shares blocks. Swapping (PagedAttention §4.5) and the tiers of CachedAttention need no acts of their
own: `leave` lets chunks be saved, and `admit` loads chunks that are only in host memory. Saves and loads run
beside the computation (`trunkline.controller.cache.block_pool`)."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from trunkline.controller.allocation.join_message import first_to_compute, join_message
from trunkline.controller.allocation.prefix_match import match_prefix
from trunkline.controller.allocation.tree_entry import enter_full_chunks, insert_pending, keep_tail
from trunkline.controller.allocation.turn_ends import turn_end
from trunkline.controller.allocation.window_blocks import BlockNeed
from trunkline.controller.allocation.window_match import split_at_far
from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import PENDING, Match, Node
from trunkline.controller.cache.reader_cache import ReaderCache
from trunkline.controller.sequences.plan_builder import PlanBuilder
from trunkline.controller.sequences.sequence import ALL_ENTRIES, PrefixMatch, Sequence, Stem
from trunkline.kvstore.chunks import NO_BLOCK, BlockId


class Admission(Enum):
    """The outcome of an attempt to admit a sequence."""

    ADMITTED = auto()
    NO_BLOCKS = auto()
    """The pool cannot hold the sequence's prompt now."""
    PENDING = auto()
    """Another sequence is computing a chunk of the prompt. The sequence waits and holds nothing."""
    FAR = auto()
    """Chunks of the prompt are being fetched into host memory. The sequence waits and holds nothing."""
    LACKING = auto()
    """Texts of the prompt's modules are in no tier, or too far away to wait for; they must be encoded first."""


class KVCacheManager:
    """Moves blocks between the pool, the radix tree and sequences."""

    def __init__(self, pool: BlockPool, tree: RadixCache, *, prefix_cache: bool, ttl: float = 0.0) -> None:
        """
        Args:
            prefix_cache: False: nothing stays cached when its sequence leaves, and the tree has no tiers.
            ttl: seconds for which a request's KV is kept after its end, unless the request says otherwise; 0: no
                limit.
        """
        self.pool = pool
        self.tree = tree
        self.ttl = ttl
        self.chunk_size = tree.chunk_size
        self.has_window = isinstance(tree, ReaderCache)
        self.prefix_cache = prefix_cache
        self._last_batch_seq_id = 0

    @property
    def available(self) -> int:
        """Number of blocks that are free, or can be freed without touching a running sequence, with memory for all
        layers."""
        return min(self.pool.free_count + self.tree.evictable, self.pool.whole_free + self.tree.thinnable)

    def _is_available(self, blocks: int, thin: int) -> bool:
        """Return whether `blocks` blocks are free or can be freed now, all but `thin` of them whole."""
        return blocks <= self.pool.free_count + self.tree.evictable and (
            blocks - thin <= self.pool.whole_free + self.tree.thinnable
        )

    def make_room(self, blocks: int, plan: PlanBuilder | None = None, whole: int | None = None) -> bool:
        """Evict idle chunks until `blocks` blocks are free, and make unread chunks thin until `whole` blocks can
        become whole (None: as many); return whether that was possible.

        With a plan, evicted and thinned chunks are saved to the host in that plan if there is room; without one
        they are dropped, or lose what layers with a window have of them.
        """
        missing = blocks - self.pool.free_count
        if missing > 0 and self.tree.evict(missing, plan) != missing:
            return False
        lacking = (blocks if whole is None else whole) - self.pool.whole_free
        return lacking <= 0 or self.tree.thin(lacking, plan) == lacking

    def admit(
        self,
        sequence: Sequence,
        spare: int,
        plan: PlanBuilder,
        *,
        tails: int = 0,
        wait_for: Callable[[list[Node], int], bool] | None = None,
        load_entries: int = ALL_ENTRIES,
    ) -> Admission:
        """Reserve everything that a sequence's known tokens need beyond what is cached, or reserve nothing.

        A sequence must not leave again in the plan in which it was admitted.

        Args:
            spare: blocks that must stay available for the growth of running sequences.
            tails: number of sequences that will fork from the sequence. If its tokens end within a chunk, that
                many blocks are reserved in `sequence.tails`.
            wait_for: called if chunks of the prompt are in a tier below the host, with them and the number of
                those that are computed without them; says whether to wait for them (`FAR`).
            load_entries: chunks that are only in host memory are loaded up to this block-table entry; those behind
                it are computed again.
        """
        found = self._match(sequence, plan.step)
        if found is None:
            return Admission.LACKING
        stem, match = found
        if match.pending is not None:
            sequence.waits_on = match.pending
            self.tree.prune_root(stem.root)
            return Admission.PENDING
        found, far, saved = split_at_far(self.tree, sequence, found, load_entries, plan.step)
        stem, match = found
        if far and wait_for is not None and wait_for(far, saved):
            self.tree.prune_root(stem.root)
            return Admission.FAR
        has_fixed_part = self._has_fixed_part(sequence, match)
        outcome = self._reserve(sequence, found, spare, plan, tails) if has_fixed_part else None
        if outcome is not None:
            return outcome
        self.tree.prune_root(stem.root)
        if sequence.group.modules is not None:
            return Admission.LACKING
        sequence.group.compact()
        return self.admit(sequence, spare, plan, tails=tails, wait_for=wait_for, load_entries=load_entries)

    def _match(self, sequence: Sequence, step: int) -> PrefixMatch | None:
        if not self.prefix_cache:
            return PrefixMatch(Stem(self.tree.root(sequence.salt)), Match([], None, None, 0))
        return match_prefix(self.tree, sequence, sequence.prefill_stop, step)

    def _has_fixed_part(self, sequence: Sequence, match: Match) -> bool:
        """Return whether a match has what a sequence cannot compute itself: all texts of its modules, or
        everything that it sees before its last cut."""
        cut, modules = sequence.group.cut, sequence.group.modules
        if modules is not None:
            return len(match.path) >= modules.entries
        found = len(match.path) * self.chunk_size + match.partial_tokens
        return cut is None or found >= max(cut.cut.closed_end, cut.cut.table_start * self.chunk_size)

    def _reserve(
        self, sequence: Sequence, found: PrefixMatch, spare: int, plan: PlanBuilder, tails: int
    ) -> Admission | None:
        """Hold what was found, and take the blocks for the rest; without enough blocks let it go again. None: its
        cut or modules need a partial chunk that finds no room."""
        match = found.match
        if not sequence.tokens.count % self.chunk_size:
            tails = 0  # decided only now: the match may have made it a plain prompt of another length
        self._hold_match(found)
        need = BlockNeed.of(self.tree, sequence, found, tails)
        adopts = self._may_adopt_partial(sequence, match)
        copied = match.partial if match.partial is not None and match.partial.on_device and not adopts else None
        if copied is not None and not self._is_available(need.blocks + spare, need.thin):
            # A copy needs its source beside its destination: in a full pool, compute these tokens instead.
            self.tree.release(copied, plan.now, 1)
            match.partial, match.partial_tokens = None, 0
        has_fixed_part = self._has_fixed_part(sequence, match)
        if not (has_fixed_part and self._is_available(need.blocks - adopts + spare, need.thin)):
            self._release_match(found, plan.now)
            return Admission.NO_BLOCKS if has_fixed_part else None
        self._enter(sequence, found, need, adopts, tails, plan)
        return Admission.ADMITTED

    def _hold_match(self, found: PrefixMatch) -> None:
        """Keep the chunks of a match from being evicted while a sequence is admitted."""
        stem, match = found
        for node in stem.ends:
            self.tree.hold(node)
        self.tree.hold(found.anchor, len(match.path) - stem.behind)
        if match.partial is not None:
            self.tree.hold(match.partial, 1)

    def _release_match(self, found: PrefixMatch, now: float) -> None:
        """Undo `_hold_match`: the sequence goes on waiting, and holds nothing."""
        stem, match = found
        if match.partial is not None:
            self.tree.release(match.partial, now, 1)
        for node in stem.ends:
            self.tree.release(node, now)
        self.tree.release(found.anchor, now, len(match.path) - stem.behind)

    def _enter(
        self, sequence: Sequence, found: PrefixMatch, need: BlockNeed, adopts: bool, tails: int, plan: PlanBuilder
    ) -> None:
        """Give a sequence the chunks that it has found and the blocks that it needs, and add it to the batch."""
        (stem, match), anchor = found, found.anchor
        read = len(match.path) - stem.behind
        sequence.stem = stem._replace(reserved=need.whole_entries)
        sequence.path = match.path
        self.tree.tiers.used(match.path[stem.behind :], plan.now)
        blocks = self._allocate(match, need, adopts, plan)
        while len(sequence.tails) < tails:
            sequence.tails.append(blocks.pop())
        sequence.cached_tokens = len(match.path) * self.chunk_size + match.partial_tokens
        full = sequence.prefill_stop // self.chunk_size if self.prefix_cache else 0
        insert_pending(self.tree, self.pool, sequence, full, blocks, plan.now)
        self._own(sequence, sequence.path)
        self.tree.release(anchor, plan.now, read)  # the sequence holds the end of its whole path now
        self.drop_claim(sequence)
        sequence.computed = first_to_compute(sequence, self.chunk_size)
        sequence.batch_seq_id = self.new_batch_seq_id()
        plan.joins.append(join_message(sequence))

    def _may_adopt_partial(self, sequence: Sequence, match: Match) -> bool:
        """Return whether the matched partial chunk can become the sequence's own block: it is on the device, not
        full, without children, and not the end of a module's text; all of its tokens agree, and no other sequence
        holds or claims it."""
        leaf = match.partial
        if leaf is None or not leaf.on_device or leaf.children or leaf.active > 1:
            return False
        if sequence.group.encodes or leaf.pins:
            return False  # it is the end of a text, which is wanted as it is
        others = leaf.claims - (sequence.claim is not None and leaf in sequence.claim)
        return match.partial_tokens == leaf.token_count < self.chunk_size and not others

    def _allocate(self, match: Match, need: BlockNeed, adopts: bool, plan: PlanBuilder) -> list[BlockId]:
        """Give blocks to matched chunks that are not on the device, and memory to those that lack it; return the
        sequence's own new blocks, in order, the last `need.thin_last` of them thin.

        The matched head of a partial chunk comes into the first own block: adopted, copied, or loaded.
        """
        head, blocks = match.partial, list[BlockId]()
        if head is not None and adopts:
            self.tree.release(head, plan.now, 1)
            blocks.append(self.tree.remove(head))
        # Announce the reads first: making room may save chunks, which must not go into the slots that are read.
        far_head = head if head is not None and not adopts and not head.on_device else None
        loads = need.absent.loads
        reads = [self.tree.reserve_load(node, plan) for node, _ in loads] if loads else []
        head_read = self.tree.reserve_load(far_head, plan) if far_head is not None else None
        wanted = need.blocks - len(blocks)
        made = self.make_room(wanted, plan, wanted - need.thin)
        assert made
        for (node, layers), read in zip(loads, reads, strict=True):
            need.absent.give_memory(self.tree, self.pool, node, layers)
            self.tree.load(read, node.block, plan, layers)
        for _ in range(wanted - len(need.absent.placed) - need.thin_last):
            blocks.append(self.pool.allocate())
        for _ in range(need.thin_last):
            blocks.append(self.pool.allocate_thin())
        if head is None or adopts:
            return blocks
        if head_read is None:
            plan.copies.append((head.block, blocks[0], 0, match.partial_tokens))
            plan.copy_sources.append(head)
        else:
            # What the slot holds behind the common head is overwritten by the sequence's own tokens.
            self.tree.load(head_read, blocks[0], plan)
            self.tree.release(head, plan.now, 1)
        return blocks

    def new_batch_seq_id(self) -> int:
        """Return an id in the batch that no sequence has had."""
        self._last_batch_seq_id += 1
        return self._last_batch_seq_id

    def fork(self, parent: Sequence, child: Sequence, tail: BlockId | None) -> None:
        """Let `child` share the blocks of `parent`, whose tokens are all computed or planned.

        Args:
            tail: the child's last block, one of those reserved in the parent's `tails`, if the tokens end within a
                chunk; else None.
        """
        full, rest = divmod(parent.tokens.count, self.chunk_size)
        assert len(parent.path) + len(parent.private) == full + (rest > 0), "the parent grew before its fork"
        assert (tail is None) == (rest == 0), "a tail is wanted exactly if the tokens end within a chunk"
        read = parent.path[parent.stem.behind :]
        assert all(node.ready_step != PENDING for node in read), "a pending chunk has one producer"
        child.stem = parent.stem
        child.path = list(parent.path)
        child.private = parent.private[: full - len(parent.path)]
        for block in child.private:
            self.pool.share(block)
        if tail is not None:
            child.private.append(tail)
        child.cached_tokens, child.computed = parent.cached_tokens, parent.computed
        for node in child.stem.ends:
            self.tree.hold(node)
        self.tree.hold(child.anchor, child.read_chunks)

    def move_window(self, sequence: Sequence, position: int) -> bool:
        """Give up the chunks of a running sequence that no query from `position` on sees. They stay cached until
        their blocks are needed. Return whether there are any."""
        if not isinstance(self.tree, ReaderCache) or not sequence.is_windowed:
            return False
        stem, behind = sequence.stem, min(self.tree.behind(position), len(sequence.path))
        if behind <= stem.behind:
            return False
        self.tree.move_window(sequence.path, stem.behind, behind)
        sequence.stem = stem._replace(behind=behind)
        return True

    def mark_ready(self, sequence: Sequence, plan: PlanBuilder) -> None:
        """Make chunks readable whose last token this plan computes, and have them saved to the host."""
        first, stop = sequence.cached_tokens // self.chunk_size, sequence.computed // self.chunk_size
        for node in sequence.path[first:stop]:
            if node.ready_step == PENDING:
                self.tree.computed(node, plan.step, plan)

    def leave(
        self, sequence: Sequence, kv_tokens: int, now: float, *, claim: bool = False, ends: bool = False
    ) -> None:
        """Take everything back from a sequence; KV of its first `kv_tokens` tokens stays cached while there is
        room.

        Args:
            claim: the sequence will resume: until `drop_claim`, its chunks are saved when their blocks are needed.
            ends: the sequence will not resume.
        """
        keep = len(sequence.path)
        while keep and sequence.path[keep - 1].ready_step == PENDING:
            keep -= 1
        unfinished = sequence.path[keep:]
        held, read = sequence.anchor, sequence.read_chunks
        sequence.path = sequence.path[:keep]
        self.tree.hold(sequence.anchor, sequence.read_chunks)
        self.tree.release(held, now, read)
        taken = [self._take_back(node) for node in reversed(unfinished)][::-1]
        sequence.private = [block for block in taken if block != NO_BLOCK] + sequence.private
        if self.prefix_cache:
            enter_full_chunks(self.tree, self.pool, sequence, kv_tokens, now)
            tail = keep_tail(self.tree, self.pool, sequence, kv_tokens, now)
            self._own(sequence, sequence.path + tail)
            self._keep(sequence, tail, now)
            if ends and not sequence.group.encodes:
                end = turn_end(sequence, self.chunk_size, now)
                own = max(sequence.stem.base, sequence.stem.behind)
                self.tree.ended([*sequence.path[own:], *tail], end, now)
            if claim:
                self.drop_claim(sequence)
                sequence.claim = self.tree.claim(sequence.stem.used(sequence.path) + tail)
        for block in sequence.private + sequence.tails:
            self.pool.release(block)
        for node in sequence.stem.ends:
            self.tree.release(node, now)
        self.tree.release(sequence.anchor, now, sequence.read_chunks)
        sequence.path, sequence.private, sequence.tails = [], [], []

    def _own(self, sequence: Sequence, chunks: list[Node]) -> None:
        """Count chunks of a sequence in its tenant's share of the tiers, if it has one."""
        submit = sequence.group.request.submit
        account = self.tree.tiers.shares.account(submit.tenant, submit.kv_floor, submit.kv_ceiling)
        self.tree.own(chunks, account)

    def _keep(self, sequence: Sequence, tail: list[Node], now: float) -> None:
        """Set how long the chunks of a sequence that leaves are kept; texts of modules have a time of their
        own."""
        group, path = sequence.group, sequence.path
        if group.modules is not None:
            base = sequence.stem.base
            self.tree.keep(path[:base], now, group.modules.ttl or self.ttl)
            path = path[base:]
        if group.encodes:
            for node in tail:
                self.tree.saves.later(node, partial=True)  # it will not grow
        self.tree.keep(path + tail, now, group.request.submit.ttl or self.ttl)

    def _take_back(self, node: Node) -> BlockId:
        """Return the block of a pending chunk whose producer leaves; `NO_BLOCK`: it had none yet."""
        if not (node.is_stored or self.tree.leads_on(node)):
            self.tree.drop_below(node)  # chunks that came from a tier or a peer while this one was to be computed
            return self.tree.remove(node)
        if node.device_children and not self.tree.window:
            self.tree.drop_below(node)  # it was to be computed again above them
        node.ready_step = 0
        return self.tree.unplace(node) if node.on_device else NO_BLOCK

    def drop_claim(self, sequence: Sequence) -> None:
        """Give up the claim of a sequence that has resumed, or ended while it waited."""
        if sequence.claim is not None:
            self.tree.unclaim(sequence.claim)
            sequence.claim = None
