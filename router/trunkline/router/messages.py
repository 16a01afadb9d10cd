"""What a router receives from a controller (ROUTER → DEALER, MessagePack arrays, tagged).

`Outputs` is one message per step and router, not one per token. Every message carries the stream's
sequence number; a router that sees a gap has lost tokens and fails the streams of that controller.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from trunkline.controller.messages import PromptLogprobs, TopLogprobs


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


class Flushed(msgspec.Struct, array_like=True, frozen=True, tag="flushed"):
    """Answer to `FlushCache`."""

    seq: int
    ticket: int
    blocks_freed: int


RouterMessage = Outputs | State | Flushed
