"""Prompts without a request: one that will probably come is fetched, one that will not come again is forgotten."""

from __future__ import annotations

from trunkline.controller.allocation.prefix_match import match_prefix
from trunkline.controller.cache.radix_cache import RadixCache
from trunkline.controller.engine.events import ExpectRequest
from trunkline.controller.engine.intake import make_group
from trunkline.controller.engine.validation import is_expectable
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.sequences.sequence import Request
from trunkline.controller.tiers.holders import KnownPath
from trunkline.controller.tiers.prefetch import Prefetcher
from trunkline.controller.tiers.tier_orders import TierOrders


def expect_prompt(
    event: ExpectRequest, prefetcher: Prefetcher, tree: RadixCache, config: EngineConfig, step: int, now: float
) -> tuple[int, int]:
    """Fetch a prompt's chunks into host memory; return how many of its tokens are known, and are being fetched.

    Args:
        step: number of the next step.
    """
    request = event.request
    if event.root:
        holders = request.submit.holders
        path = KnownPath(event.root, request.submit.tokens, event.names)
        return prefetcher.announce_path(path, holders, now, config.session_ttl_s)
    if not is_expectable(request, config):
        return 0, 0
    group = make_group(request, 0, request.submit.sampling, tree, config, is_announced=True)
    return prefetcher.announce(group, step, now)


def forget_prompt(
    request: Request, traffic: TierOrders, tree: RadixCache, config: EngineConfig, step: int
) -> None:
    """Drop the chunks that only this prompt has, from all tiers. Texts of modules stay: they are their schema's.

    Args:
        step: number of the next step.
    """
    if not is_expectable(request, config):
        return
    group = make_group(request, 0, request.submit.sampling, tree, config, is_announced=True)
    tokens = group.members[0].tokens
    found = match_prefix(tree, group.members[0], tokens.count, step)
    if found is None or found.match.pending is not None:
        return
    path, base = found.match.path, found.stem.base
    end = path[-1] if len(path) > base else found.stem.root
    start = len(path) * tree.chunk_size
    tails = tree.beginnings(end, tokens.to_bytes(start, min(start + tree.chunk_size, tokens.count)))
    gone = tree.forget_path([*path[base:], *tails])
    tree.prune_root(found.stem.root)
    traffic.forget(gone)
