"""What an engine tells its shell: what happened to requests, and totals."""

from __future__ import annotations

from dataclasses import dataclass, field

from trunkline.controller.messages import TopLogprobs
from trunkline.controller.scheduling.module_calls import CallDone
from trunkline.controller.sequences.decode_rows import Int64Array
from trunkline.controller.sequences.sequence import Found
from trunkline.kvstore.int32_codec import Int32Array
from trunkline.kvstore.tier import TierKind
from trunkline.router.messages import BeamsFound, Finished, PromptScored, Started


@dataclass(slots=True)
class EngineOutputs:
    """What happened since the last call of `outputs`. Meaning in order: started, tokens, beams, finished."""

    started: list[Started] = field(default_factory=list)
    requests: list[Int64Array] = field(default_factory=list)
    """Per result: request of each token, …"""
    samples: list[Int64Array] = field(default_factory=list)
    """… which of its samples it belongs to, …"""
    tokens: list[Int32Array] = field(default_factory=list)
    """… and the tokens."""
    logprobs: list[dict[int, TopLogprobs] | None] = field(default_factory=list)
    """Per result: by index into its tokens."""
    prompt_logprobs: list[PromptScored] = field(default_factory=list)
    beams: list[BeamsFound] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    modules: list[CallDone] = field(default_factory=list)

    def __bool__(self) -> bool:
        said = self.started or self.tokens or self.prompt_logprobs or self.beams or self.finished
        return bool(said or self.modules)


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    row_set_changes: int = 0
    """Steps that carried a new row set; all others copy no plan (ChunkAttention §3.3)."""
    plan_copies: int = 0
    """Steps for which the workers rebuilt their decode plan: new rows, or a row that filled its block."""
    kv_bytes_read: int = 0
    """By decode attention on rank 0."""
    tier_tokens: list[int] = field(default_factory=lambda: [0] * len(TierKind))
    """`cached_tokens` by tier."""
    misses: dict[str, int] = field(default_factory=dict)
    """Requests by reason."""

    def found(self, found: Found) -> None:
        """A request has started."""
        self.cached_tokens += found.tokens
        for tier, tokens in enumerate(found.tier_tokens):
            self.tier_tokens[tier] += tokens
        if found.miss:
            self.misses[found.miss] = self.misses.get(found.miss, 0) + 1
