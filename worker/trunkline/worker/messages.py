"""The messages that workers receive from their controller (XPUB → SUB, MessagePack, one message per frame pair).

A step plan is a delta: it carries what changed since the step before. A decode step in which nothing
joins, leaves or fills a block is 38 to 50 bytes, whatever the batch. Integer arrays travel as
little-endian int32 bytes (`trunkline.kvstore.chunks.pack_int32`). See docs/protocol.md.
"""

from __future__ import annotations

from typing import Final

import msgspec

LEAVE_TOPIC: Final = b"leave"
"""Topic of `Leave`. A rank's watchdog has a socket of its own for this topic, so that it hears the order during a
step, too."""


POOL_LAST: Final = 1
"""Value of `Sampling.pooling`: the final hidden state of the prompt's last token."""
POOL_MEAN: Final = 2
"""Value of `Sampling.pooling`: the mean of the final hidden states of all tokens of the prompt."""


def rank_topic(rank: int, incarnation: bytes) -> bytes:
    """Return the topic of messages for one rank process. The process subscribes to it first. When this
    subscription ends, the controller knows that the process has died."""
    return b"rank:%d:%s" % (rank, incarnation.hex().encode())


def plan_topic(epoch: int) -> bytes:
    """Return the topic of messages for all ranks of an epoch. Each epoch has its own topic, so that a frozen rank
    of an older epoch does not fill the queue."""
    return b"plan:%d:" % epoch


def member_topic(incarnation: bytes) -> bytes:
    """Return the member topic of a rank process. The process subscribes to this topic right after its epoch's
    `plan_topic`. Subscriptions arrive in order: when the controller sees this one, it knows that the rank gets
    plans."""
    return b"member:" + incarnation.hex().encode()


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """The parameters by which the next token is drawn. Noise depends on (seed, output index, token id) only."""

    temperature: float = 1.0
    """Divisor of the logits before sampling; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens that may be sampled; 0: no limit."""
    min_p: float = 0.0
    seed: int = 0
    """Seed of the noise, unsigned 64-bit; the router draws a seed where the client gave none."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    """Number to add to the logit of each of these token ids, before anything else."""
    logprobs: int = -1
    """Number of most likely tokens reported beside the sampled one's; -1: no log-probabilities at all."""
    min_tokens: int = 0
    """Number of output tokens before which none of `stop_ids` is sampled."""
    stop_ids: bytes = b""
    """int32 ids of the tokens that would end the sequence; given only where `min_tokens` or a grammar needs
    them."""
    bad_words: list[list[int]] = []
    """Token sequences that are never completed: the last id is forbidden where the other ids stand before it."""
    allowed_ids: bytes = b""
    """int32 ids of the only tokens that are ever sampled; empty: all tokens may be."""
    prompt_logprobs: int = -1
    """Number of most likely tokens reported at each prompt position beside the prompt's own token; -1: no
    report."""
    grammar: int = 0
    """Id of the grammar (`CompileGrammar`) that the output follows; 0: none."""
    pooling: int = 0
    """Which hidden states of the prompt are reported with the first output token (`TopLogprobs.pooled`), as
    `POOL_LAST` or `POOL_MEAN`; 0: none."""

    @property
    def reports(self) -> bool:
        """Whether output tokens come with a report (`TopLogprobs`)."""
        return self.logprobs >= 0 or self.pooling != 0

    @property
    def pools_all(self) -> bool:
        """Whether the hidden state of every token of the prompt counts, not only that of the last one."""
        return self.pooling == POOL_MEAN

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every token of the prompt must be computed, also where its KV is cached."""
        return self.prompt_logprobs >= 0 or self.pools_all

    @property
    def needs_history(self) -> bool:
        """Whether the worker must know all earlier tokens, not only those still to be computed."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.grammar != 0
            or (bool(self.bad_words) and max(map(len, self.bad_words)) > 1)
        )


class BeamPosition(msgspec.Struct, array_like=True, frozen=True):
    """A sequence's place in a beam search (PagedAttention §4.4), whose members are drawn together."""

    search: int
    """Id of the search, new each time it joins the batch; never used twice within an epoch."""
    index: int
    """Rank of the beam, 0 the best."""
    width: int
    score: float = 0.0
    """Sum of the log-probabilities of the beam's output so far."""
    candidates: int = 0
    """Number of continuations to report per step, best first: enough that `width` of them are no stop tokens."""
    stop_ids: bytes = b""
    """int32 ids of the search's stop tokens. A continuation by one of them is a finished hypothesis, so it does
    not become a beam of the next step."""


class Join(msgspec.Struct, array_like=True, frozen=True):
    """A sequence enters the workers' state (first time, or again after preemption under a new id)."""

    sequence: int
    """Id of the sequence, new each time it joins the batch; never used twice within an epoch."""
    tokens: bytes
    """int32 token ids from index `first` on: all known tokens that are not yet computed at least."""
    first: int
    """Index of the first token in `tokens`; 0 if `sampling.needs_history`."""
    prompt_len: int
    """Tokens before this index are the prompt, from it on they are output."""
    blocks: bytes
    """int32 block table for everything allocated so far."""
    sampling: Sampling
    extents: bytes = b""
    """Layout of the sequence, int32 `[n, 5]` (`trunkline.kvstore.chunks.Extent`); empty: `PLAIN_LAYOUT`."""
    beam_position: BeamPosition | None = None
    adapter: bytes = b""
    """Key of the adapter that the sequence uses (`trunkline.kvstore.adapters`); empty: the base model."""


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
    """Seed of the child; all other sampling parameters are the parent's."""
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
    """Copies from device to host, int32 `[n, 3]`: block, host slot, generation. What is in the block now is
    saved."""
    loads: bytes = b""
    """Copies from host to device, layer by layer, int32 `[n, 3]`: block, host slot, generation."""
    copies: bytes = b""
    """Copies between blocks, int32 `[n, 4]`: source block, destination block, first token, token count
    (`copy_blocks`)."""
    blocks: bytes = b""
    """Entries of block tables that are set or appended, int32 `[n, 3]`: sequence, index, block."""
    prefill: bytes = b""
    """int32 `[n, 5]`: sequence, start, count, write_from, sample. Compute the tokens with indices `[start, start +
    count)`; store KV only from index `write_from` on (before it, a shared block holds it already); `sample` 1: the
    last position's logits give the sequence's next token."""
    rows: bytes | None = None
    """int32 ids of the sequences that decode one token each, in tree order; None: the same sequences as in the
    last step.

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
    """Saves of the blocks that this step's prefill fills, int32 `[n, 3]`: block, host slot, generation. Each layer
    is saved once it is computed."""
    save_fence: int = 0
    """Number of the last plan whose saves and late saves must be done before this plan's loads, copies and
    computation begin, because these write into blocks or read slots of those saves. The plan's own number: its
    saves must be done, too."""
    load_fence: int = 0
    """Number of the last plan whose loads this step waits for. Layer l of attention begins when layer l of all
    loads up to that plan is there. If any copy reads or writes a block of these loads, copies begin when the loads
    are there whole."""
    traces: bytes | None = None
    """One record of 40 bytes (`trunkline.runtime.spans.StepTrace`) for each part of a traced prompt that is
    computed; None: no such part."""
    save_names: bytes = b""
    """Names of the chunks of `saves`, then of `late_saves`, `NAME_BYTES` each: peers ask for chunks by name.
    Empty: there are no peers."""
    drafts: list[bytes] = []
    """For each decode row, int32 guesses of the tokens behind the one that this step draws for it; empty: no row
    has any.

    They are computed with the row, one position each, and the row's block table has room for them. The token
    behind a guess is drawn only if the guess is what was drawn at its place, so guesses change no text."""
    thinned: bytes = b""
    """int32 ids of blocks whose KV in layers with a window is read no more, of a rank that gives that memory back
    (`WorkerConfig.window_share`). Applied before the copies between blocks, and once the saves and loads are done
    that earlier plans, or this plan's saves, ordered of these blocks. This plan writes KV of other layers only to
    them."""
    load_layers: bytes = b""
    """Of each of `loads` one byte, a `trunkline.kvstore.window_share.LoadedLayers`; empty: all layers of all."""


class TierMove(msgspec.Struct, array_like=True, frozen=True):
    """Copy one chunk between a slot of the host pool and a tier below it."""

    id: int
    """Number of the move, never used twice within an epoch."""
    tier: int
    """The tier below the host pool, a `trunkline.kvstore.tier.TierKind`: `DISK`, `REMOTE` or `PEER`."""
    is_write: bool
    """Whether the chunk goes from the host slot to the tier; else it comes from the tier."""
    host_slot: int
    host_generation: int
    slot: int
    """Slot of the disk tier; -1 for the remote tier, which finds a chunk by `name` only."""
    generation: int
    """Generation of the disk slot."""
    name: bytes
    """Name of the chunk."""
    peer: int = -1
    """Number of the peer from which the chunk comes (`PeerAt.peer`), if `tier` is `PEER`."""
    kept_s: float = 0.0
    """For a write to the remote tier, seconds without use after which it may forget the chunk; 0: as the rank's
    configuration says."""


class TierMoves(msgspec.Struct, array_like=True, frozen=True, tag="moves"):
    """Moves between the host pool and the tiers below it, in any order, beside the steps. Every rank answers each
    move with a `MoveOutcome`."""

    after: int
    """Number of the last plan sent before these moves. The copies from and to their host slots that plans up to
    this one order must be done first."""
    moves: list[TierMove]


class Probe(msgspec.Struct, array_like=True, frozen=True, tag="probe"):
    """Question to the remote tier: which chunks does it have? Every rank answers with `Probed`."""

    id: int
    names: bytes
    """Names of the chunks in the order of a path, `NAME_BYTES` each."""


class ForgetChunks(msgspec.Struct, array_like=True, frozen=True, tag="forget_chunks"):
    """Delete these chunks from the remote tier. There is no answer: a store that is away keeps them until their
    time to live is over."""

    names: bytes
    """Names of the chunks, `NAME_BYTES` each."""


class PeerAt(msgspec.Struct, array_like=True, frozen=True, tag="peer"):
    """Where a peer's ranks export chunks. Sent before the first move that names the peer, and again when the peer
    has moved."""

    peer: int
    """Number of the peer, chosen by the controller and never used for another one within an epoch."""
    endpoints: list[str]
    """An endpoint for each rank of the peer; empty: the peer is gone."""


TierOrder = TierMoves | Probe | ForgetChunks | PeerAt
"""Orders to a rank's lower tiers."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome"):
    """Answer to `WorkerHello`, on the rank's own topic. The rank belongs to an epoch of the group from now on, and
    meets the other ranks of that epoch."""

    incarnation: bytes
    """Names the rank process that this message is for."""
    epoch: int
    token_budget: int = 0
    """Largest number of tokens of one step, for which a rank on a GPU keeps memory; 0: the rank goes by its own
    configuration."""
    max_rows: int = 0
    """Largest number of sequences that decode in one step; 0: the rank goes by its own configuration."""


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """Answer, on the rank's own topic, to a `WorkerHello` of a rank that cannot belong to this group. The rank
    ends."""

    incarnation: bytes
    """Names the rank process that this message is for."""
    reason: str
    """The setting that differs, as a sentence for the operator."""


class Leave(msgspec.Struct, array_like=True, frozen=True, tag="leave"):
    """Order on `LEAVE_TOPIC`: an epoch is over, because a rank was lost or the controller gave it up. Ranks of
    this epoch and of older ones leave at once, also from within a step or a collective, and are started again."""

    epoch: int


class Shutdown(msgspec.Struct, array_like=True, frozen=True, tag="shutdown"):
    """Leave after the steps received so far."""


class CompileGrammar(msgspec.Struct, array_like=True, frozen=True, tag="grammar"):
    """Prepare a grammar beside the steps; rank 0 answers `GrammarReady`. Sent before any `Join` that names it."""

    grammar: int
    kind: str
    """Kind of the grammar: "json_schema", "json_object", "regex", "ebnf", "choice" (a JSON list of strings) or
    "structural_tag"."""
    text: str
    spaced: bool = False
    """Whether white space may stand between the parts of JSON. Otherwise JSON is written as `json.dumps` does:
    one blank behind each comma and colon, and nothing else."""
    tenant: bytes = b""
    """Tenant that wants the grammar (`Grammar.tenant`). While a grammar is compiled, it is sent again for each
    further tenant that wants it."""
    foretell: bool = False
    """Whether rank 0 tells what the grammar demands next of an output (`StepResult.forced`), for drafts."""


class ForgetGrammar(msgspec.Struct, array_like=True, frozen=True, tag="forget"):
    """No sequence uses the grammar any more."""

    grammar: int


class LoadAdapter(msgspec.Struct, array_like=True, frozen=True, tag="load_adapter"):
    """Read an adapter beside the steps; every rank answers `AdapterReady`. No `Join` names it before that."""

    ticket: int
    """Number of the order, never used twice by a controller."""
    name: str
    path: str
    """Its folder, on the rank's host."""
    rank_max: int
    """Largest rank that is accepted."""


class UnloadAdapter(msgspec.Struct, array_like=True, frozen=True, tag="unload_adapter"):
    """No sequence uses the adapter any more."""

    key: bytes


WorkerMessage = (
    Welcome
    | Refused
    | StepPlan
    | Shutdown
    | CompileGrammar
    | ForgetGrammar
    | TierOrder
    | LoadAdapter
    | UnloadAdapter
)
