"""Whether several sequences of a group can be admitted together. Pure."""

from __future__ import annotations

from trunkline.controller.allocation.kv_manager import KVCacheManager
from trunkline.controller.sequences.sequence import Sequence


def fits_group(kv: KVCacheManager, sequences: list[Sequence], spare: int, step: int) -> bool:
    """Return whether all these sequences of a group can be admitted together (gang scheduling, PagedAttention
    §4.5).

    True if nothing else runs, `spare` is 0 and the group needs no more blocks than the pool has. Full chunks
    that they have in common from the start count once. Chunks that a running sequence holds on the device cost
    nothing; idle ones count, because they can no longer be evicted.
    """
    size = 4 * kv.chunk_size
    prefixes: dict[tuple[int, bytes], int] = {}
    """Number of each prefix, consecutive from 1, by (number of the prefix before it, last chunk)."""
    active = private = 0
    for sequence in sequences:
        full = sequence.prefill_stop // kv.chunk_size if kv.prefix_cache else 0
        private += sequence.blocks_needed(kv.chunk_size) - full
        tokens = sequence.tokens.to_bytes(0, full * kv.chunk_size)
        is_plain = sequence.group.cut is None and sequence.group.modules is None
        node = kv.tree.find_root(sequence.salt) if is_plain else None
        prefix = 0
        for at in range(0, len(tokens), size):
            key = tokens[at : at + size]
            node = node.children.get(key) if node is not None else None
            if node is not None and node.ready_step >= step:
                node = None  # its producer may be gone before it is done
            known = prefixes.get((prefix, key))
            if known is None:
                known = prefixes[prefix, key] = len(prefixes) + 1
                active += node is not None and node.on_device and node.active > 0
            prefix = known
    return len(prefixes) - active + private + spare <= kv.available
