"""`cache` and `truncation` of an answer: what the engine found of its prompt, and what it was not shown."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from trunkline.kvstore.tier import TierKind
from trunkline.router.api.responses import CacheUse, TruncationResult
from trunkline.router.streams.generation import Generation

_KEPT: dict[str, Literal["cached", "recomputed"]] = {"kept": "cached", "recomputed": "recomputed"}


def cache_use(*generations: Generation) -> CacheUse | UnsetType:
    """What was found of the prompts, all together; left out where the engine has said nothing of them."""
    found = [generation.started for generation in generations]
    known = [started for started in found if started is not None]
    if not known:
        return UNSET
    tiers: dict[str, int] = {}
    for started in known:
        for kind, tokens in zip(TierKind, started.tier_tokens, strict=False):
            if tokens:
                name = kind.name.lower()
                tiers[name] = tiers.get(name, 0) + tokens
    missed = next((started for started in known if started.miss), None)
    cached = sum(started.cached_tokens for started in known)
    status: Literal["hit", "partial", "miss"] = "miss"
    if cached:
        status = "hit" if missed is None else "partial"
    slowest = [kind.name.lower() for kind in TierKind if kind.name.lower() in tiers]
    return CacheUse(
        status=status,
        tier=slowest[-1] if slowest else None,
        tiers=tiers,
        exact=all(started.exact for started in known) and not any(g.job.modules for g in generations),
        reason=None if missed is None else missed.miss,
        miss_token=None if missed is None else missed.miss_token,
    )


def truncation_result(generation: Generation) -> TruncationResult | UnsetType:
    """What was left out; nothing is said of a request that neither allows a cut nor has one."""
    job, started = generation.job, generation.started
    if not (job.cut.asked or job.cut.drops):
        return UNSET
    return TruncationResult(
        occurred=bool(job.cut.drops),
        prompt_tokens_before=len(job.prompt),
        dropped_tokens=job.cut.dropped_tokens,
        kept=None if started is None else _KEPT.get(started.cut),
    )
