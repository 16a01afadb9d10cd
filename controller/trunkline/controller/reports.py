"""The reports that a controller receives from its workers (PULL socket), and what is in them.

All are MessagePack arrays, tagged; arrays of numbers travel as little-endian int32 or float32 bytes. See
docs/protocol.md. What routers ask for is in `messages.py`. A report with a number that no correct worker sends
cannot be decoded, and ends the epoch.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

TEXT_CHARACTERS_MAX: Final = 4096
"""Largest number of characters of a text in a report, but for a failure's reason. A controller takes a longer one
for nonsense, and gives the workers up."""
COUNT_MAX: Final = 1 << 31
BLOCKS_MAX: Final = 1 << 24
"""Largest number of device blocks that a rank may report."""
_SLOTS_MAX: Final = 1 << 28
"""Largest number of slots that a tier of a rank may report."""
_BYTES_MAX: Final = 1 << 48
"""Largest number of bytes in a report: totals of them are kept, and sent as 64-bit numbers."""
_US_MAX: Final = 1 << 42
"""Largest number of microseconds in a report: seven weeks."""

_Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
_Blocks = Annotated[int, Meta(ge=0, le=BLOCKS_MAX)]
_Slots = Annotated[int, Meta(ge=0, le=_SLOTS_MAX)]
_Bytes = Annotated[int, Meta(ge=0, le=_BYTES_MAX)]
_Micros = Annotated[int, Meta(ge=0, le=_US_MAX)]
_Flag = Annotated[int, Meta(ge=0, le=1)]


class TopLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """The report of one output position: log-probabilities (natural, after penalties and bias, before
    temperature), and the pooled hidden states of a prompt."""

    token_logprob: float
    """Log-probability of the sampled token; 0 if no log-probabilities were asked for."""
    top_ids: bytes
    """int32 token ids, most likely first."""
    top_logprobs: bytes
    """Log-probabilities of `top_ids`, float32, little-endian."""
    pooled: bytes = b""
    """With the first output token, what `Sampling.pooling` asked for: float32 `[hidden]`, little-endian, as the
    model's last norm gives it (not normalised to a length). Else empty."""


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of prompt tokens at consecutive positions (position 0 has none)."""

    start: int
    """Position of the first token."""
    token_logprobs: bytes
    """Log-probabilities of the prompt's own tokens, float32 `[n]`."""
    ranks: bytes
    """Ranks of the prompt's own tokens, int32 `[n]`; 1 is the likeliest."""
    top_ids: bytes
    """Most likely token ids at each position, int32 `[n, count]`, most likely first."""
    top_logprobs: bytes
    """Log-probabilities of `top_ids`, float32 `[n, count]`."""


class BeamStep(msgspec.Struct, array_like=True, frozen=True):
    """Candidates with which a beam search can go on, best first. The first `width` that are no stop tokens are the
    next beams."""

    parents: bytes
    """Index of the beam that each candidate continues, int32 `[candidates]`."""
    tokens: bytes
    """Token of each candidate, int32 `[candidates]`."""
    scores: bytes
    """Sum of log-probabilities of each candidate, float32 `[candidates]`."""


class WorkerHello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """A rank's process has started and subscribed, and belongs to no epoch yet. Repeated once a second until its
    `Welcome` comes."""

    rank: int
    pid: int
    node: str
    """Name of the host and of the process namespace of `pid`. A controller in the same namespace may kill the
    process."""
    incarnation: bytes
    """Random bytes that tell this process from others of its rank."""
    terms: dict[str, str] = {}
    """Settings that all ranks of a group must have in common, by name
    (`trunkline.worker.config.WorkerConfig.terms`)."""


class WorkerReady(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """A rank has loaded its shard and subscribed. The group starts when all ranks have said so."""

    rank: int
    epoch: int
    pid: int
    num_blocks: _Blocks
    block_bytes: _Bytes
    """Bytes of one block on this rank."""
    device: str
    host_slots: _Slots = 0
    """Number of blocks that the rank's host pool holds."""
    swap_us_per_block: Annotated[float, Meta(ge=0.0, le=_US_MAX)] = 0.0
    """Microseconds of one save and one load of a block, measured at the start."""
    disk_slots: _Slots = 0
    """Number of blocks that the rank's disk tier holds; 0: it has none, or could not open it."""
    tier_problem: str = ""
    """Why a tier that was asked for is not there; the group goes on without it."""
    has_remote: bool = False
    """Whether the rank was given a remote tier (which may be unreachable now and back later)."""
    exports: str = ""
    """Endpoint at which the rank exports the chunks in its host memory to peers; "": it exports none."""
    window: _Count = 0
    """Number of tokens that a query sees in the layer with the widest window; 0: some layer sees all."""
    part_window: _Count = 0
    """That of the layers with a window, where other layers see all tokens; 0: all layers are of one kind."""
    whole_blocks: _Blocks = 0
    """Number of blocks that can hold KV of the layers with a window at once (`part_window`); 0: all."""


class LoadProgress(msgspec.Struct, array_like=True, frozen=True, tag="progress"):
    """Progress of a rank with its start, for the person who waits."""

    rank: int
    stage: str
    fraction: float


class StepResult(msgspec.Struct, array_like=True, frozen=True, tag="result"):
    """Rank 0 finished a step. Every step gets one, in order."""

    step: int
    epoch: int
    tokens: bytes
    """int32 sampled ids: of the decode rows in order, the prefill entries with `sample` 1, the forks. Behind a
    row's token stands one for each draft: what was drawn there, -1 behind the first draft that was wrong."""
    elapsed_us: _Micros
    """Microseconds of wall time that the step took in the worker."""
    logprobs: dict[int, TopLogprobs] | None = None
    """Log-probabilities by index into `tokens`, for the sequences that asked for them."""
    plan_copies: _Flag = 0
    """1: the decode plan was rebuilt for this step; 0: the one before was advanced (ChunkAttention §3.3)."""
    kv_bytes_read: _Bytes = 0
    """Bytes of KV that decode attention read on rank 0, all layers; a chunk that is read once counts once."""
    beams: dict[int, BeamStep] | None = None
    """Candidates of each beam search, by the search's id. The tokens of its rows stand in `tokens`, too."""
    prompt_logprobs: dict[int, PromptLogprobs] | None = None
    """Log-probabilities by sequence, for the prompt positions that this step computed."""
    moved_us: _Micros = 0
    """Microseconds of wall time that the copying of `moved_blocks` took, beside the steps."""
    moved_blocks: _Count = 0
    """Number of blocks that were saved or loaded since the last result."""
    waited_us: _Micros = 0
    """Microseconds for which the step waited for saves and loads, part of `elapsed_us`."""
    forced: dict[int, bytes] | None = None
    """By sequence, int32 ids that spell what its grammar demands next; told once (`CompileGrammar.foretell`)."""
    replayed: _Flag = 0
    """1: the step was a graph on a GPU."""


class GrammarReady(msgspec.Struct, array_like=True, frozen=True, tag="grammar_ready"):
    """Rank 0 has compiled a grammar, or has found that it cannot be compiled."""

    grammar: int
    problem: str = ""


class MoveOutcome(msgspec.Struct, array_like=True, frozen=True):
    """The result of a `TierMove` on one rank."""

    id: int
    status: int
    """0: the move is done, and what was read is verified; 1: the tier does not hold the whole chunk (any more); 2:
    the tier failed."""
    elapsed_us: _Micros = 0
    """Microseconds from the start of the move, not from its order, to its end."""
    detail: str = ""
    """Why the tier failed."""


class MovesDone(msgspec.Struct, array_like=True, frozen=True, tag="moved"):
    """A rank has carried out some moves."""

    rank: int
    epoch: int
    outcomes: list[MoveOutcome]


class Probed(msgspec.Struct, array_like=True, frozen=True, tag="probed"):
    """Answer to a `Probe`: how many of its first names this rank's remote tier has; -1: it is not reachable."""

    rank: int
    epoch: int
    probe: int
    present: int
    detail: str = ""


class AdapterReady(msgspec.Struct, array_like=True, frozen=True, tag="adapter_ready"):
    """A rank has read an adapter, or has found that it cannot be used."""

    rank: int
    ticket: int
    """Number of the order (`LoadAdapter`)."""
    key: bytes = b""
    """Key of the adapter: it depends on its name and the content of its files."""
    problem: str = ""
    """Why it cannot be used, in `TEXT_CHARACTERS_MAX` characters at most; "": it can."""


class WorkerFailed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """A rank cannot go on; it exits after this."""

    rank: int
    reason: str
    incarnation: bytes
    """Incarnation of the process, as in `WorkerHello`; a message from a process that has been replaced is
    ignored."""
    is_consequence: bool = False
    """Whether this rank is sound and leaves only because another rank, or the network to it, failed."""


EngineReport = GrammarReady | MovesDone | Probed
WorkerReport = WorkerHello | WorkerReady | LoadProgress | StepResult | EngineReport | AdapterReady | WorkerFailed
