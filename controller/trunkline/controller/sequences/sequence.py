"""Requests, their sequence groups, and sequences: tokens, limits, and what each owns of the tree and the pool.

      Request ──► SequenceGroup ──► Sequence 0 … n−1
                  key, limits       tokens, path, private blocks, id in the batch

The scheduler works with groups: the samples or beams of a request are admitted, preempted and resumed together
(PagedAttention §4.5, gang scheduling). A group begins with the prompt's sequence; the others fork from it when the
prompt is computed.

A sequence's context is its `path` (whole chunks in the radix tree, shared with all sequences that have the same
tokens) followed by `private` blocks (chunks that are not full yet, or not wholly known). It holds only `path[-1]`,
and behind a cut the last chunk in each other tree: the tree keeps everything above a held node.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

import msgspec
import numpy as np

from trunkline.controller.cache.radix_tree import Match, Node
from trunkline.controller.engine_config import EngineConfig
from trunkline.controller.messages import Submit
from trunkline.controller.sequences.beam_search import BeamHistory
from trunkline.controller.sequences.module_prompt import ModulePrompt
from trunkline.kvstore.chunks import NO_BLOCK, BlockId, ChunkName, Extent, Int32Array, blocks_for, unpack_int32
from trunkline.kvstore.cuts import ContextCut
from trunkline.router.messages import Started
from trunkline.runtime.spans import SpanContext
from trunkline.worker.messages import BeamPosition, Sampling

ALL_ENTRIES: Final = 1 << 62
"""Value for "all entries of a block table": no table has so many."""


class TraceIds(NamedTuple):
    """The span ids of a traced request, drawn when it comes: workers' spans are children of some that still grow.

    dispatch (the router's)
    └─ generate         from its arrival to its end
       ├─ queue         until its admission
       ├─ prefill       until its first token    ─► `forward` of each rank, per step that computes a part of it
       └─ decode        until its last           ─► `decode_steps` of each rank
    """

    router: SpanContext
    """The router's dispatch span, the parent of `generate`."""
    generate: bytes
    queue: bytes
    prefill: bytes
    decode: bytes

    def context(self, span: bytes) -> SpanContext:
        """Return the context of one of these spans."""
        return SpanContext(self.router.trace_id, span)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the engine keeps it: what its router sent, and what the engine needs beside that."""

    id: int
    """Id of the request, unique among live requests of all routers; `submit.request` is unique among those of one
    router."""
    submit: Submit
    tokens: Int32Array
    """The tokens of `submit.tokens`, unpacked."""
    drops: tuple[tuple[int, int], ...]
    """The ranges of `submit.drops`, unpacked."""
    trace: TraceIds | None = None
    """Ids of the request's spans; None: the request is not traced."""

    @classmethod
    def of(cls, id_: int, submit: Submit, trace: TraceIds | None = None) -> Request:
        """Return the request that a router's valid message asks for."""
        drops: tuple[tuple[int, int], ...] = ()
        if submit.drops:
            drops = tuple((start, stop) for start, stop in unpack_int32(submit.drops, columns=2).tolist())
        return cls(id_, submit, unpack_int32(submit.tokens), drops, trace)

    @property
    def width(self) -> int:
        """Number of sequences that decode at once."""
        return self.submit.n if self.submit.beam is None else self.submit.beam.width

    @property
    def is_plain(self) -> bool:
        """Whether the request has one sequence, no modules, and computes each token once. If parts of its prompt
        are left out, and what is kept behind them does not fit, it becomes a plain prompt of what is left."""
        submit = self.submit
        is_single = self.width == 1 and submit.beam is None
        return is_single and submit.layout is None and not submit.sampling.needs_whole_prompt

    def longest(self, config: EngineConfig) -> int:
        """Return the largest number of tokens that one of the request's sequences can reach."""
        return config.longest_plain if self.is_plain else config.longest_sequence


class Phase(Enum):
    """The phase of a sequence; preemption takes it back to WAITING."""

    WAITING = auto()
    PREFILL = auto()
    PARKED = auto()
    """In the batch again after a preemption, with all but the last token computed: the sequence holds its blocks
    and waits until its whole group is in the batch."""
    DECODE = auto()
    ENDED = auto()


class TokenBuffer:
    """A growing array of int32 tokens."""

    __slots__ = ("_data", "count")

    def __init__(self, tokens: Int32Array) -> None:
        self._data = np.array(tokens, dtype="<i4")
        self.count = len(self._data)

    def extend(self, tokens: Int32Array) -> None:
        needed = self.count + len(tokens)
        if needed > len(self._data):
            grown = np.empty(max(needed, 2 * len(self._data)), dtype="<i4")
            grown[: self.count] = self._data[: self.count]
            self._data = grown
        self._data[self.count : needed] = tokens
        self.count = needed

    def truncate(self, count: int) -> None:
        """Drop the tokens from index `count` on."""
        self.count = min(self.count, count)

    def view(self, start: int = 0, stop: int | None = None) -> Int32Array:
        return self._data[start : self.count if stop is None else stop]

    def to_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return little-endian int32 bytes, as in chunk keys and messages."""
        return self._data[start : self.count if stop is None else stop].tobytes()


class Stem(NamedTuple):
    """The trees in which a sequence's chunks are: one, or several if its prompt has cuts or modules
    (`prefix_match` and `modules` of `trunkline.controller.allocation`)."""

    root: Node
    """Root of the tree in which the sequence's last chunks are, and new ones will be."""
    base: int = 0
    """Number of the sequence's first chunks that are in other trees."""
    ends: tuple[Node, ...] = ()
    """The sequence's last chunk in each of the other trees: holding it keeps the chunks before it."""
    marker: bytes = b""
    """Name of what the sequence sees, if that is not its whole history (a cut, modules); else empty."""
    extents: tuple[Extent, ...] = ()
    """Positions of the sequence's tokens; empty without modules."""
    behind: int = 0
    """Number of the sequence's first chunks that none of its queries will see: they are behind the model's
    window."""
    reserved: int = 0
    """Number of the first entries of the block table that were given blocks, with memory for all layers, before
    the sequence decodes."""
    keeps_blocks: bool = False
    """Whether the chunks behind the window keep their blocks, for layers without a window."""

    def used(self, path: list[Node]) -> list[Node]:
        """Return the chunks of the sequence's path that some layer reads."""
        return path if self.keeps_blocks else path[self.behind :]


class PrefixMatch(NamedTuple):
    """The cached chunks of a sequence's tokens, and the trees in which they are."""

    stem: Stem
    match: Match
    """The whole path of cached chunks; chunks in other trees (`Stem.base` of them) come first."""

    @property
    def anchor(self) -> Node:
        """The node below which new chunks will be: the path's last chunk if `stem.root` is above it, else this
        root."""
        return self.match.path[-1] if len(self.match.path) > self.stem.base else self.stem.root


@dataclass(frozen=True, slots=True)
class CutPrompt:
    """A prompt with parts cut off: what it does not see, and how to find the KV of the rest."""

    cut: ContextCut
    history: bytes
    """int32 token ids of the prompt, dropped ones included."""
    chain: list[ChunkName]
    """Names of the whole chunks of the history (`ContextCut.chain`)."""
    roots: list[ChunkName]
    """Names of the roots of its runs of chunks (`ContextCut.root_names`)."""


@dataclass(slots=True)
class CacheReport:
    """Report on what was cached of a request's prompt at its first admission."""

    started: Started
    """The report to its router; `cut` and `queued_s` are filled in when the last part of the prompt is planned."""
    at: float
    """Time of the admission."""
    entries: int
    """Number of block-table entries whose chunks were found whole; the request computed the later ones itself."""


class SequenceGroup:
    """A live request and its sequences. Only the scheduler and the engine change it."""

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
        "request",
        "search",
        "started",
        "turn",
        "waits_for_grammar",
    )

    def __init__(self, request: Request, arrival: int, limit: int, sampling: Sampling) -> None:
        """
        Args:
            arrival: number in order of arrival; kept through preemption.
            limit: number of tokens at which each sequence ends, prompt included.
            sampling: the request's sampling parameters, with the engine's additions.
        """
        self.request = request
        self.arrival = arrival
        self.limit = limit
        self.prompt_len = request.submit.prompt_len
        self.preempted = False
        self.turn = -1
        """The expected turn of the group, set by `FairQueue` when it comes to the queue; -1: it is not there."""
        self.forked = request.width == 1
        """Whether the group's sequences have forked (or there is only one)."""
        self.started = False
        self.found: CacheReport | None = None
        """What was cached at the first admission; None before it. A later admission would find chunks that the
        request computed itself."""
        self.cut: CutPrompt | None = None
        """The cut, if parts of the prompt are cut off and KV of the rest is kept. Then `prompt_len`, `limit` and
        tokens count in the block table (`trunkline.kvstore.cuts`)."""
        self.modules: ModulePrompt | None = None
        """The layout, if the prompt has modules. Then `prompt_len`, `limit` and tokens count in the block table,
        too."""
        self.prompt_scored = not request.submit.sampling.needs_whole_prompt
        """Whether nothing is left to score in the prompt: its log-probabilities were not asked for, or the step
        that computes the last of them is planned. A prompt that is pooled over all of its tokens always has
        something left: its one output token comes together with what was pooled."""
        self.waits_for_grammar = False
        self.search: BeamHistory | None = None
        """Beams and hypotheses of a beam search; None for other requests."""
        self.members: list[Sequence] = [Sequence(self, 0, TokenBuffer(request.tokens), sampling)]
        """Sequences that have not ended; for a beam search, in the order of the beams."""

    @property
    def id(self) -> int:
        """Id of the request."""
        return self.request.id

    @property
    def key(self) -> tuple[int, int, bool, int, int]:
        """The place in the queue that was expected when the group came to it, for fetching chunks: priority; turn;
        preempted before new; arrival; a job that encodes a text for a request (its id is negative) before that
        request."""
        return self.request.submit.priority, self.turn, not self.preempted, self.arrival, self.id

    @property
    def queued(self) -> bool:
        """Whether the group is in the queue, because one of its sequences waits."""
        return self.turn >= 0

    @property
    def holes(self) -> int:
        """Number of tokens in the block table that are not seen: actual positions are smaller by this number."""
        if self.modules is not None:
            return self.modules.holes
        return self.cut.cut.holes if self.cut is not None else 0

    @property
    def runs(self) -> bool:
        """Whether any of the group's sequences has been admitted."""
        return any(member.phase is not Phase.WAITING for member in self.members)

    @property
    def in_batch(self) -> bool:
        """Whether the workers know any of the group's sequences."""
        for member in self.members:  # noqa: SIM110 - a generator is one function more
            if member.batch_seq_id:
                return True
        return False

    @property
    def encodes(self) -> bool:
        """Whether the group is a job that computes a module's text and samples nothing."""
        return self.modules is not None and self.modules.target >= 0

    def compact(self) -> None:
        """Become a plain prompt of the tokens that are seen; KV kept behind the cut is not used."""
        if self.cut is None:
            return
        cut, holes = self.cut.cut, self.holes
        for member in self.members:
            member.tokens = TokenBuffer(cut.seen(member.tokens.view()))
        self.prompt_len -= holes
        self.limit -= holes
        self.cut = None

    def remove(self, ended: Sequence) -> None:
        """Remove a sequence that has ended. What it was to score of the prompt, the next one that waits scores:
        after workers were lost, a sample may be given up before it has."""
        self.members.remove(ended)
        waiting = next((member for member in self.members if not member.batch_seq_id), None)
        if not self.prompt_scored and ended.sampling.prompt_logprobs >= 0 and waiting is not None:
            number = ended.sampling.prompt_logprobs
            waiting.sampling = msgspec.structs.replace(waiting.sampling, prompt_logprobs=number)

    @property
    def gathers(self) -> bool:
        """Whether the group's sequences decode only when all of them are in the batch (gang scheduling,
        PagedAttention §4.5): true for several sequences that resume after a preemption."""
        return self.forked and self.request.width > 1

    @property
    def rows_needed(self) -> int:
        """Number of rows that the group will need to decode."""
        if self.encodes:
            return 0
        return len(self.members) if self.forked else self.request.width


class Sequence:
    """One continuation of a request: its tokens and blocks. Only the scheduler and the engine change it."""

    __slots__ = (
        "batch_seq_id",
        "beam_position",
        "cached_tokens",
        "claim",
        "computed",
        "group",
        "path",
        "phase",
        "private",
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
        """Index of the sequence among the request's samples, or among the beams."""
        self.tokens = tokens
        self.sampling = sampling
        self.beam_position: BeamPosition | None = None
        """The sequence's position in a beam search while it is in the batch."""
        self.stem: Stem
        """The trees in which the sequence's chunks are, set at admission."""
        self.waits_on: Node | None = None
        """The chunk of the sequence's prompt that another sequence is computing; None: it waits for none."""
        self.phase = Phase.WAITING
        self.batch_seq_id = 0
        """Id under which the workers know the sequence, new each time it enters the batch; 0 while it is not in
        the batch."""
        self.slot = -1
        """The sequence's place in the arrays of `DecodeRows`, from its last prefill step on; -1 before."""
        self.path: list[Node] = []
        """The sequence's whole chunks in the radix tree, from its first token on; those that it has yet to compute
        are pending. Chunk i is entry i of the block table."""
        self.private: list[BlockId] = []
        """Blocks of the tokens behind `path`, in order. The last one is being filled; full ones go to `path` when
        they enter the tree (`trunkline.controller.allocation.tree_entry`)."""
        self.tails: list[BlockId] = []
        """Before a fork: blocks reserved for the children's tails. In a child: the parent's tail, which is still
        to be copied into the child's own."""
        self.cached_tokens = 0
        """Number of tokens whose KV was cached at admission."""
        self.computed = 0
        """Number of tokens whose KV exists or is planned, during prefill; later `DecodeRows.planned` says it."""
        self.claim: list[Node] | None = None
        """While the sequence is preempted: the chunks that it has claimed (PagedAttention §4.5, swapping)."""

    @property
    def request_id(self) -> int:
        """Id of the sequence's request (`Request.id`)."""
        return self.group.id

    @property
    def prompt_len(self) -> int:
        return self.group.prompt_len

    @property
    def salt(self) -> bytes:
        return self.group.request.submit.salt

    @property
    def recompute_from_start(self) -> bool:
        """Whether the whole prompt must be computed, because its tokens are scored or pooled."""
        return not self.group.prompt_scored

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's tokens are scored: each needs a row of logits."""
        return self.recompute_from_start and self.sampling.prompt_logprobs >= 0

    @property
    def prefill_stop(self) -> int:
        """Number of tokens to compute before the sequence decodes.

        A sequence that resumes with others of its group leaves its last token to the step in which all of them are
        sampled. It stores that token in a block of its own.
        """
        return self.tokens.count - self.group.gathers

    @property
    def anchor(self) -> Node:
        """The node that the sequence holds while it runs."""
        return self.path[-1] if len(self.path) > self.stem.base else self.stem.root

    def is_pending(self, step: int) -> bool:
        """Return whether the chunk that the sequence waits for cannot be read yet."""
        node = self.waits_on
        return node is not None and node.parent is not None and node.ready_step >= step

    @property
    def read_chunks(self) -> int:
        """Number of the last chunks of `path` that the sequence still reads."""
        return len(self.path) - self.stem.behind

    @property
    def is_windowed(self) -> bool:
        """Whether a model's window spares the sequence chunks. It does not behind cuts and with modules, where
        positions are not those of the block table; for samples, which hold blocks in common that are chunks of the
        tree for some of them only, and beams, which exchange their tables; and while a prompt is scored or pooled,
        which is computed from its start whatever is cached."""
        group = self.group
        is_plain = group.cut is None and group.modules is None and group.request.submit.beam is None
        return is_plain and group.request.width == 1 and not self.recompute_from_start

    def first_query(self, cached: int) -> int:
        """Return the position of the sequence's first query if its first `cached` tokens are cached."""
        return min(cached, self.tokens.count - 1)

    def block_table(self) -> list[BlockId]:
        """Return the block of each entry; `NO_BLOCK`: nothing reads it."""
        used = self.stem.used(self.path)
        return [NO_BLOCK] * (len(self.path) - len(used)) + [node.block for node in used] + self.private

    def blocks_needed(self, chunk_size: int) -> int:
        """Return the number of blocks for all tokens known now, which admission reserves."""
        return blocks_for(self.tokens.count, chunk_size)
