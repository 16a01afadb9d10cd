"""Check all invariants of the engine: after every step in tests, and in debug mode in production.

1. Each block has as many holders as are counted: the chunk of the tree that has it, and each sequence that has it
   in its table or among its tails. It is free exactly if it has none.
2. A chunk's `holders` are the sequences whose path ends there, and the texts that are held or pinned; its `active`
   count follows from them. The evictable blocks are counted right: those of inactive chunks on the device.
   In a tree with a window, `readers` are counted likewise, and decide what is evictable.
   Where only some layers have one, they decide what may become thin, and what is read is whole.
3. A pending chunk is on the device, its children on the device are pending, too, and the path of a running
   sequence ends there or below.
4. A child list is sorted and complete. Full chunks have `chunk_size` tokens; shorter ones have no children. Names
   are chain hashes; behind a cut they say which cut.
5. All chunks above a chunk on the device are on the device. A chunk that is not on the device has a copy in a
   lower tier, is ready, and is not in use.
6. The directory's own invariants hold (`Directory.check`). Claims are those of waiting sequences, they cover paths
   from the root on, and there are no more claimed chunks than host slots.
7. If routers are told where chunks are, they were told of every chunk that is not noted as changed.
8. The tokens that must be computed for the queue are counted right.
   In a tree with a window, 3, 5 and the paths of 6 hold for what is read only.
9. A row's block table equals its sequence's path and private blocks (of a beam only in number), and covers the
   tokens that the row knows. Either all sequences of a group have a row, or none. The tokens of a full chunk that
   has not entered the tree are still in the row's ring buffer, or in the sequence.
10. Tenants are charged for exactly the rows that the last plan decodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from trunkline.controller.allocation.kv_manager import KVCacheManager
from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.kv_events import problem_of_log
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import PENDING, Node
from trunkline.controller.cache.reader_cache import ReaderCache
from trunkline.controller.cache.thin_cache import ThinCache
from trunkline.controller.scheduling.scheduler import Scheduler
from trunkline.controller.sequences.sequence import Phase, Sequence
from trunkline.kvstore.chunks import BlockId, chunk_name
from trunkline.kvstore.root_keys import SALT_ROOT
from trunkline.kvstore.tier import TierKind


class IntegrityError(AssertionError):
    """An invariant does not hold: a bug in the engine."""


def _check(condition: object, message: str) -> None:
    if not condition:
        raise IntegrityError(message)


def check_integrity(scheduler: Scheduler) -> None:
    """Check all invariants between two steps.

    Raises:
        IntegrityError: an invariant is broken; the message names the first one.
    """
    waiting = [member for group in scheduler.queue for member in group.members if member.phase is Phase.WAITING]
    check_kv_cache(scheduler.kv, scheduler.running(), waiting, scheduler.encoding.held)
    _check_queue(scheduler)
    _check_rows(scheduler)
    _check_charged(scheduler)


def check_kv_cache(
    kv: KVCacheManager, running: list[Sequence], waiting: list[Sequence], held: Iterable[Node] = ()
) -> None:
    """Check blocks, chunks and slots (invariants 1 to 7).

    Args:
        held: chunks that are held, but not by running sequences.

    Raises:
        IntegrityError: an invariant is broken; the message names the first one.
    """
    _check_blocks(kv.pool, kv.tree, running)
    _check_tree(kv.tree, running, held)
    _check_device(kv.pool, kv.tree)
    kv.tree.tiers.check()
    _check_claims(kv.tree, running, waiting)
    problem = problem_of_log(kv.tree)
    _check(not problem, problem)


def _check_blocks(pool: BlockPool, tree: RadixCache, running: list[Sequence]) -> None:
    owners = Counter(node.block for node in tree.nodes() if node.on_device)
    twice = [block for block, count in owners.items() if count > 1]
    _check(not twice, f"blocks of more than one chunk: {twice}")
    for sequence in running:
        owners.update(sequence.private)
        owners.update(sequence.tails)
    for index in range(pool.num_blocks):
        block = BlockId(index)
        _check(
            pool.holders(block) == owners[block], f"{pool.holders(block)} hold block {block}, not {owners[block]}"
        )
    free = pool.free_blocks()
    _check(len(free) == pool.free_count, "a block is free twice")
    _check(len(free) + len(+owners) == pool.num_blocks, "a held block is free, or a block is lost")
    _check(not free & owners.keys(), f"blocks are free and held: {free & owners.keys()}")


def _check_tree(tree: RadixCache, running: list[Sequence], held: Iterable[Node]) -> None:
    holders = Counter(id(node) for sequence in running for node in (*sequence.stem.ends, sequence.anchor))
    holders.update(id(node) for node in held)
    if isinstance(tree, ReaderCache):
        _check_readers(tree, running, held)
    if isinstance(tree, ThinCache):
        _check_thin(tree, running)
    nodes = active = 0
    for root in tree.roots():
        _check(root.holders == holders[id(root)], f"a root has {root.holders} holders")
        _check(root.children or root.holders, "an empty tree without holders was kept")
    for node in tree.nodes():
        nodes += 1
        active += node.active > 0
        _check_node(tree, node, holders[id(node)])
    _check(nodes == tree.node_count, f"the tree counts {tree.node_count} chunks and has {nodes}")
    _check(active == tree.active_count, f"the tree counts {tree.active_count} active chunks and has {active}")
    for sequence in running:
        _check_path(sequence)


def _check_readers(tree: RadixCache, running: list[Sequence], held: Iterable[Node]) -> None:
    """Check which chunks are read in a tree with a window: those that sequences have not left behind, and all
    above chunks that are held as a whole."""
    readers: Counter[int] = Counter()
    for sequence in running:
        readers.update(id(node) for node in sequence.path[max(sequence.stem.base, sequence.stem.behind) :])
    for end in [*(end for sequence in running for end in sequence.stem.ends), *held]:
        node: Node | None = end
        while node is not None and node.parent is not None:
            readers[id(node)] += 1
            node = node.parent
    for node in tree.nodes():
        counted = readers[id(node)]
        _check(node.readers == counted, f"a chunk has {node.readers} readers, counted are {counted}")
        is_there = node.on_device or node.ready_step == PENDING
        _check(is_there or not counted, "a chunk that is read is not on the device")
        _check(not (counted and node.spent), "a chunk that is read is spent")


def _check_thin(tree: ThinCache, running: list[Sequence]) -> None:
    """Check that what running sequences read in layers with a window is there, and what may become thin."""
    for sequence in running:
        behind = sequence.stem.behind
        # A prompt's later blocks become whole piece by piece.
        known = sequence.path[: sequence.stem.reserved] if sequence.slot < 0 else sequence.path
        _check(not any(map(tree.is_thin, known[behind:])), f"request {sequence.request_id} reads a thin chunk")
    thinnable = sum(node.on_device and not (node.readers or tree.is_thin(node)) for node in tree.nodes())
    _check(thinnable == tree.thinnable, f"the tree counts {tree.thinnable} chunks to thin and has {thinnable}")


def _check_path(sequence: Sequence) -> None:
    """Check that a sequence's path is connected in each of its trees."""
    stem, ends = sequence.stem, list(sequence.stem.ends)
    parent: Node | None = None
    for index, node in enumerate(sequence.path):
        if index == stem.base:
            parent = stem.root
        if parent is None:
            _check(node.parent is not None and node.parent.parent is None, "a path does not begin at a root")
        else:
            _check(node.parent is parent, f"the path of request {sequence.request_id} is not connected")
        parent = node
        if index < stem.base and node is ends[0]:
            ends.pop(0)
            parent = None
    _check(not ends, f"request {sequence.request_id} holds chunks that are not in its path")


def _check_node(tree: RadixCache, node: Node, holders: int) -> None:
    assert node.parent is not None
    _check(node.holders == holders, f"a chunk has {node.holders} holders, counted are {holders}")
    below = sum(child.active > 0 for child in node.children.values())
    _check(node.active == holders + below, f"a chunk's active count is {node.active}, not {holders + below}")
    _check(node.sorted_keys == sorted(node.children), "a chunk's sorted keys differ from its children")
    plain = node.name == chunk_name(node.parent.name, node.key)
    _check(plain == node.exact or node.parent.parent is None, "a chunk's name does not say what it saw")
    root = node.parent
    while root.parent is not None:
        root = root.parent
    _check(node.exact or not root.key.startswith(SALT_ROOT), "what did not see all before it is in a plain tree")
    full = node.token_count == tree.chunk_size
    _check(full or (0 < node.token_count < tree.chunk_size and not node.children), "a partial chunk is inner")
    if node.ready_step == PENDING:
        _check(node.active, "a pending chunk has no producer")
        on_device = [child for child in node.children.values() if child.on_device]
        # A thin chunk is computed again in its place, above what is ready.
        may_wait = tree.window or isinstance(tree, ThinCache)
        waiting = may_wait or all(child.ready_step == PENDING for child in on_device)
        _check(waiting and (node.on_device or tree.window), "a ready chunk is below a pending one")


def _check_device(pool: BlockPool, tree: RadixCache) -> None:
    evictable = 0
    for node in [*tree.roots(), *tree.nodes()]:
        below = sum(child.on_device for child in node.children.values())
        _check(
            node.device_children == below,
            f"a chunk counts {node.device_children} on the device below, not {below}",
        )
        if node.parent is None:
            continue
        if not node.on_device:
            _check(tree.window or not below, "a chunk on the device is below one that is not")
            leads_on = node.children or (tree.window and node.active)
            _check(node.is_stored or leads_on, "a chunk is nowhere")
            is_used = node.ready_step == PENDING or tree.is_read(node)
            is_coming = tree.window and node.ready_step == PENDING  # it gets a block before it is computed
            _check(is_coming or not is_used, "a chunk that is not on the device is in use")
        elif not tree.is_read(node):
            evictable += 1
            _check(pool.holders(node.block) == 1, "an idle chunk's block has another holder, too")
    counts = Counter(node.account for node in tree.nodes() if node.on_device)
    for account in tree.tiers.shares.accounts():
        counted = account.counts[TierKind.DEVICE]
        _check(counted == counts[account], f"{account.tenant} has {counts[account]} blocks, counted are {counted}")
    _check(evictable == tree.evictable, f"the tree counts {tree.evictable} evictable blocks and has {evictable}")


def _check_claims(tree: RadixCache, running: list[Sequence], waiting: list[Sequence]) -> None:
    _check(not any(sequence.claim for sequence in running), "a running sequence has a claim")
    claims = Counter(id(node) for sequence in waiting for node in sequence.claim or ())
    claimed = 0
    for node in tree.nodes():
        claimed += node.claims > 0
        _check(
            node.claims == claims[id(node)], f"a chunk has {node.claims} claims, counted are {claims[id(node)]}"
        )
        assert node.parent is not None
        over = tree.window or node.parent.parent is None or node.parent.claims >= node.claims
        _check(over, "a claimed chunk is below one that is not")
    counted = tree.tiers.claimed_count
    _check(claimed == counted, f"the directory counts {counted} claimed chunks and there are {claimed}")
    _check(claimed <= tree.tiers.config.host_slots, "more chunks are claimed than the host pool holds")


def _check_queue(scheduler: Scheduler) -> None:
    counted = sum(scheduler.queue.tokens_of(group) for group in scheduler.queue)
    _check(scheduler.queue.tokens == counted, f"the queue counts {scheduler.queue.tokens} tokens, not {counted}")


def _check_rows(scheduler: Scheduler) -> None:
    rows = scheduler.rows
    for slot, sequence in enumerate(rows.sequences):
        if sequence is None:
            _check(rows.batch_seq_ids[slot] == 0, f"free slot {slot} has a sequence id")
            continue
        table = sequence.block_table()
        count = int(rows.block_counts[slot])
        _check(sequence.slot == slot, f"slot {slot} and its sequence disagree")
        if sequence.beam_position is None:
            _check(rows.tables[slot, :count].tolist() == table, f"the table of slot {slot} is not its sequence's")
        else:  # the workers move beams first: the table of a beam's row is a hint
            _check(count == len(table), f"slot {slot} has {count} blocks and its beam {len(table)}")
        needed = int(max(rows.planned[slot], rows.known[slot] - 1))
        _check(count * rows.chunk_size >= needed, f"slot {slot} has too few blocks")
        _check(rows.known[slot] <= rows.planned[slot] + 1, f"slot {slot} knows tokens that were not computed")
        next_chunk = int(rows.fills_at[slot]) - rows.chunk_size
        is_kept = rows.known[slot] - next_chunk <= 2 * rows.chunk_size and sequence.tokens.count >= next_chunk
        _check(is_kept or sequence.beam_position is not None, f"slot {slot} has lost tokens of a full chunk")
        members = sequence.group.members
        decoding = sum(member.slot >= 0 for member in members)
        _check(decoding == len(members), f"{decoding} of {len(members)} of request {sequence.request_id} decode")


def _check_charged(scheduler: Scheduler) -> None:
    rows, row_set, charged = scheduler.rows, scheduler.row_set, scheduler.queue.decoding
    stays = rows.batch_seq_ids[row_set.slots] == row_set.batch_seq_ids  # others have left since
    sequences = [s for slot in row_set.slots[stays].tolist() if (s := rows.sequences[slot]) is not None]
    submits = [sequence.group.request.submit for sequence in sequences]
    least = Counter((submit.priority, submit.tenant) for submit in submits)
    _check(charged.total() == len(row_set), f"tenants are charged for {charged.total()} rows of {len(row_set)}")
    _check(least <= charged, f"tenants are charged for {charged}, and have {least}")
