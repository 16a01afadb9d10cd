"""What a router receives from a controller (ROUTER → DEALER, MessagePack arrays, tagged).

`Outputs` is one message per step and router, not one per token. Every message carries the stream's
sequence number; a router that sees a gap has lost tokens and fails the streams of that controller.
"""

from __future__ import annotations

from enum import IntFlag, StrEnum
from typing import Final

import msgspec

from trunkline.controller.messages import PromptLogprobs, TopLogprobs

PROTOCOL: Final = 1
"""Of the messages between routers, controllers and workers. It grows when the old form would be misunderstood; new
fields at the end, which have defaults, are understood by both sides."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """A stop token was sampled; it is the request's last token."""
    LENGTH = "length"
    """`max_tokens` or the context's end was reached."""
    ABORT = "abort"
    """Its router asked for that."""
    INVALID = "invalid"
    """It can never run here; `detail` says why (HTTP 400)."""
    QUEUE_FULL = "queue_full"
    """Too many requests wait (HTTP 429)."""
    DRAINING = "draining"
    """The controller takes no new requests (HTTP 503)."""
    ENGINE_FAILED = "engine_failed"
    """The workers died (HTTP 503)."""


class Started(msgspec.Struct, array_like=True, frozen=True):
    """A request's whole prompt has been planned (once, whatever preemptions follow): its first token is next."""

    request: int
    cached_tokens: int
    """Prompt tokens whose KV was found, not computed."""
    tier_tokens: list[int] = []
    """`cached_tokens` by where they were: device, host, disk, remote (`trunkline.kvstore.tier.TierKind`)."""
    miss: str = ""
    """Why the others were not found: a `MissReason`; "" if all were (but the last, which is always computed)."""
    miss_token: int = 0
    """Index in the prompt of the first token that was not found."""
    exact: bool = True
    """Whether all KV found was computed with exactly the tokens in sight that the request sees before it. False:
    kept from before a cut."""
    cut: str = ""
    """Of a request with drops: "kept" (cached KV is used behind the cut), "recomputed" (it was not there, or the
    model's positions cannot shift); "" without drops."""
    module_tokens: int = 0
    """Prompt tokens that are parts of modules; those that were not computed for this request are among
    `cached_tokens`."""
    queued_s: float = 0.0
    """Seconds from its coming to its first admission."""


class MissReason(StrEnum):
    """Why prompt tokens were not found in any tier."""

    NEW = "new"
    """Nothing that begins like this has been here, as far as is remembered."""
    DIVERGED = "diverged"
    """Other prompts agree up to `miss_token`."""
    EVICTED = "evicted"
    """It was here and made room for others."""
    TTL = "ttl"
    """It was here and had not been used for too long."""
    SALT = "salt"
    """Nothing is cached under the request's salt."""
    SLOW = "slow"
    """It is in a tier from which it would have come later than by computing it."""
    LOST = "lost"
    """A tier held it, but could not give it back whole."""
    OFF = "off"
    """The prefix cache is off, or the request must compute all its prompt (prompt log-probabilities)."""


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """A request's end: nothing follows for it."""

    request: int
    reason: str
    """A `FinishReason`."""
    detail: str = ""
    sample: int = -1
    """Which of its samples ended; the request ends with its last one. -1: all of it."""
    param: str = ""
    """The client's parameter that is wrong, if `reason` is `INVALID` and one is."""


class Hypothesis(msgspec.Struct, array_like=True, frozen=True):
    """One result of a beam search."""

    tokens: bytes
    """int32 output, its stop token included."""
    score: float
    """Sum of log-probabilities, divided by length to the power of the length penalty."""
    logprob: float
    """The sum."""
    reason: str
    """`STOP` or `LENGTH`."""


class BeamsFound(msgspec.Struct, array_like=True, frozen=True):
    """A beam search's results, best first; its `Finished` follows."""

    request: int
    hypotheses: list[Hypothesis]


class PromptScored(msgspec.Struct, array_like=True, frozen=True):
    """Some positions of a request's prompt were scored. After a preemption a position may come again."""

    request: int
    logprobs: PromptLogprobs


class Outputs(msgspec.Struct, array_like=True, frozen=True, tag="outputs"):
    """What a step brought. Order of meaning: started, tokens, finished."""

    seq: int
    requests: bytes = b""
    """uint32 little-endian: for each token, the request it belongs to (each sample at most once)."""
    tokens: bytes = b""
    """int32."""
    started: list[Started] = []
    finished: list[Finished] = []
    logprobs: dict[int, TopLogprobs] | None = None
    """By index into `tokens`."""
    samples: bytes = b""
    """uint16 little-endian: for each token, the sample of its request; empty: 0 for all."""
    beams: list[BeamsFound] = []
    prompt_logprobs: list[PromptScored] = []


class TierState(msgspec.Struct, array_like=True, frozen=True):
    """One tier's size and totals since the start."""

    name: str
    """"device", "host", "disk" or "remote"."""
    slots: int
    """Chunks that it can hold; 0: not known (remote)."""
    used: int
    hit_tokens: int
    """Prompt tokens found there."""
    writes: int
    """Chunks moved into it …"""
    reads: int
    """… and out of it towards the device."""
    evictions: int
    """Chunks that left it to make room, or because their time was over."""
    failures: int
    """Moves that failed, and reads that did not bring back what was written."""
    problem: str = ""
    """Why it is not used at present."""


class State(msgspec.Struct, array_like=True, frozen=True, tag="state"):
    """The controller's load and health, in answer to each `Ping` and when it changes."""

    seq: int
    status: str
    """"starting", "ready", "draining" or "failed"."""
    detail: str
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    """Blocks that hold reusable KV no running sequence refers to."""
    prompt_tokens: int
    """Counters since the start: prompt tokens admitted, …"""
    cached_tokens: int
    """… of them found in the tree, …"""
    output_tokens: int
    """… tokens sampled and published, …"""
    preemptions: int
    steps: int
    plan_copies: int
    """Steps for which the decode plan was rebuilt and copied to the kernels."""
    kv_bytes_read: int
    """By decode attention on rank 0."""
    evicted_blocks: int
    max_context: int
    """Longest prompt + output this group can hold, in tokens."""
    blocks_logical: int = 0
    """Entries of all running sequences' block tables: what they would hold if none shared (`blocks_total -
    blocks_free - blocks_cached` is what they do hold)."""
    forks: int = 0
    """Sequences that came out of another's prompt."""
    swapped: int = 0
    """Preemptions that chose the host pool, …"""
    blocks_saved: int = 0
    """… device blocks copied to it, …"""
    blocks_loaded: int = 0
    """… and back."""
    host_slots: int = 0
    host_slots_free: int = 0
    max_rows: int = 0
    """Sequences that can decode at once: the most samples or beams a request may have."""
    tiers: list[TierState] = []
    misses: dict[str, int] = {}
    """Requests by `MissReason`, since the start."""
    positions_shift: bool = True
    """Whether KV can be kept when the tokens before it are cut off."""
    texts_encoded: int = 0
    """Texts of modules that were computed since the start, …"""
    text_tokens_encoded: int = 0
    """… and their tokens."""
    texts_encoding: int = 0
    """Texts that are being computed, or wait for it."""
    chunks_pinned: int = 0
    """Chunks of schemas that are pinned."""
    epoch: int = 0
    """Of the worker group; another one than before: what was in its memory is gone."""
    fingerprint: bytes = b""
    """Of the model, with `dtype` and `chunk_size` what chunk names begin with (`trunkline.kvstore.chunks`)."""
    dtype: str = ""
    chunk_size: int = 0
    prefill_us: float = 0.0
    """Time that computing one more prompt token takes, as measured, …"""
    load_us: list[float] = []
    """… and that loading one takes, by `TierKind`, from device (0.0) to remote; 0.0: not known."""
    queued_tokens: int = 0
    """Prompt tokens of all requests that have still to be computed."""
    requests: int = 0
    """Requests that have not ended, of all routers."""
    block_bytes: int = 0
    """Of a chunk, all ranks together; 0: not known."""
    protocol: int = 1
    """What this controller speaks (`PROTOCOL`); it is in its place in all versions."""


class Flushed(msgspec.Struct, array_like=True, frozen=True, tag="flushed"):
    """Answer to `FlushCache`."""

    seq: int
    ticket: int
    blocks_freed: int


class Prefetched(msgspec.Struct, array_like=True, frozen=True, tag="prefetched"):
    """Answer to `Prefetch`."""

    seq: int
    ticket: int
    known_tokens: int
    """Of the prompt, in any tier, …"""
    coming_tokens: int
    """… of them being fetched into host memory now."""


class ModulesReply(msgspec.Struct, array_like=True, frozen=True, tag="modules"):
    """Answer to `ModulesCall`."""

    seq: int
    ticket: int
    status: str
    """"ok"; "failed": `detail` says why, and what could be computed is there; "quota": all is there, but is not
    pinned, because more would be than this group allows; "cancelled"."""
    detail: str = ""
    tiers: bytes = b""
    """int32 per text: the slowest tier that one of its chunks has to come from (`TierKind`); -1: not all is
    there."""
    blocks: bytes = b""
    """int32 per text: chunks that hold it."""
    computed_tokens: int = 0
    """For this call, placeholders included."""
    block_bytes: int = 0
    """Of a chunk, all ranks together."""


class Record(msgspec.Struct, array_like=True, frozen=True):
    """See `RecordCall`."""

    id: str
    version: int
    value: bytes
    created: float
    """Seconds since the epoch (UTC)."""
    used: float
    expires: float
    """0: never."""


class RecordReply(msgspec.Struct, array_like=True, frozen=True, tag="record"):
    """Answer to `RecordCall`."""

    seq: int
    ticket: int
    status: str
    """"ok"; "missing"; "exists"; "busy": somebody has acquired it; "conflict": `version` is not the present one;
    "failed": it could not be stored."""
    records: list[Record] = []
    detail: str = ""


class KvEvents(msgspec.Struct, array_like=True, frozen=True, tag="kv_events"):
    """What changed among a controller's chunks, on its PUB socket: after each of the controller's turns in which
    something did, and otherwise as a heartbeat, with the number of the last one that told something."""

    stream: bytes
    """Random, of this controller process: after a restart nothing of the old one counts."""
    seq: int
    """Number of this event, from 1 on; heartbeats have that of the event before them."""
    names: bytes = b""
    """16 bytes for each chunk (`trunkline.kvstore.chunks`; for texts of modules see docs/protocol.md)."""
    tiers: bytes = b""
    """One byte for each: in which tiers it is now, as a sum of `1 << TierKind`; 0: in none. The remote tier, which
    all share, is not told."""
    requests: int = 0
    """As in `State`."""
    queued_tokens: int = 0


class EventsReply(msgspec.Struct, array_like=True, frozen=True, tag="events"):
    """Answer to `EventsCall`."""

    seq: int
    ticket: int
    stream: bytes
    upto: int
    """All events up to this one are in here (or in this snapshot)."""
    snapshot: bool
    """True: all chunks that there are, and nothing known before counts; False: what changed after `after`."""
    names: bytes
    tiers: bytes
    more: bool
    """There is another page."""


class NodeFlag(IntFlag):
    """What a node of a `TreeDescription` is."""

    MODULE = 1
    """Part of a text of a module."""
    CUT = 2
    """KV that is kept behind a cut."""
    OWN = 4
    """Own tokens of a prompt that has modules."""
    SALTED = 8
    """In the tree of a salt."""
    COMPUTING = 16
    """It is being computed."""


class TreeDescription(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="tree"):
    """Answer to `DescribeTree`. A node is a run of chunks without a branch, all in the same tiers and used by the
    same sequences; one comes after the node above it, and before those that were used less lately. One entry per
    node in each array; without workers there are none."""

    seq: int
    ticket: int
    chunk_size: int = 0
    total_chunks: int = 0
    """In the whole tree."""
    names: bytes = b""
    """16 bytes each: of the first chunk."""
    parents: bytes = b""
    """int32: index of the node above; -1: it begins a prompt, or a text."""
    tokens: bytes = b""
    """int32."""
    chunks: bytes = b""
    """int32."""
    tiers: bytes = b""
    """uint8: sum of `1 << TierKind`, the remote tier included."""
    flags: bytes = b""
    """uint8: `NodeFlag`s."""
    users: bytes = b""
    """int32: running sequences that hold it, or something below it."""
    ages: bytes = b""
    """float32: seconds since its last use."""
    hidden: bytes = b""
    """int32: nodes right below it that are not described."""
    heads: bytes = b""
    """int32: first tokens of all nodes, one after the other, …"""
    head_tokens: bytes = b""
    """… and uint8: how many of them are each one's."""


RouterMessage = EventsReply | Outputs | State | Flushed | Prefetched | ModulesReply | RecordReply | TreeDescription
