"""How many blocks a sequence needs at admission, and how many of them hold all layers: with a window, those of the
window and one step. Pure."""

from __future__ import annotations

from typing import NamedTuple

from trunkline.controller.cache.block_pool import BlockPool
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.radix_tree import Node
from trunkline.controller.cache.thin_blocks import ThinPool
from trunkline.controller.cache.thin_cache import ThinCache
from trunkline.controller.cache.window_cache import WindowCache
from trunkline.controller.sequences.sequence import PrefixMatch, Sequence
from trunkline.kvstore.window_share import LoadedLayers


class AbsentChunks(NamedTuple):
    """The chunks of a match whose KV must be loaded before a sequence can use them. Each stands here once, though
    two modules of a prompt may be the same text."""

    placed: dict[Node, LoadedLayers]
    """The chunks that are not on the device, and of which layers a sequence reads them, in order."""
    widened: list[Node]
    """The chunks in thin blocks that a sequence reads in layers with a window, too."""

    @classmethod
    def of(cls, tree: RadixCache, path: list[Node], behind: int) -> AbsentChunks:
        """Return what of a path must be loaded for a sequence that sees none of the first `behind` chunks in
        layers with a window."""
        placed = dict[Node, LoadedLayers]()
        for node in path[behind:]:
            if not node.on_device:
                placed[node] = LoadedLayers.ALL
        if not isinstance(tree, ThinCache):
            return cls(placed, [])
        # The other layers read all chunks.
        unseen = dict.fromkeys((node for node in path[:behind] if not node.on_device), LoadedLayers.PLAIN)
        return cls(unseen | placed, list(dict.fromkeys(node for node in path[behind:] if tree.is_thin(node))))

    @property
    def thin(self) -> int:
        """Number of the chunks that are loaded into thin blocks."""
        return list(self.placed.values()).count(LoadedLayers.PLAIN)

    @property
    def loads(self) -> list[tuple[Node, LoadedLayers]]:
        """The chunks and the layers to load of each, the last chunk first."""
        loads = list(reversed(self.placed.items()))
        return [*((node, LoadedLayers.WINDOWED) for node in self.widened), *loads] if self.widened else loads

    @staticmethod
    def give_memory(tree: RadixCache, pool: BlockPool, node: Node, layers: LoadedLayers) -> None:
        """Give one of these chunks a block with memory for the layers that will be loaded."""
        if layers is LoadedLayers.WINDOWED:
            assert isinstance(pool, ThinPool)
            pool.widen(node.block)
        else:
            tree.place(node, pool.allocate() if layers is LoadedLayers.ALL else pool.allocate_thin())


class BlockNeed(NamedTuple):
    """What a sequence needs at admission beside the chunks that it has found on the device. Numbers of blocks."""

    absent: AbsentChunks
    blocks: int
    """All: for absent chunks, for what is not cached, for the tails of forks."""
    thin: int
    """How many of `blocks` may be thin, less one for each found chunk whose thin block becomes whole."""
    thin_last: int
    """How many of the last entries of the block table get thin blocks."""
    whole_entries: int
    """Number of the entries before these, cached ones included (`Stem.reserved`)."""

    @classmethod
    def of(cls, tree: RadixCache, sequence: Sequence, found: PrefixMatch, tails: int) -> BlockNeed:
        """Return what a sequence needs that has found these chunks.

        Args:
            tails: number of blocks for the tails of sequences that will fork from it.
        """
        path, behind = found.match.path, found.stem.behind
        absent = AbsentChunks.of(tree, path, behind)
        entries, thin_last = _first_entries(tree, sequence, behind), _thin_entries(tree, sequence, behind)
        blocks = entries - len(path) + len(absent.placed) + tails
        thin = thin_last + absent.thin - len(absent.widened)
        return cls(absent, blocks, thin, thin_last, entries - thin_last)


def _first_entries(tree: RadixCache, sequence: Sequence, behind: int) -> int:
    """Return how many entries of its block table a sequence must have blocks for at admission, those behind its
    window counted though they need none.
    """
    whole = sequence.blocks_needed(tree.chunk_size)
    if isinstance(tree, WindowCache) and sequence.is_windowed:
        return min(whole, behind + tree.blocks_max)
    return whole


def _thin_entries(tree: RadixCache, sequence: Sequence, behind: int) -> int:
    """Return how many of the last entries of its block table a sequence needs thin blocks for at admission
    (`trunkline.controller.cache.thin_blocks`); they become whole piece by piece. Samples get whole ones only."""
    if not (isinstance(tree, ThinCache) and sequence.is_windowed and sequence.group.request.width == 1):
        return 0
    return max(0, sequence.blocks_needed(tree.chunk_size) - behind - tree.blocks_max)
