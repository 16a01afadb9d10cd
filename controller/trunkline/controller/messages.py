"""The messages that a controller receives from routers (ROUTER socket).

All are MessagePack arrays, tagged; integer arrays travel as little-endian int32 bytes. See docs/protocol.md. What
workers report is in `reports.py`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from trunkline.worker.messages import Sampling

ENDED_CHARACTERS_MAX: Final = 128
"""Largest length of what a router tells of how an answer ended (`Told.ended`)."""
WENT_ON_NAMES: Final = 128
"""Largest number of names in a `WentOn`: more than most answers have chunks."""


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """The form that the output must have; kinds as in `trunkline.worker.messages.CompileGrammar`."""

    kind: str
    text: str
    param: str = "response_format"
    """The client's parameter that holds the grammar, for the error if it cannot be compiled."""
    spaced: bool = False
    """Whether white space may stand between the parts of JSON (see `CompileGrammar`)."""
    tenant: bytes = b""
    """Digest of the tenant's name: grammars of different tenants take turns to be compiled."""


class BeamSearch(msgspec.Struct, array_like=True, frozen=True):
    """Beam search instead of sampling, as `transformers` defines it (PagedAttention §4.4)."""

    width: int
    length_penalty: float = 1.0
    """A hypothesis' score is its sum of log-probabilities divided by its output length to this power."""
    early_stopping: bool | None = False
    """True: stop at `width` hypotheses; False: when an improvement is not likely; None ("never"): not possible."""


class Holder(msgspec.Struct, array_like=True, frozen=True):
    """A peer, which is another group, and a run of a prompt's chunks that it has in host memory. It may have lost
    them by the time that they are pulled."""

    member: str
    """Id of the group as a member of the cluster."""
    endpoints: list[str]
    """Where the group's ranks export KV, by rank (`State.exports`)."""
    start: int
    """Index in the path of the run's first chunk. Only whole chunks are counted, and the last one of a text. The
    path of a prompt with modules is its own tokens; that of a prompt with dropped ranges is what is left, as a
    plain prompt."""
    stop: int
    """Index behind the run's last chunk."""


class KeptChunks(msgspec.Struct, array_like=True, frozen=True):
    """KV that peers have kept behind the last cut of a prompt (CachedAttention §3.4)."""

    names: bytes
    """Names of the first chunks of the prompt's block table, 16 bytes each: what was computed behind the cut has
    names that depend on how much had been computed before it."""
    holders: list[Holder]
    """Peers that have these chunks; indices count the chunks of the block table."""


class ModuleText(msgspec.Struct, array_like=True, frozen=True):
    """A text of a schema whose KV is computed once, seeing only the texts before it on its path, and then serves
    every prompt that imports it (Prompt Cache §3.3)."""

    tokens: bytes
    """int32 token ids of the text, the placeholders of parameters included."""
    position: int
    """Position of the text's first token in the prompt."""
    parent: int = -1
    """Index, smaller than its own, of the text before it, which it sees with all that this one sees; -1: none."""
    seen: bytes = b""
    """int32 `[n, 2]`: ranges `[start, stop)` of the text's tokens, ascending and disjoint, that the request sees.
    Empty: the text is there only because other texts are computed behind it."""
    holders: list[Holder] = []
    """Peers that have chunks of the text, if they have computed it at this position."""


class PromptLayout(msgspec.Struct, array_like=True, frozen=True):
    """The positions of a prompt's tokens: of cached texts, and of the request's own between and behind them."""

    texts: list[ModuleText]
    runs: bytes
    """int32 `[n, 2]`: position and count of the request's own tokens (`Submit.tokens` up to `prompt_len`), in
    their order: ascending positions, none of them a seen text's. The last run stands behind all that is seen, and
    the output behind it."""
    ttl: float = 0.0
    """Seconds for which the texts are kept after the request's end; 0: the group's own setting."""
    relocate: bool = True
    """Whether a text that was computed at another distance from the texts above it may be used, too."""


class Submit(msgspec.Struct, array_like=True, frozen=True, tag="submit"):
    """A router's request for tokens. Answered by `Started` or `Finished`, then by token outputs."""

    request: int
    """Number of the request: chosen by the router, 32 bits, unique among the router's live requests."""
    tokens: bytes
    """int32 token ids of the prompt (and, when a stream is resumed, of the output so far)."""
    prompt_len: int
    """Boundary between prompt and output in `tokens`; equal to their number for a new request."""
    max_tokens: int
    """Largest number of output tokens, those already in `tokens` included."""
    sampling: Sampling
    stop_token_ids: list[int] = []
    """Ids of tokens that end the request when sampled, the model's own among them unless they are ignored."""
    salt: bytes = b""
    """Salt of the request's chunk names: requests share KV only under the same salt."""
    n: int = 1
    """Number of samples to draw (or, of a beam search, of hypotheses to return). Sample i > 0 has a seed derived
    from `sampling.seed` and i (`trunkline.controller.sequences.beam_search.sample_seed`)."""
    beam: BeamSearch | None = None
    priority: int = 0
    """Smaller goes first. Of equal ones, tenants take turns, and a tenant's own go in order of arrival."""
    grammar: Grammar | None = None
    drops: bytes = b""
    """int32 `[n, 2]`: ranges `[start, stop)` of `tokens`, ascending, disjoint and not touching, which the
    request must not see: what was cut off a context that is too long (CachedAttention §3.4) or discarded. All
    lie in the prompt, and its last token is in none. `max_tokens` and the context's limit count what is seen."""
    ttl: float = 0.0
    """Seconds for which the request's KV is kept after its end: at most, and at least while there is room. 0: the
    group's own setting."""
    layout: PromptLayout | None = None
    """Layout of a prompt with modules; then `tokens` are the request's own tokens only. Not together with
    `drops`."""
    request_id: str = ""
    """Id of the HTTP request, for the log; at most 128 characters."""
    trace: bytes = b""
    """The ids of the trace (16 bytes) and of the router's span (8 bytes), the parent of the controller's spans.
    Empty: the request is not traced."""
    tenant: str = ""
    """Name of the tenant that pays for the request; at most 128 bytes as UTF-8. Tenants with requests of the same
    priority take turns."""
    kv_floor: float = 0.0
    """Part of each tier of a group, from 0 to 1, that other tenants cannot evict (`trunkline.kvstore.shares`). It
    holds until the tenant's next request says otherwise."""
    kv_ceiling: float = 1.0
    """Part of each tier of a group, from 0 to 1, above which the tenant's chunks are evicted first."""
    holders: list[Holder] = []
    """Peers that have chunks of the prompt which this group may lack; of runs that overlap, the first counts."""
    kept: KeptChunks | None = None
    """What peers have kept behind the prompt's cut, if this group may lack it; only together with `drops`."""
    next_s: float = 0.0
    """Seconds from the end of the answer to the conversation's next request, as the client says; 0: not known."""
    is_last: bool = False
    """Whether the client says that no request of the conversation follows: its KV is evicted first."""
    prediction: bytes | None = b""
    """int32 token ids that the output may be like, as drafts; None: the request wants no drafts at all."""


class Abort(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """A router no longer wants tokens of a request. Aborting an ended or unknown request does nothing."""

    request: int
    sample: int = -1
    """The one sample to end, because of a stop string; the router hears no more of it. -1: all samples."""


class Told(msgspec.Struct, array_like=True, frozen=True, tag="told"):
    """How a request's answer ended, as its router reads the text: by which tools the client is to call. Sent after
    the end, without an answer. It says how soon the conversation may go on; for an unknown request it changes
    nothing."""

    request: int
    ended: str
    """The same text whenever answers end alike; at most `ENDED_CHARACTERS_MAX` characters."""


class WentOn(msgspec.Struct, array_like=True, frozen=True, tag="went_on"):
    """A prompt that this group has the beginning of is computed at another group, which has pulled what there is
    of it: the conversation goes on there. There is no answer."""

    names: bytes
    """Names of the last chunks of the prompt that this group has, `WENT_ON_NAMES` at most."""
    prompt_tokens: int


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping"):
    """Sent by each router once a second, and when streams end while the group drains. Answered by `State`. The
    requests of a silent router are aborted."""

    read: int
    """Number of the last message that the router has read over this connection; 0: none."""


class FlushCache(msgspec.Struct, array_like=True, frozen=True, tag="flush"):
    """Drop every cached chunk that no running request holds. Answered by `Flushed`."""

    ticket: int


class Prefetch(msgspec.Struct, array_like=True, frozen=True, tag="prefetch"):
    """A request with these tokens is expected: fetch what is known of it into host memory. Answered by
    `Prefetched`."""

    ticket: int
    tokens: bytes
    salt: bytes = b""
    drops: bytes = b""
    """Ranges of tokens that the request will not see, as in `Submit.drops`."""
    layout: PromptLayout | None = None
    """Layout of a prompt with modules, as in `Submit.layout`; `tokens` may be empty, to fetch the texts only."""
    holders: list[Holder] = []
    """Peers that have chunks of the prompt, as in `Submit.holders`."""
    root: bytes = b""
    """Key of the root below which `tokens` are to be found (`OfferedPath.root`); then `salt`, `drops` and `layout`
    are not looked at. Empty: they say which root it is."""
    names: bytes = b""
    """Names of the path's first chunks behind a cut, as in `OfferedPath.names`; only together with `root`."""


class Forget(msgspec.Struct, array_like=True, frozen=True, tag="forget"):
    """No request will have this prompt any more: drop the chunks that nothing else uses, from all tiers. There is
    no answer."""

    tokens: bytes
    salt: bytes = b""
    drops: bytes = b""
    """Ranges of tokens that requests did not see, as in `Submit.drops`."""
    layout: PromptLayout | None = None
    """Layout of a prompt with modules, as in `Submit.layout`; the texts themselves stay."""


class ModulesCall(msgspec.Struct, array_like=True, frozen=True, tag="modules"):
    """An operation on the cached texts of a schema. Answered by `ModulesReply`.

    Operations: "encode" (compute those that no tier has, as ordinary work beside the requests; answered when all
    is done; ended early by "cancel" with the same ticket), "look" (say where they are), "forget" (drop the chunks
    that nothing else uses, from all tiers), "unpin" (`texts` are not looked at).
    """

    ticket: int
    op: str
    texts: list[ModuleText] = []
    """The texts. A text's parent comes before it; `seen` is not looked at."""
    salt: bytes = b""
    pin_name: str = ""
    """Name for pins, of the router's choice. encode: pin the texts under this name instead of those that were
    pinned under it before, so that they stay in some tier; "": pin nothing. unpin: end the pins under this name.
    Pins are kept in memory: they end with the process, too."""
    ttl: float = 0.0
    """encode: seconds for which the texts are kept; 0: the group's own setting."""
    relocate: bool = True
    """Whether a text that was computed at another distance from the texts above it may be used, as in
    `PromptLayout`."""
    tenant: str = ""
    """encode: the tenant to whom the pins count."""
    pins: float = 1.0
    """encode: the part, from 0 to 1, of the group's room for pins that the tenant's pins may take, these
    included."""


class EventsCall(msgspec.Struct, array_like=True, frozen=True, tag="events"):
    """Question for the `KvEvents` that a router missed, or for all if it has seen none. Answered by `EventsReply`.

    A router asks page by page. The first answer says up to which event it goes; with that number as `upto` the
    router asks for the following pages.
    """

    ticket: int
    stream: bytes = b""
    """The stream whose events the router has; empty: it has none."""
    after: int = 0
    """Number of the last event of the stream that the router has."""
    page: int = 0
    """Page of a snapshot, from 0 on."""
    upto: int = 0
    """Number of the last event in the snapshot whose next page is wanted."""


class DescribeTree(msgspec.Struct, array_like=True, frozen=True, tag="describe"):
    """Question for a description of the chunk tree, for people. Answered by `TreeDescription`."""

    ticket: int
    nodes_max: int = 3000
    head_tokens: int = 0
    """Number of each node's first tokens to describe; they are part of a client's prompt."""


class OffersCall(msgspec.Struct, array_like=True, frozen=True, tag="offers"):
    """Question for paths of the chunk tree that other groups should have, too. Answered by `Offers`."""

    ticket: int
    kind: str
    """"live": what was used last comes first, for a group that leaves; "hot": what was used most comes first, for
    a group that is new."""
    page: int = 0
    """Page of the list, from 0 on. The list is made for page 0, and forgotten a minute after the last question."""


class Handed(msgspec.Struct, array_like=True, frozen=True, tag="handed"):
    """The router has handed over what it could of a group that drains, which need not wait any more. No answer."""


class AdapterCall(msgspec.Struct, array_like=True, frozen=True, tag="adapter"):
    """Load an adapter, or unload it. Answered by `AdapterReply`: when all ranks have it, or when no new request
    can use it any more."""

    ticket: int
    name: str
    path: str = ""
    """Its folder, on the hosts of the group; "": unload it."""


RouterRequest = (
    Submit
    | Abort
    | Told
    | WentOn
    | Ping
    | FlushCache
    | Prefetch
    | Forget
    | ModulesCall
    | EventsCall
    | DescribeTree
    | OffersCall
    | Handed
    | AdapterCall
)
