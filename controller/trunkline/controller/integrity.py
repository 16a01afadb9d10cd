"""The engine's invariants, checked whole: after every step in tests, and in debug mode in production.

1. Every block is in exactly one place: the pool's free list, one chunk of the tree, one sequence.
2. A chunk's `holders` equal the sequences whose path ends there; `active` follows from them.
3. A pending chunk has only pending chunks below it, and a running sequence ends there or below.
4. A child list is sorted and complete; full chunks have `chunk_size` tokens, shorter ones no children.
5. A row's block table equals its sequence's path and private blocks, and covers what it knows.
"""

from __future__ import annotations

from collections import Counter

from trunkline.controller.scheduler import Scheduler
from trunkline.controller.sequence import Sequence
from trunkline.controller.tree import PENDING, ChunkTree, Node
from trunkline.kvstore.names import chunk_name


class IntegrityError(AssertionError):
    """An invariant does not hold: a bug in the engine."""


def _check(condition: object, message: str) -> None:
    if not condition:
        raise IntegrityError(message)


def running_sequences(scheduler: Scheduler) -> list[Sequence]:
    """Everyone who owns blocks."""
    return [s for s in scheduler.rows.sequences if s is not None] + scheduler.prefilling


def check_integrity(scheduler: Scheduler) -> None:
    """Check all invariants between two steps.

    Raises:
        IntegrityError: with the first one that is broken.
    """
    running = running_sequences(scheduler)
    _check_blocks(scheduler, running)
    _check_tree(scheduler.residence.tree, running)
    _check_rows(scheduler)


def _check_blocks(scheduler: Scheduler, running: list[Sequence]) -> None:
    pool, tree = scheduler.residence.pool, scheduler.residence.tree
    owners = Counter(pool.free_blocks())
    owners.update(node.block for node in tree.nodes())
    for sequence in running:
        owners.update(sequence.private)
    twice = [block for block, count in owners.items() if count > 1]
    _check(not twice, f"blocks in more than one place: {twice}")
    _check(len(owners) == pool.num_blocks, f"{pool.num_blocks - len(owners)} blocks are lost")


def _check_tree(tree: ChunkTree, running: list[Sequence]) -> None:
    holders = Counter(id(sequence.anchor) for sequence in running)
    nodes = active = 0
    for root in tree.roots():
        _check(root.holders == holders[id(root)], f"a root has {root.holders} holders")
        _check(root.children or root.holders, "an empty tree that nobody holds was kept")
    for node in tree.nodes():
        nodes += 1
        active += node.active > 0
        _check_node(tree, node, holders[id(node)])
    _check(nodes == tree.node_count, f"the tree counts {tree.node_count} chunks and has {nodes}")
    _check(active == tree.active_count, f"the tree counts {tree.active_count} active chunks and has {active}")
    for sequence in running:
        parent = sequence.root
        for node in sequence.path:
            _check(node.parent is parent, f"the path of request {sequence.request} is not connected")
            parent = node


def _check_node(tree: ChunkTree, node: Node, holders: int) -> None:
    assert node.parent is not None
    _check(node.holders == holders, f"a chunk has {node.holders} holders, counted are {holders}")
    below = sum(child.active > 0 for child in node.children.values())
    _check(node.active == holders + below, f"a chunk's active count is {node.active}, not {holders + below}")
    _check(node.sorted_keys == sorted(node.children), "a chunk's sorted keys differ from its children")
    _check(node.name == chunk_name(node.parent.name, node.key), "a chunk's name is not its chain hash")
    full = node.token_count == tree.chunk_size
    _check(full or (0 < node.token_count < tree.chunk_size and not node.children), "a partial chunk is inner")
    if node.ready_step == PENDING:
        _check(node.active, "a pending chunk has no producer")
        waiting = all(child.ready_step == PENDING for child in node.children.values())
        _check(waiting, "a ready chunk is below a pending one")


def _check_rows(scheduler: Scheduler) -> None:
    rows = scheduler.rows
    for slot, sequence in enumerate(rows.sequences):
        if sequence is None:
            _check(rows.stays[slot] == 0, f"free slot {slot} has a stay")
            continue
        table = sequence.block_table()
        count = int(rows.block_counts[slot])
        _check(sequence.slot == slot, f"slot {slot} and its sequence disagree")
        _check(rows.tables[slot, :count].tolist() == table, f"the table of slot {slot} is not its sequence's")
        needed = int(max(rows.planned[slot], rows.known[slot] - 1))
        _check(count * rows.chunk_size >= needed, f"slot {slot} has too few blocks")
        _check(rows.known[slot] <= rows.planned[slot] + 1, f"slot {slot} knows tokens nobody computed")
