"""The fields `cache` and `truncation` of an answer: KV found for its prompt, and tokens left out of it."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from trunkline.kvstore.tier import TierKind
from trunkline.router.api.responses import CacheUse, TruncationResult
from trunkline.router.streams.generation import Generation

_KEPT: dict[str, Literal["cached", "recomputed"]] = {"kept": "cached", "recomputed": "recomputed"}


def cache_use(*generations: Generation) -> CacheUse | UnsetType:
    """Return the KV found for the prompts together; UNSET if no engine has reported it."""
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
    """Return what was left out of a prompt; UNSET if the request has no cut and allows none."""
    job, started = generation.job, generation.started
    if not (job.cut.asked or job.cut.drops):
        return UNSET
    return TruncationResult(
        occurred=bool(job.cut.drops),
        prompt_tokens_before=len(job.prompt),
        dropped_tokens=job.cut.dropped_tokens,
        kept=None if started is None else _KEPT.get(started.cut),
    )
