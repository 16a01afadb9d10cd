"""What a controller receives: requests from routers (ROUTER socket), results from workers (PULL socket).

All are MessagePack arrays, tagged; integer arrays travel as little-endian int32 bytes. See docs/protocol.md.
"""

from __future__ import annotations

import msgspec

from trunkline.worker.messages import Sampling


class Submit(msgspec.Struct, array_like=True, frozen=True, tag="submit"):
    """A router asks for tokens. Answered by `Started` or `Finished`, then by token outputs."""

    request: int
    """Chosen by the router, 32 bits, unique among its live requests."""
    tokens: bytes
    """int32 prompt (and, when a stream is resumed, output so far)."""
    prompt_len: int
    """Boundary between prompt and output in `tokens`; equal to their number for a new request."""
    max_tokens: int
    """Output tokens at most, those already in `tokens` included."""
    sampling: Sampling
    stop_token_ids: list[int] = []
    """Sampling one of these ends the request (the model's own end tokens are among them, unless ignored)."""
    salt: bytes = b""
    """Requests share KV only under the same salt."""


class Abort(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """A router no longer wants tokens of a request. Aborting an ended or unknown request does nothing."""

    request: int


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="ping"):
    """A router is alive (once a second). Answered by `State`; a silent router's requests are aborted."""

    seq: int


class FlushCache(msgspec.Struct, array_like=True, frozen=True, tag="flush"):
    """Drop every cached chunk that no running request holds. Answered by `Flushed`."""

    ticket: int


RouterRequest = Submit | Abort | Ping | FlushCache


class TopLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities (natural, after penalties and bias, before temperature) at one output position."""

    token_logprob: float
    top_ids: bytes
    """int32, most likely first."""
    top_logprobs: bytes
    """float32, little-endian."""


class WorkerReady(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """A rank has loaded its shard and subscribed. The group starts when all ranks have said so."""

    rank: int
    epoch: int
    pid: int
    num_blocks: int
    block_bytes: int
    """Bytes of one block on this rank."""
    device: str


class LoadProgress(msgspec.Struct, array_like=True, frozen=True, tag="progress"):
    """A rank is still starting; shown to the person who waits."""

    rank: int
    stage: str
    fraction: float


class StepResult(msgspec.Struct, array_like=True, frozen=True, tag="result"):
    """Rank 0 finished a step. Every step gets one, in order."""

    step: int
    epoch: int
    tokens: bytes
    """int32 sampled token ids: first the decode rows in order, then the prefill entries with `sample` 1."""
    elapsed_us: int
    """Wall time of the step in the worker."""
    logprobs: dict[int, TopLogprobs] | None = None
    """By index into `tokens`, for the sequences that asked."""
    plan_copies: int = 0
    """1 if the decode plan was rebuilt for this step, 0 if the last was only advanced (ChunkAttention §3.3)."""
    kv_bytes_read: int = 0
    """KV that decode attention read on rank 0, all layers; a shared chunk that is read once counts once."""


class WorkerFailed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """A rank cannot go on; it exits after this."""

    rank: int
    reason: str


WorkerReport = WorkerReady | LoadProgress | StepResult | WorkerFailed
