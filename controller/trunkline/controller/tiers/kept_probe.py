"""What the remote tier has of what was kept behind a prompt's cut. Pure.

      the prompt's block table     0   1   2   3   4   5   6   7      behind the cut from chunk 1 on
      names of the history         ████████████████                   computed before the cut: first question
      names behind the cut                         ████████████       below those: second question

The names of what was computed behind a cut depend on how much had been computed before it. The store's answer to
the first question says how much that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.sequences.sequence import SequenceGroup
from trunkline.controller.tiers.holders import kept_trails
from trunkline.kvstore.chunks import ChunkName, chain
from trunkline.kvstore.cuts import KeptTable


class KeptProbe(NamedTuple):
    """Successive chunks of the block table of a prompt with a cut, which the store may have."""

    table: KeptTable
    names: list[ChunkName]
    """Names of the table's chunks from the first one on; the store is asked for the last ones."""
    start: int
    """Index of the first chunk for which the store is asked."""
    is_history: bool
    """Whether the store is asked for names of the history."""

    def following(self, present: int, most: int) -> KeptProbe | None:
        """Return the question that follows the answer that the store has `present` of the chunks; None: none does.

        Args:
            most: largest number of chunks for which to ask.
        """
        table, count = self.table, self.start + present
        if not self.is_history or not table.first <= count < len(table.names):
            return None
        return _behind(table, self.names[:count], most)


def kept_probe(tree: RadixCache, group: SequenceGroup, path: Sequence[Node], most: int) -> KeptProbe | None:
    """Return the first question about what a tree lacks of a prompt with a cut; None: it lacks no whole chunk.

    Args:
        path: the chunks of the block table that the tree has.
        most: largest number of chunks for which to ask.
    """
    assert group.cut is not None
    cut, history, before = group.cut.cut, group.cut.history, group.cut.chain
    root, size = tree.root_name(group.request.submit.salt), tree.chunk_bytes
    rest = history[len(before) * size : len(history) - len(history) % size]
    names = [*before, *chain(before[-1] if before else root, rest, tree.chunk_size)]
    table, known = KeptTable.of(cut, names, history, root), [node.name for node in path]
    if len(known) >= len(table.names):
        return None
    if len(known) > table.first and known[-1] != table.names[len(known) - 1]:
        return _behind(table, known, most)
    asked = [ChunkName(name) for name in table.names[len(known) : len(known) + most]]
    return KeptProbe(table, [*known, *asked], len(known), is_history=True)


def _behind(table: KeptTable, known: list[ChunkName], most: int) -> KeptProbe:
    above = known[-1] if len(known) > table.first else table.root
    asked = [ChunkName(name) for name in table.behind(above, len(known))[:most]]
    return KeptProbe(table, [*known, *asked], len(known), is_history=False)


def enter_kept(
    tree: RadixCache, group: SequenceGroup, probe: KeptProbe, present: int, step: int, now: float
) -> None:
    """Add the chunks that the store has to the tree, if those above them are still there under the same names.

    Args:
        present: how many of the chunks for which it was asked the store has.
        step: number of the next step.
    """
    if group.cut is None or not present:
        return
    stop = probe.start + present
    for trail in kept_trails(tree, group.members[0], group.cut, probe.names[:stop], step):
        node, keys = trail.root, trail.keys[: max(0, stop - trail.first)]
        for index, key in enumerate(keys, trail.first):
            child = node.children.get(key)
            if (child is None and index < probe.start) or (child is not None and child.name != probe.names[index]):
                tree.prune_root(trail.root)
                return
            if index >= probe.start:
                child = tree.add_remote(node, key, now, trail.marker, probe.names[index])
            assert child is not None
            node = child
        tree.prune_root(trail.root)
