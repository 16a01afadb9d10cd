"""What workers receive: the controller's broadcast (XPUB → SUB, MessagePack, one message per frame pair).

A step plan is a delta: it carries what changed since the step before. A decode step in which nothing
joins, leaves or fills a block is about twenty bytes, whatever the batch. Integer arrays travel as
little-endian int32 bytes (`trunkline.kvstore.layout.pack_int32`). See docs/protocol.md.
"""

from __future__ import annotations

from typing import Final

import msgspec

PLAN_TOPIC: Final = b"plan"
"""Every rank subscribes to this topic, then to its `rank_topic`, by which the controller counts it in."""


def rank_topic(rank: int) -> bytes:
    """The topic by which a rank makes its subscription, and by its end its death, known to the controller."""
    return b"rank:%d" % rank


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """How the next token is drawn. Noise depends on (seed, output index, token id) only."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    seed: int = 0
    """Unsigned 64-bit; the router draws one where the client gave none."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    """Added to the logits before anything else."""
    logprobs: int = -1
    """Number of most likely tokens reported beside the sampled one's; -1: no log-probabilities at all."""

    @property
    def needs_history(self) -> bool:
        """Whether the worker must know all earlier tokens, not only those still to be computed."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class Join(msgspec.Struct, array_like=True, frozen=True):
    """A sequence enters the workers' state (first time, or again after preemption under a new id)."""

    sequence: int
    """Id of this stay in the batch; never used twice within an epoch."""
    tokens: bytes
    """int32 token ids from position `first` on: all known tokens that are not yet computed at least."""
    first: int
    """0 if `sampling.needs_history`."""
    prompt_len: int
    """Tokens before this index are the prompt, from it on they are output."""
    blocks: bytes
    """int32 block table for everything allocated so far."""
    sampling: Sampling
    extents: bytes = b""
    """int32 `[n, 5]` (`trunkline.kvstore.layout.Extent`); empty: `PLAIN_LAYOUT`."""


class StepPlan(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """One forward pass. Applied in this order: leaves, joins, copies, blocks, then prefill and decode."""

    step: int
    """Consecutive from 1 within an epoch; a gap means a lost plan, and a rank that sees one stops."""
    epoch: int
    leaves: bytes = b""
    """int32 ids of sequences to forget."""
    joins: list[Join] = []
    copies: bytes = b""
    """int32 `[n, 4]`: source block, destination block, first token, token count (`copy_blocks`)."""
    blocks: bytes = b""
    """int32 `[n, 3]`: sequence, index, block: entries of block tables set or appended."""
    prefill: bytes = b""
    """int32 `[n, 5]`: sequence, start, count, write_from, sample. Compute positions `[start, start + count)`;
    store KV only from `write_from` on (before it, a shared block holds it already); `sample` 1: the last
    position's logits give the sequence's next token."""
    rows: bytes | None = None
    """int32 sequences that decode one token each, in tree order; None: the same as in the last step.

    A row's input token is the one sampled for it in the step before (or, after a preemption, the last
    of its `Join.tokens`): sampled tokens never travel to the controller and back."""
    runs: bytes | None = None
    """int32 `[n, 4]`: row_start, row_stop, table_start, table_stop: rows whose tables agree there, so that
    the kernel reads those blocks once for all of them. Sent with `rows`; None: as in the last step."""


class Shutdown(msgspec.Struct, array_like=True, frozen=True, tag="shutdown"):
    """Leave after the steps received so far."""


WorkerMessage = StepPlan | Shutdown
