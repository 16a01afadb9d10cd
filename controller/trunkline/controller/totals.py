"""The counts of a controller since its start: one object, which is handed on whole when the workers are
replaced."""

from __future__ import annotations

from dataclasses import dataclass, field

from trunkline.kvstore.tier import TierKind, TierTotals


@dataclass(slots=True)
class Totals:
    """Totals since the start of the controller. Each room counts what it does; `service/status.py` reports all."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    plan_copies: int = 0
    """Number of steps for which the workers rebuilt their decode plan, because of new rows or a row that filled
    its block."""
    replayed_steps: int = 0
    """Number of steps that were graphs on GPUs."""
    kv_bytes_read: int = 0
    """Bytes of KV that decode attention has read on rank 0."""
    tier_tokens: list[int] = field(default_factory=lambda: [0] * len(TierKind))
    """Number of `cached_tokens` that were in each tier."""
    misses: dict[str, int] = field(default_factory=dict)
    """Number of requests that missed a part of their prompt in the cache, by reason."""
    drafted_tokens: int = 0
    """Number of drafts that were computed."""
    accepted_drafts: int = 0
    """Number of drafts that were what the model drew, and saved a step each."""
    preemptions: int = 0
    """Number of preemptions of groups."""
    swapped: int = 0
    """Number of preemptions in which the group claimed room in the host pool."""
    forks: int = 0
    """Number of samples and beams that were forked from a prompt."""
    encoded_texts: int = 0
    """Number of texts of modules that were encoded."""
    encoded_tokens: int = 0
    """Tokens of the texts of modules that were encoded."""
    lost_chunks: int = 0
    """Number of reads that did not find the whole chunk in its tier."""
    pulls_given_up: dict[str, int] = field(default_factory=dict)
    """Number of chunks that a peer was said to have and that a request had to do without, by reason: "slow" (it
    did not wait any longer), "lost" (the peer did not have it) or "gone" (the peer did not answer)."""
    tiers: dict[TierKind, TierTotals] = field(default_factory=lambda: {tier: TierTotals() for tier in TierKind})

    def gave_up_pulls(self, reason: str, chunks: int) -> None:
        """Count chunks that were not pulled after all."""
        if chunks:
            self.pulls_given_up[reason] = self.pulls_given_up.get(reason, 0) + chunks
