"""The messages that workers receive from their controller (XPUB → SUB, MessagePack, one message per frame pair).

A step plan is a delta: it carries what changed since the step before. A decode step in which nothing
joins, leaves or fills a block is 31 to 43 bytes, whatever the batch. Integer arrays travel as
little-endian int32 bytes (`trunkline.kvstore.chunks.pack_int32`). See docs/protocol.md.
"""

from __future__ import annotations

from typing import Final

import msgspec

LEAVE_TOPIC: Final = b"leave"
"""Topic of `Leave`. A rank's watchdog has its own socket for it: the order is heard during a step, too."""


def rank_topic(rank: int, incarnation: bytes) -> bytes:
    """Return the topic of messages for one rank process. The process subscribes to it first. When this
    subscription ends, the controller knows that the process has died."""
    return b"rank:%d:%s" % (rank, incarnation.hex().encode())


def plan_topic(epoch: int) -> bytes:
    """Return the topic of messages for all ranks of an epoch. Each epoch has its own topic, so that a frozen rank
    of an older epoch does not fill the queue."""
    return b"plan:%d:" % epoch


def member_topic(incarnation: bytes) -> bytes:
    """Return the topic to which a rank process subscribes right after its epoch's `plan_topic`. When the
    controller sees this subscription, plans reach the rank."""
    return b"member:" + incarnation.hex().encode()


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
    min_tokens: int = 0
    """Before so many output tokens none of `stop_ids` is sampled."""
    stop_ids: bytes = b""
    """int32 ids that would end the sequence; given only where `min_tokens` or a grammar needs them."""
    bad_words: list[list[int]] = []
    """Token sequences that are never completed: the last id is forbidden where the others stand before it."""
    allowed_ids: bytes = b""
    """int32: only these are ever sampled; empty: all."""
    prompt_logprobs: int = -1
    """Most likely tokens reported at each prompt position beside the prompt's own; -1: no report."""
    grammar: int = 0
    """Id of the grammar (`CompileGrammar`) that the output follows; 0: none."""

    @property
    def needs_history(self) -> bool:
        """Whether the worker must know all earlier tokens, not only those still to be computed."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.grammar != 0
            or any(len(word) > 1 for word in self.bad_words)
        )


class BeamPosition(msgspec.Struct, array_like=True, frozen=True):
    """A sequence's place in a beam search (PagedAttention §4.4), whose members are drawn together."""

    group: int
    """Id of the search, new each time it joins the batch; never used twice within an epoch."""
    index: int
    """Rank of the beam, 0 the best."""
    width: int
    score: float = 0.0
    """Sum of the log-probabilities of its output so far."""
    candidates: int = 0
    """Continuations to report per step, best first: enough that `width` of them are no stop tokens."""
    stop_ids: bytes = b""
    """int32: a continuation by one of these ends a hypothesis and is no beam of the next step."""


class Join(msgspec.Struct, array_like=True, frozen=True):
    """A sequence enters the workers' state (first time, or again after preemption under a new id)."""

    sequence: int
    """Id of the sequence, new each time it joins the batch; never used twice within an epoch."""
    tokens: bytes
    """int32 token ids from index `first` on: all known tokens that are not yet computed at least."""
    first: int
    """0 if `sampling.needs_history`."""
    prompt_len: int
    """Tokens before this index are the prompt, from it on they are output."""
    blocks: bytes
    """int32 block table for everything allocated so far."""
    sampling: Sampling
    extents: bytes = b""
    """int32 `[n, 5]` (`trunkline.kvstore.chunks.Extent`); empty: `PLAIN_LAYOUT`."""
    beam_position: BeamPosition | None = None


class Fork(msgspec.Struct, array_like=True, frozen=True):
    """A second sequence comes out of one whose prompt ends in this step (PagedAttention §4.4: `fork`).

    Its first token is drawn in this step from the parent's logits; from then on it is a sequence like any other.
    The parent's last block, if it is not full, is copied by the next plan's `copies`, not by the fork; for
    the beams of a search, whose parents only the workers know in time, the workers copy it themselves.
    """

    parent: int
    child: int
    blocks: bytes
    """int32 block table of the child: the parent's full blocks, then a block of its own for a tail."""
    seed: int
    """The child's; everything else of its sampling is the parent's."""
    beam_position: BeamPosition | None = None


class StepPlan(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """One forward pass. Applied in this order: leaves, joins, the copies that beams of the last step left to do,
    copies, blocks, then prefill and decode, then forks.

    Saves and loads go on beside the computation, this step's and later ones'. Saves are carried out in the order
    of the plans, loads too; the two fences say where the computation must wait for them (CachedAttention
    §3.2)."""

    step: int
    """Consecutive from 1 within an epoch; a gap means a lost plan, and a rank that sees one stops."""
    epoch: int
    leaves: bytes = b""
    """int32 ids of sequences to forget."""
    joins: list[Join] = []
    saves: bytes = b""
    """int32 `[n, 3]`: block, host slot, generation: device to host. What is in the block now is saved."""
    loads: bytes = b""
    """int32 `[n, 3]`: block, host slot, generation: host to device, layer by layer."""
    copies: bytes = b""
    """int32 `[n, 4]`: source block, destination block, first token, token count (`copy_blocks`)."""
    blocks: bytes = b""
    """int32 `[n, 3]`: sequence, index, block: entries of block tables set or appended."""
    prefill: bytes = b""
    """int32 `[n, 5]`: sequence, start, count, write_from, sample. Compute the tokens with indices `[start, start +
    count)`; store KV only from index `write_from` on (before it, a shared block holds it already); `sample` 1: the
    last position's logits give the sequence's next token."""
    rows: bytes | None = None
    """int32 sequences that decode one token each, in tree order; None: the same as in the last step.

    A row's input token is the one sampled for it in the step before (or, after a preemption, the last
    of its `Join.tokens`): sampled tokens never travel to the controller and back."""
    runs: bytes | None = None
    """int32 `[n, 4]`: row_start, row_stop, table_start, table_stop: rows whose tables agree there, so that
    the kernel reads those blocks once for all of them. Sent with `rows`; None: as in the last step.

    A hint: for the beams of a search they cover every full block of the tables, and the workers find out which
    of them are the same."""
    forks: list[Fork] = []
    """Forks of sequences whose prefill entry has `sample` 1."""
    late_saves: bytes = b""
    """int32 `[n, 3]`, as `saves`: blocks that this step's prefill fills; each layer is saved once it is
    computed."""
    save_fence: int = 0
    """This plan's loads, copies and computation begin when the saves and late saves of all plans up to this one
    are done: they write into those blocks, or read those slots. The plan's own number: its saves, too."""
    load_fence: int = 0
    """Layer l of this step's attention begins when layer l of the loads of all plans up to this one is there;
    copies begin when they are there whole if any copy reads or writes one of their blocks."""
    traces: bytes | None = None
    """40 bytes (`trunkline.runtime.spans.StepTrace`) for each part of a traced prompt that is computed; None: of
    none."""


class TierMove(msgspec.Struct, array_like=True, frozen=True):
    """Copy one chunk between a slot of the host pool and a tier below it."""

    id: int
    """Never used twice within an epoch."""
    tier: int
    """`trunkline.kvstore.tier.TierKind`: `DISK` or `REMOTE`."""
    is_write: bool
    """Whether the chunk goes from the host slot to the tier; else it comes from the tier."""
    host_slot: int
    host_generation: int
    slot: int
    """Slot of the disk tier; -1 for the remote tier, which goes by `name` only."""
    generation: int
    """Generation of the disk slot."""
    name: bytes
    """Name of the chunk."""


class TierMoves(msgspec.Struct, array_like=True, frozen=True, tag="moves"):
    """Moves between the host pool and the tiers below it, in any order, beside the steps. Every rank answers each
    with a `MoveOutcome`."""

    after: int
    """Last plan sent before: its and earlier plans' copies from and to these host slots must be done first."""
    moves: list[TierMove]


class Probe(msgspec.Struct, array_like=True, frozen=True, tag="probe"):
    """Ask which chunks the remote tier has. Every rank answers with `Probed`."""

    id: int
    names: bytes
    """`NAME_BYTES` each, in the order of a path."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome"):
    """On a rank's own topic: answer to `WorkerHello`. The rank belongs to an epoch of the group from now on, and
    meets the others of that epoch."""

    incarnation: bytes
    """Names the rank process that this message is for."""
    epoch: int
    token_budget: int = 0
    """Tokens of one step at most: what a rank on a GPU keeps memory for; 0: it goes by its own configuration."""
    max_rows: int = 0
    """Sequences that decode in one step at most; 0: the rank goes by its own configuration."""


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """On a rank's own topic: answer to a `WorkerHello` of a rank that cannot belong to this group. It ends."""

    incarnation: bytes
    """Names the rank process that this message is for."""
    reason: str
    """What differs, as a sentence for the operator."""


class Leave(msgspec.Struct, array_like=True, frozen=True, tag="leave"):
    """On `LEAVE_TOPIC`: an epoch is over, because a rank was lost or the controller gave it up. Ranks of this
    epoch and of older ones leave at once, also from within a step or a collective, and are started again."""

    epoch: int


class Shutdown(msgspec.Struct, array_like=True, frozen=True, tag="shutdown"):
    """Leave after the steps received so far."""


class CompileGrammar(msgspec.Struct, array_like=True, frozen=True, tag="grammar"):
    """Prepare a grammar beside the steps; rank 0 answers `GrammarReady`. Sent before any `Join` that names it."""

    grammar: int
    kind: str
    """"json_schema", "json_object", "regex", "ebnf", "choice" (a JSON list of strings) or "structural_tag"."""
    text: str
    spaced: bool = False
    """Whether white space may stand between the parts of JSON. Otherwise JSON is written as `json.dumps` does:
    one blank behind each comma and colon, and nothing else."""
    tenant: bytes = b""
    """Whose it is (`Grammar.tenant`). One that several want is sent for each of them while it is compiled."""


class ForgetGrammar(msgspec.Struct, array_like=True, frozen=True, tag="forget"):
    """No sequence uses the grammar any more."""

    grammar: int


WorkerMessage = Welcome | Refused | StepPlan | Shutdown | CompileGrammar | ForgetGrammar | TierMoves | Probe
