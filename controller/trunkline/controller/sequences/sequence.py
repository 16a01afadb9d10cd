"""Requests, their sequence groups, and sequences: tokens, limits, and what each owns of the tree and the pool.

      Request ──► SequenceGroup ──► Sequence 0 … n−1
                  rank, limits      tokens, path, private blocks, stay in the batch

A group is what is scheduled: its samples or beams are admitted, preempted and brought back together
(PagedAttention §4.5, gang scheduling). It begins with one sequence, the prompt's; the others fork from it when the
prompt is computed.

A sequence's context is `path` (whole chunks in the tree, shared with whoever has the same tokens) followed by
`private` blocks (chunks not yet full, or not yet known in full). Only `path[-1]` is held (and, behind a cut, the
last chunk in each other tree): the tree keeps what is above a held node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

import numpy as np

from trunkline.controller.cache.radix_tree import Match, Node
from trunkline.controller.messages import BeamSearch, Grammar, PromptLayout
from trunkline.controller.sequences.beam_search import BeamHistory
from trunkline.controller.sequences.module_prompt import ModulePrompt
from trunkline.controller.trace_ids import TraceIds
from trunkline.kvstore.cuts import ContextCut
from trunkline.kvstore.extents import BlockId, Extent, blocks_for
from trunkline.kvstore.int32_codec import Int32Array
from trunkline.kvstore.names import ChunkName
from trunkline.kvstore.tier import TierKind
from trunkline.worker.messages import BeamPosition, Sampling

ALL_ENTRIES: Final = 1 << 62
"""More than any block table has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the engine needs to know of a request; ids are the caller's, unique among live requests."""

    id: int
    tokens: Int32Array
    max_tokens: int
    sampling: Sampling
    prompt_len: int = -1
    """-1: all of `tokens`."""
    stop_ids: tuple[int, ...] = ()
    salt: bytes = b""
    drops: tuple[tuple[int, int], ...] = ()
    """Ranges of the prompt that are not seen (`trunkline.kvstore.cuts`)."""
    ttl: float = 0.0
    """Seconds for which its KV is kept behind its end; 0: as the group is set."""
    layout: PromptLayout | None = None
    """Of a prompt with modules (`trunkline.controller.allocation.modules`): then `tokens` are its own only."""
    n: int = 1
    """Samples, or hypotheses of a beam search."""
    beam: BeamSearch | None = None
    priority: int = 0
    grammar: Grammar | None = None
    request_id: str = ""
    """Of the HTTP request, for people."""
    trace: TraceIds | None = None
    """None: it is not traced."""

    @property
    def width(self) -> int:
        """Sequences that decode at once."""
        return self.n if self.beam is None else self.beam.width


class Phase(Enum):
    """Where a sequence is in its life; preemption takes it from the middle ones back to WAITING."""

    WAITING = auto()
    PREFILL = auto()
    PARKED = auto()
    """Back from a preemption, with all but its last token computed: it waits for the others of its group, holding
    its blocks."""
    DECODE = auto()
    ENDED = auto()


class TokenBuffer:
    """int32 tokens that grow at the end, with amortised growth."""

    __slots__ = ("_data", "count")

    def __init__(self, tokens: Int32Array) -> None:
        self._data = np.array(tokens, dtype=np.int32)
        self.count = len(self._data)

    def extend(self, tokens: Int32Array) -> None:
        needed = self.count + len(tokens)
        if needed > len(self._data):
            grown = np.empty(max(needed, 2 * len(self._data)), dtype=np.int32)
            grown[: self.count] = self._data[: self.count]
            self._data = grown
        self._data[self.count : needed] = tokens
        self.count = needed

    def truncate(self, count: int) -> None:
        """Forget the tokens from index `count` on."""
        self.count = min(self.count, count)

    def view(self, start: int = 0, stop: int | None = None) -> Int32Array:
        return self._data[start : self.count if stop is None else stop]

    def to_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Little-endian int32 bytes: the form of chunk keys and of messages."""
        return self.view(start, stop).astype("<i4", copy=False).tobytes()


class Stem(NamedTuple):
    """From where a sequence's chunks hang: one tree, or, behind cuts (`trunkline.controller.allocation.cuts`)
    and with modules (`trunkline.controller.allocation.modules`), several."""

    root: Node
    """Of the tree in which its last chunks are, and new ones will be."""
    base: int = 0
    """How many of its first chunks are in other trees."""
    pins: tuple[Node, ...] = ()
    """The last of them in each of these trees: holding it keeps those before."""
    marker: bytes = b""
    """Names what it sees, if that is not all before it (a cut, modules); else empty."""
    extents: tuple[Extent, ...] = ()
    """Its layout, with modules."""


class PrefixMatch(NamedTuple):
    """Where a sequence's tokens are found in the forest."""

    stem: Stem
    match: Match
    """The whole path: chunks in other trees first (`Stem.base` of them)."""


@dataclass(frozen=True, slots=True)
class CutPrompt:
    """What a group does not see, and what must be known to find the KV of the rest."""

    cut: ContextCut
    history: bytes
    """int32 tokens of the prompt, dropped ones included."""
    chain: list[ChunkName]
    """`Cut.chain` of it."""


@dataclass(slots=True)
class CacheReport:
    """What was found of a request's prompt at its first admission, for its `Started`."""

    tokens: int = 0
    tier_tokens: list[int] = field(default_factory=lambda: [0] * len(TierKind))
    miss: str = ""
    miss_token: int = 0
    exact: bool = True
    module_tokens: int = 0
    cut: str = ""
    """What was said of its cut (`Started.cut`)."""
    at: float = 0.0
    """When that was."""
    queued_s: float = 0.0
    """How long it had waited, in seconds."""
    entries: int = 0
    """Block-table entries whose chunks were found whole; the request computed what is behind them itself."""


class SequenceGroup:
    """A request while it lives. State is changed by the scheduler and the engine only."""

    __slots__ = (
        "arrival",
        "cut",
        "forked",
        "found",
        "limit",
        "members",
        "modules",
        "preempted",
        "prompt_len",
        "prompt_scored",
        "queued",
        "request",
        "search",
        "started",
        "waits_for_grammar",
    )

    def __init__(self, request: Request, arrival: int, limit: int, sampling: Sampling) -> None:
        """
        Args:
            arrival: rank in the first-come-first-served order; kept through preemption.
            limit: total tokens at which each sequence ends.
            sampling: the request's, with what the engine added to it.
        """
        self.request = request
        self.arrival = arrival
        self.limit = limit
        self.prompt_len = request.prompt_len if request.prompt_len >= 0 else len(request.tokens)
        self.preempted = False
        self.queued = False
        """Whether a sequence of it waits, so that it is in the queue."""
        self.forked = request.width == 1
        """Whether all sequences exist that ever will."""
        self.started = False
        self.found: CacheReport | None = None
        """Set at the first admission: a later one would find what the request computed itself."""
        self.cut: CutPrompt | None = None
        """Set if parts of the prompt are not seen while KV of the rest is kept: then prompt, limit and tokens
        count in the table (`trunkline.kvstore.cuts`)."""
        self.modules: ModulePrompt | None = None
        """Set if the prompt has modules: likewise."""
        self.prompt_scored = request.sampling.prompt_logprobs < 0
        """Whether the log-probabilities of the whole prompt have been computed, if they were asked for."""
        self.waits_for_grammar = False
        self.search: BeamHistory | None = None
        """Of a beam search."""
        self.members: list[Sequence] = [Sequence(self, 0, TokenBuffer(request.tokens), sampling)]
        """Sequences that have not ended; of a beam search in the order of the beams."""

    @property
    def id(self) -> int:
        """The request's."""
        return self.request.id

    @property
    def key(self) -> tuple[int, bool, int, int]:
        """Order in the queue: by priority; who was preempted before who is new; by arrival; what encodes a text
        for a request (its id is negative) before that."""
        return self.request.priority, not self.preempted, self.arrival, self.id

    @property
    def rank(self) -> tuple[int, int]:
        """Order among those who run: the largest is preempted first."""
        return self.request.priority, self.arrival

    @property
    def holes(self) -> int:
        """Tokens in the block tables that are not seen: positions act so much earlier than they are counted
        here."""
        if self.modules is not None:
            return self.modules.holes
        return self.cut.cut.holes if self.cut is not None else 0

    @property
    def runs(self) -> bool:
        """Whether any of it is in the batch."""
        return any(member.phase is not Phase.WAITING for member in self.members)

    @property
    def in_batch(self) -> bool:
        """Whether the workers know any of its sequences."""
        return any(member.batch_seq_id for member in self.members)

    @property
    def encodes(self) -> bool:
        """Whether it computes a text of a module, for others: it samples nothing."""
        return self.modules is not None and self.modules.target >= 0

    def compact(self) -> None:
        """Go on as a plain prompt of what is seen: the KV that was kept is not used (any more)."""
        if self.cut is None:
            return
        cut, holes = self.cut.cut, self.holes
        for member in self.members:
            member.tokens = TokenBuffer(cut.seen(member.tokens.view()))
        self.prompt_len -= holes
        self.limit -= holes
        self.cut = None

    @property
    def gathers(self) -> bool:
        """Whether its sequences decode only when all of them are in the batch (gang scheduling, PagedAttention
        §4.5): several sequences of one prompt that come back from a preemption."""
        return self.forked and self.request.width > 1

    @property
    def rows_needed(self) -> int:
        """Sequences that will decode at once."""
        if self.encodes:
            return 0
        return len(self.members) if self.forked else self.request.width


class Sequence:
    """One stream of tokens. State is changed by the scheduler and the engine only."""

    __slots__ = (
        "batch_seq_id",
        "beam_position",
        "claim",
        "computed",
        "group",
        "path",
        "phase",
        "private",
        "resident",
        "sample",
        "sampling",
        "slot",
        "stem",
        "tails",
        "tokens",
        "waits_on",
    )

    def __init__(self, group: SequenceGroup, sample: int, tokens: TokenBuffer, sampling: Sampling) -> None:
        self.group = group
        self.sample = sample
        """Index among the request's samples; of a beam search, of the beam."""
        self.tokens = tokens
        self.sampling = sampling
        self.beam_position: BeamPosition | None = None
        """Its place in a beam search, for this stay."""
        self.stem: Stem
        """Set at admission."""
        self.waits_on: Node | None = None
        """The chunk somebody else is computing for us."""
        self.phase = Phase.WAITING
        self.batch_seq_id = 0
        """Id under which the workers know it during this stay in the batch; 0 while it is not there."""
        self.slot = -1
        """Index in `DecodeRows` from its last prefill step on."""
        self.path: list[Node] = []
        self.private: list[BlockId] = []
        self.tails: list[BlockId] = []
        """Before a fork, blocks reserved for the children's tails; of a child, the parent's tail that is still to
        be copied into its own."""
        self.resident = 0
        """Tokens whose KV was found at admission."""
        self.computed = 0
        """Tokens whose KV exists or is planned, while in prefill."""
        self.claim: list[Node] | None = None
        """While preempted: the chunks that it wants to find again (PagedAttention §4.5, swapping)."""

    @property
    def request(self) -> int:
        return self.group.id

    @property
    def arrival(self) -> int:
        return self.group.arrival

    @property
    def prompt_len(self) -> int:
        return self.group.prompt_len

    @property
    def salt(self) -> bytes:
        return self.group.request.salt

    @property
    def recompute_from_start(self) -> bool:
        """Whether every prompt position must be computed, because the prompt's tokens are to be scored."""
        return not self.group.prompt_scored

    @property
    def prefill_stop(self) -> int:
        """Tokens to compute before it decodes. A sequence that comes back with others of its group leaves its last
        token to the step in which all of them are sampled from."""
        return self.tokens.count - self.group.gathers

    @property
    def anchor(self) -> Node:
        """The node this sequence holds while it runs."""
        return self.path[-1] if len(self.path) > self.stem.base else self.stem.root

    def is_pending(self, step: int) -> bool:
        """Whether the chunk that it waits for cannot be read yet."""
        node = self.waits_on
        return node is not None and node.parent is not None and node.ready_step >= step

    def block_table(self) -> list[BlockId]:
        return [node.block for node in self.path] + self.private

    def blocks_needed(self, chunk_size: int) -> int:
        """Blocks for all tokens known now (what admission reserves)."""
        return blocks_for(self.tokens.count, chunk_size)
