"""Report to a client how much of its prompt was cached, in which tiers, and why the rest was not."""

from __future__ import annotations

import numpy as np

from trunkline.controller.allocation.kv_manager import KVCacheManager
from trunkline.controller.cache.radix_tree import SALT_ROOT
from trunkline.controller.sequences.plan_builder import PlanBuilder
from trunkline.controller.sequences.sequence import CacheReport, Sequence
from trunkline.controller.tiers.prefetch import Fetching
from trunkline.kvstore.chunks import chunk_name
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import MissReason


def explain(kv: KVCacheManager, fetching: Fetching, sequence: Sequence, plan: PlanBuilder) -> CacheReport:
    """Return the cache report of a sequence that this plan admits for the first time."""
    group, size = sequence.group, kv.chunk_size
    seen = sequence.prompt_len - group.holes
    if sequence.recompute_from_start or not kv.prefix_cache:
        return CacheReport(miss=MissReason.OFF if seen > 1 else "", at=plan.now)
    modules = group.modules
    exact = group.cut is None and modules is None
    found = CacheReport(tokens=max(0, min(sequence.resident - group.holes, seen - 1)), exact=exact, at=plan.now)
    # Only chunks that were cached: the path also has those that are still to be computed.
    path = sequence.path[: sequence.resident // size]
    loaded = {block for block, _, _ in plan.loads}
    counts = [size] * len(path)
    if modules is not None:
        found.module_tokens = modules.seen_tokens
        found.tokens -= modules.encoded_tokens
        in_texts = np.bincount(modules.seen_indices // size, minlength=modules.entries)
        counts[: modules.entries] = in_texts.tolist()
    for node, tokens in zip(path, counts, strict=True):
        nearest = TierKind.HOST if node.block in loaded else TierKind.DEVICE
        found.tier_tokens[fetching.origin(group, node, nearest)] += tokens
    last = fetching.origin(group, path[-1], TierKind.DEVICE) if path else TierKind.DEVICE
    _balance(found, last)
    if found.tokens < seen - 1:
        found.miss_token = found.tokens
        computed = modules.miss if modules is not None else ""
        found.miss = computed or _reason(kv, fetching, sequence)
    return found


def _balance(found: CacheReport, last: TierKind) -> None:
    """Make the counts by tier add up to the total: a partial chunk counts in the tier of the chunk before it;
    holes
    and the last token are subtracted from the nearest tiers."""
    difference = found.tokens - sum(found.tier_tokens)
    if difference > 0:
        found.tier_tokens[last] += difference
        return
    for tier, tokens in enumerate(found.tier_tokens):
        change = max(difference, -tokens)
        found.tier_tokens[tier] += change
        difference -= change
        if not difference:
            return


def _reason(kv: KVCacheManager, fetching: Fetching, sequence: Sequence) -> MissReason:
    """Return why the first token that was not cached is missing."""
    tree, size = kv.tree, kv.chunk_size
    index = sequence.resident // size
    is_known = index < len(sequence.path) and sequence.path[index].is_stored
    if fetching.gave_up(sequence.group) or is_known:
        return MissReason.SLOW
    above = sequence.path[index - 1] if index > sequence.stem.base else sequence.stem.root
    key = sequence.tokens.to_bytes(index * size, min((index + 1) * size, sequence.tokens.count))
    if tree.most_similar_child(above, key, 1 << 62)[1] > sequence.resident - index * size:
        return MissReason.SLOW  # requests do not wait for a part of a chunk that is far away
    departed = tree.departed(chunk_name(above.name, sequence.stem.marker + key))
    if departed is not None:
        return departed
    # A tail that this prompt continues says nothing about other prompts.
    others = [c for c in above.children.values() if c not in sequence.path and not key.startswith(c.key)]
    if sequence.resident or any(_agrees(child.key, key) for child in others):
        return MissReason.DIVERGED if others else MissReason.NEW
    if sequence.salt and not others and (above.parent is not None or above.key.startswith(SALT_ROOT)):
        return MissReason.SALT
    return MissReason.NEW


def _agrees(left: bytes, right: bytes) -> bool:
    return left[:4] == right[:4]
