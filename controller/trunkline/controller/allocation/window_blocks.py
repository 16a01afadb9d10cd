"""How many blocks a sequence has at admission, and how many of them hold all layers: with a window, those of the
window and one step. Pure."""

from __future__ import annotations

from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.cache.thin_cache import ThinCache
from trunkline.controller.cache.window_cache import WindowCache
from trunkline.controller.sequences.sequence import Sequence


def first_entries(tree: RadixCache, sequence: Sequence, behind: int) -> int:
    """Return how many entries of its block table a sequence must have blocks for at admission, those behind its
    window counted though they need none.
    """
    whole = sequence.blocks_needed(tree.chunk_size)
    if isinstance(tree, WindowCache) and sequence.is_windowed:
        return min(whole, behind + tree.blocks_max)
    return whole


def thin_entries(tree: RadixCache, sequence: Sequence, behind: int) -> int:
    """Return how many of the last entries of its block table a sequence needs thin blocks for at admission
    (`trunkline.controller.cache.thin_blocks`); they become whole piece by piece. Samples get whole ones only."""
    if not (isinstance(tree, ThinCache) and sequence.is_windowed and sequence.group.request.width == 1):
        return 0
    return max(0, sequence.blocks_needed(tree.chunk_size) - behind - tree.blocks_max)
