"""The messages that a router receives from controllers (ROUTER → DEALER, MessagePack arrays, tagged).

`Outputs` is one message per step and router, not one per token. Every message carries the stream's
sequence number; a router that sees a gap has lost tokens and fails the streams of that controller.
"""

from __future__ import annotations

from enum import IntFlag, StrEnum
from typing import Final

import msgspec

from trunkline.controller.reports import PromptLogprobs, TopLogprobs

PROTOCOL: Final = 2
"""Version of the messages between routers, controllers and workers. It grows when the other side would
misunderstand a new form. New fields at the end with defaults do not need that: both sides understand them."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """A stop token was sampled; it is the request's last token."""
    LENGTH = "length"
    """`max_tokens` or the context's end was reached."""
    ABORT = "abort"
    """The router has aborted the request."""
    INVALID = "invalid"
    """The controller can never run the request; `Finished.detail` says why (HTTP 400)."""
    QUEUE_FULL = "queue_full"
    """The controller has refused the request, because too many requests wait (HTTP 429)."""
    DRAINING = "draining"
    """The controller has refused the request, because it takes no new ones (HTTP 503)."""
    ENGINE_FAILED = "engine_failed"
    """The workers that computed the request were lost (HTTP 503)."""


class Started(msgspec.Struct, array_like=True, frozen=True):
    """The whole prompt of a request has been planned, so its first token is next. It is sent once per request,
    even if the request is preempted later."""

    request: int
    cached_tokens: int
    """Prompt tokens whose KV was found, not computed."""
    tier_tokens: list[int] = []
    """Number of cached prompt tokens by the tier in which they were found: device, host, disk, remote, peer
    (`trunkline.kvstore.tier.TierKind`)."""
    miss: str = ""
    """Why the other prompt tokens were not found: a `MissReason`; "": all were, but for the last one, which is
    always computed."""
    miss_token: int = 0
    """Index in the prompt of the first token that was not found."""
    exact: bool = True
    """Whether all KV that was found is the same as if it were computed now. False: some of it was kept from before
    a cut, and was computed with tokens in sight that the request does not see."""
    cut: str = ""
    """What happened to the KV behind a cut: "kept" (it is used), "recomputed" (it was not cached, or the model's
    positions cannot shift); "": the request drops nothing."""
    module_tokens: int = 0
    """Prompt tokens that are parts of modules. Those of them that were not computed for this request count in
    `cached_tokens`, too."""
    queued_s: float = 0.0
    """Seconds from the request's arrival at the controller to its first admission."""


class MissReason(StrEnum):
    """Why prompt tokens were not found in any tier."""

    NEW = "new"
    """The controller remembers no prompt with the same beginning."""
    DIVERGED = "diverged"
    """Other prompts agree with this one only up to `miss_token`."""
    EVICTED = "evicted"
    """The controller had the KV, and has evicted it."""
    TTL = "ttl"
    """The controller had the KV, and has dropped it because nothing had used it for too long."""
    SALT = "salt"
    """Nothing is cached under the request's salt."""
    SLOW = "slow"
    """The KV is in a tier from which loading it would take longer than computing it."""
    LOST = "lost"
    """A tier held the KV, but could not return it undamaged."""
    OFF = "off"
    """The prefix cache is off, or the request must compute its whole prompt (for log-probabilities of the
    prompt)."""


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """A request, or one of its samples, has ended. No message about it follows."""

    request: int
    reason: str
    """Why the request ended: a `FinishReason`."""
    detail: str = ""
    sample: int = -1
    """Index of the sample that has ended; the request ends with its last sample. -1: the whole request."""
    param: str = ""
    """The client's parameter that is wrong, if `reason` is `INVALID` and one is."""


class Hypothesis(msgspec.Struct, array_like=True, frozen=True):
    """One result of a beam search."""

    tokens: bytes
    """The output as int32, including its stop token."""
    score: float
    """Sum of the tokens' log-probabilities, divided by the length to the power of the length penalty."""
    logprob: float
    """Sum of the tokens' log-probabilities."""
    reason: str
    """Why the result ended: `FinishReason.STOP` or `LENGTH`."""


class BeamsFound(msgspec.Struct, array_like=True, frozen=True):
    """The results of a beam search, best first. Its `Finished` follows."""

    request: int
    hypotheses: list[Hypothesis]


class PromptScored(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of some positions of a prompt. After a preemption a position may be sent again."""

    request: int
    logprobs: PromptLogprobs


class DraftsTried(msgspec.Struct, array_like=True, frozen=True):
    """A step has tried drafts for a sample of a request. Comes with the tokens that it brought."""

    request: int
    tried: int
    accepted: int
    """Drafts among these that were the tokens drawn."""
    is_prediction: bool = False
    """Whether they are from the request's `prediction` (its first one, if they are from several texts)."""


class Outputs(msgspec.Struct, array_like=True, frozen=True, tag="outputs"):
    """All that a step has produced for one router. Apply `started` and `drafts` first, then the tokens, then
    `finished`."""

    seq: int
    requests: bytes = b""
    """uint32 little-endian: for each token the request that it belongs to. A sample has several tokens, in their
    order, if drafts were accepted (`StepPlan.drafts`)."""
    tokens: bytes = b""
    """int32: the tokens that were sampled, in the order of `requests`."""
    started: list[Started] = []
    finished: list[Finished] = []
    logprobs: dict[int, TopLogprobs] | None = None
    """Log-probabilities by index in `tokens`."""
    samples: bytes = b""
    """uint16 little-endian: for each token the sample of its request; empty: sample 0 for all."""
    beams: list[BeamsFound] = []
    prompt_logprobs: list[PromptScored] = []
    drafts: list[DraftsTried] = []


class TierState(msgspec.Struct, array_like=True, frozen=True):
    """The size of a tier, and its totals since the start."""

    name: str
    """"device", "host", "disk" or "remote"."""
    slots: int
    """Chunks that the tier can hold; 0: not known (remote)."""
    used: int
    hit_tokens: int
    """Prompt tokens that were found in the tier."""
    writes: int
    """Chunks moved into the tier."""
    reads: int
    """Chunks moved out of the tier towards the device."""
    evictions: int
    """Chunks that left the tier to make room, or because their time was over."""
    failures: int
    """Number of moves of chunks that failed, and of reads that did not bring back what was written."""
    problem: str = ""
    """Why the tier is not used at present; "": it is used."""


class GroupIdentity(msgspec.Struct, array_like=True, frozen=True):
    """What a controller says of its group, so that routers do not send it what is meant for another. A field is ""
    if the controller was not told."""

    member: str = ""
    """The id of the group as a member of the cluster (`membership/member.py`)."""
    model: str = ""
    """The name by which requests ask for the group's model."""
    tokenizer: str = ""
    """The digest of the model's tokenizer (`kvstore.fingerprint.tokenizer_digest`)."""
    weights: str = ""
    """The digest of the model's configuration and weights as they are stored, whatever they are rounded to."""
    is_named: bool = False
    """Whether the name was given, so that it is not just that of the model's folder."""


class LoadedAdapter(msgspec.Struct, array_like=True, frozen=True):
    """An adapter that a group has."""

    name: str
    path: str
    key: bytes
    """Begins the salts of requests that use it (`trunkline.kvstore.adapters`)."""


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
    """Blocks with reusable KV to which no running sequence refers."""
    prompt_tokens: int
    """Prompt tokens admitted since the start."""
    cached_tokens: int
    """Prompt tokens found in the tree since the start."""
    output_tokens: int
    """Tokens sampled and published since the start."""
    preemptions: int
    steps: int
    plan_copies: int
    """Steps for which the decode plan was rebuilt and copied to the kernels."""
    kv_bytes_read: int
    """Bytes of KV that decode attention has read on rank 0 since the start."""
    evicted_blocks: int
    max_context: int
    """Largest number of tokens of prompt and output together that this group can hold."""
    blocks_logical: int = 0
    """Entries in the block tables of all running sequences: the blocks that they would hold without sharing. What
    they do hold is `blocks_total - blocks_free - blocks_cached`."""
    forks: int = 0
    """Number of sequences that were forked from the prompt of another sequence."""
    swapped: int = 0
    """Number of preemptions that moved blocks to the host pool."""
    blocks_saved: int = 0
    """Number of device blocks copied to the host pool."""
    blocks_loaded: int = 0
    """Number of blocks copied back from the host pool to the device."""
    host_slots: int = 0
    host_slots_free: int = 0
    max_rows: int = 0
    """Number of sequences that can decode at once, which also limits the samples or beams of a request."""
    tiers: list[TierState] = []
    misses: dict[str, int] = {}
    """Number of requests by `MissReason`, since the start."""
    positions_shift: bool = True
    """Whether KV can be kept when the tokens before it are cut off."""
    texts_encoded: int = 0
    """Texts of modules that were computed since the start."""
    text_tokens_encoded: int = 0
    """Tokens of the module texts that were computed since the start."""
    texts_encoding: int = 0
    """Texts of modules that are being computed or wait to be computed."""
    chunks_pinned: int = 0
    """Chunks of schemas that are pinned."""
    epoch: int = 0
    """Epoch of the worker group. When it changes, what was in the workers' memory is gone."""
    fingerprint: bytes = b""
    """Fingerprint of the model. Chunk names depend on it, on `dtype` and on `chunk_size`
    (`trunkline.kvstore.chunks`)."""
    dtype: str = ""
    chunk_size: int = 0
    prefill_us: float = 0.0
    """Measured time to compute one more prompt token; 0.0: not known."""
    load_us: list[float] = []
    """Measured time to load a prompt token, by `TierKind`, from device (0.0) to peer; 0.0: not known."""
    queued_tokens: int = 0
    """Prompt tokens of all requests that have still to be computed."""
    requests: int = 0
    """Requests that have not ended, of all routers."""
    block_bytes: int = 0
    """Size of a chunk, all ranks together; 0: not known."""
    protocol: int = 1
    """The controller's `PROTOCOL`. The field has this place in all versions."""
    group: GroupIdentity = GroupIdentity()
    exports: list[str] = []
    """Where the group's ranks export the chunks in their host memory, by rank; empty: they export none."""
    role: str = "both"
    """What the group is for: "both", "prefill" (it computes long prompts for others) or "decode"."""
    pulls_given_up: dict[str, int] = {}
    """Chunks that a peer was said to have and that requests had to do without, by reason: "slow" (a request did
    not wait any longer), "lost" (the peer did not have them) or "gone" (the peer did not answer)."""
    drafted_tokens: int = 0
    """Drafts of next tokens that steps have tried."""
    accepted_drafts: int = 0
    """Drafts that were the tokens drawn, so that each saved a step for its sequence."""
    adapters: list[LoadedAdapter] = []
    """The adapters that requests may use."""
    replayed_steps: int = 0
    """Steps that were graphs on GPUs; the others ran op by op, or on CPUs."""


class AdapterReply(msgspec.Struct, array_like=True, frozen=True, tag="adapter"):
    """Answer to `AdapterCall`. The `State` before it has the adapters as they are then."""

    seq: int
    ticket: int
    problem: str = ""
    """Why nothing was changed; "": it was done."""
    was_so: bool = False
    """Whether the group had the adapter already, or has none of this name to unload."""


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
    """Prompt tokens that are in some tier."""
    coming_tokens: int
    """Prompt tokens that are being fetched into host memory now."""


class ModulesReply(msgspec.Struct, array_like=True, frozen=True, tag="modules"):
    """Answer to `ModulesCall`."""

    seq: int
    ticket: int
    status: str
    """"ok"; "failed": `detail` says why, and some texts may be computed; "quota": all texts are computed but not
    pinned, because more chunks would be pinned than this group allows; "cancelled"."""
    detail: str = ""
    tiers: bytes = b""
    """int32 per text: the slowest tier (`TierKind`) among those that hold its chunks; -1: a chunk is in no
    tier."""
    blocks: bytes = b""
    """int32 per text: number of its chunks."""
    computed_tokens: int = 0
    """Tokens that were computed for this call, including placeholders."""
    block_bytes: int = 0
    """Size of a chunk, all ranks together."""


class KvEvents(msgspec.Struct, array_like=True, frozen=True, tag="kv_events"):
    """A message on a controller's PUB socket: what has changed among its chunks. It is sent after each turn of the
    controller in which a chunk has changed. Otherwise it is sent as a heartbeat, with the number of the last
    event."""

    stream: bytes
    """A random id of this controller process. After a restart the events of the old one do not count any more."""
    seq: int
    """Number of this event, from 1 on. A heartbeat has the number of the last event."""
    names: bytes = b""
    """16 bytes for each chunk (`trunkline.kvstore.chunks`; for texts of modules see docs/protocol.md)."""
    tiers: bytes = b""
    """One byte for each chunk of `names`: the tiers in which the chunk is now, as a sum of `1 << TierKind`; 0: in
    none. The remote tier, which all groups share, is left out."""
    requests: int = 0
    """Requests that have not ended, of all routers."""
    queued_tokens: int = 0


class EventsReply(msgspec.Struct, array_like=True, frozen=True, tag="events"):
    """Answer to `EventsCall`."""

    seq: int
    ticket: int
    stream: bytes
    upto: int
    """Number of the last event that is contained: in this reply or, if it is a page of a snapshot, in the
    snapshot."""
    snapshot: bool
    """Whether the reply is a page of a snapshot: of all chunks of the controller, which replace what was known
    before. False: it has the changes after the event `EventsCall.after`."""
    names: bytes
    tiers: bytes
    more: bool
    """Whether another page follows."""


class NodeFlag(IntFlag):
    """Flags of a node in a `TreeDescription`."""

    MODULE = 1
    """The node is part of a module's text."""
    CUT = 2
    """The KV of the node was kept behind a cut."""
    OWN = 4
    """The node holds the own tokens of a prompt with modules."""
    SALTED = 8
    """The node belongs to a salt."""
    COMPUTING = 16
    """The node is being computed."""


class TreeDescription(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="tree"):
    """Answer to `DescribeTree`. A node is a run of chunks without a branch, all in the same tiers and used by the
    same sequences. Each array has one entry per node. A node comes after its parent, and siblings come in the
    order of their last use, the latest first. Without workers there are no nodes."""

    seq: int
    ticket: int
    chunk_size: int = 0
    total_chunks: int = 0
    """Number of chunks in the whole tree."""
    names: bytes = b""
    """16 bytes each: name of the node's first chunk."""
    parents: bytes = b""
    """int32: index of the parent; -1: the node begins a prompt or a text."""
    tokens: bytes = b""
    """int32: number of the node's tokens."""
    chunks: bytes = b""
    """int32: number of the node's chunks."""
    tiers: bytes = b""
    """uint8: the tiers of the node's chunks as a sum of `1 << TierKind`, including the remote tier."""
    flags: bytes = b""
    """uint8: the node's flags as a sum of `NodeFlag`s."""
    users: bytes = b""
    """int32: number of running sequences that hold the node or a node below it."""
    ages: bytes = b""
    """float32: seconds since the node's last use."""
    hidden: bytes = b""
    """int32: number of the node's children that are left out."""
    heads: bytes = b""
    """int32: the first tokens of all nodes, one node after the other."""
    head_tokens: bytes = b""
    """uint8: how many tokens of `heads` each node has."""


class OfferedPath(msgspec.Struct, array_like=True, frozen=True):
    """A path of chunks below a root, as a group that is to have it finds it (`Prefetch.root`, its `tokens`)."""

    root: bytes
    """Key of the root: the salt, the cut or the text (docs/protocol.md, index of the disk tier)."""
    tokens: bytes
    """Token ids of the path's chunks, int32; all chunks are whole, but for the last one of a module's text."""
    uses: int = 0
    """Number of requests that used the path's last chunk and have left."""
    age: float = 0.0
    """Seconds since the path's last chunk was used."""
    names: bytes = b""
    """Names, 16 bytes each, of the path's first chunks that were moved behind a cut: they do not follow from root
    and tokens. The names of the others do."""


class Offers(msgspec.Struct, array_like=True, frozen=True, tag="offers"):
    """Answer to `OffersCall`: a page of paths. A `hot` path may be the beginning of another one of the list."""

    seq: int
    ticket: int
    paths: list[OfferedPath]
    more: bool
    """Whether another page follows."""


RouterMessage = (
    EventsReply | Outputs | State | Flushed | Prefetched | ModulesReply | TreeDescription | Offers | AdapterReply
)
