"""What a router receives from a controller (ROUTER → DEALER, MessagePack arrays, tagged).

`Outputs` is one message per step and router, not one per token. Every message carries the stream's
sequence number; a router that sees a gap has lost tokens and fails the streams of that controller.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from trunkline.controller.messages import TopLogprobs


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


class Outputs(msgspec.Struct, array_like=True, frozen=True, tag="outputs"):
    """What a step brought. Order of meaning: started, tokens, finished."""

    seq: int
    requests: bytes = b""
    """uint32 little-endian: for each token, the request it belongs to (each at most once)."""
    tokens: bytes = b""
    """int32."""
    started: list[Started] = []
    finished: list[Finished] = []
    logprobs: dict[int, TopLogprobs] | None = None
    """By index into `tokens`."""


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


class Flushed(msgspec.Struct, array_like=True, frozen=True, tag="flushed"):
    """Answer to `FlushCache`."""

    seq: int
    ticket: int
    blocks_freed: int


RouterMessage = Outputs | State | Flushed
