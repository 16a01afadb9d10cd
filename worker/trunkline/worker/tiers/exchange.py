"""What the ranks of different groups say to each other about KV: questions, answers, checksums.

      puller     Ask: names, heads ──────────────────────────────► exporter   DEALER → ROUTER
                 Told: which it has, checksums, and either
                       where they are in its memory (same host),
                       or a frame of bytes for each ◄─────────────

Chunks are found by name. Nothing is held for the transfer: bytes that were overwritten meanwhile do not fit their
checksum. How much comes at a time is up to the puller: it asks for few bytes before it has got those.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from trunkline.kvstore.chunks import NAME_BYTES

CHUNKS_MAX: Final = 64
"""Largest number of chunks of a question."""
CREDIT_BYTES: Final = 8 << 20
"""Largest number of bytes of payload that a question may ask for, unless it asks for a single chunk."""
QUESTION_BYTES_MAX: Final = 4096
QUESTIONS_OPEN: Final = 2
"""Number of questions that a puller asks before the first one is answered."""


class Ask(msgspec.Struct, array_like=True, frozen=True, tag="ask"):
    """Question for chunks."""

    id: int
    """Number of the question, of the puller's choice."""
    fingerprint: bytes
    """The puller's `exchange_fingerprint`."""
    first: int
    """Index of the first KV head that is wanted, among the heads of the model."""
    stop: int
    """Index behind the last one."""
    names: bytes
    """Names of the chunks, `NAME_BYTES` each."""
    node: str
    """Kernel and process namespace of the puller (`trunkline.runtime.process.node_id`), if it can read memory of
    other processes there; "": it wants bytes."""


class Found(msgspec.Struct, array_like=True, frozen=True):
    """An exporter's answer about one chunk."""

    index: int
    """Number of the chunk in the question."""
    checksum: bytes = b""
    """`checksum` of the heads that are wanted; empty: the exporter does not have the chunk."""
    address: int = 0
    """Address of the exporter's whole part of the chunk in its memory; 0: the bytes of the heads are a frame."""


class Told(msgspec.Struct, array_like=True, frozen=True, tag="told"):
    """Answer to an `Ask`, or a part of it: chunks that are still being copied to host memory come later. Behind
    this message's frame, each chunk that is found and has no address has a frame of its own, in the same order."""

    id: int
    found: list[Found]
    pid: int = 0
    """Process in whose memory the addresses are."""
    refusal: str = ""
    """Why the question is not answered; "" if it is."""


_HEADS: Final = struct.Struct("<II")


def checksum(fingerprint: bytes, name: bytes, first: int, rows: NDArray[np.uint8]) -> bytes:
    """Return the digest of some heads of a chunk, 16 bytes: xxHash over everything that says which KV this is, and
    the bytes. It is computed by updates of a state, during which other threads run.

    Args:
        fingerprint: The `exchange_fingerprint`.
        first: Index of the first of the heads, among the heads of the model.
        rows: uint8 `[stretches, heads, bytes of a head]`, as in `trunkline.kvstore.shards.rows_of`.
    """
    state = xxhash.xxh3_128(fingerprint)
    state.update(name + _HEADS.pack(first, rows.shape[1]))
    if rows.flags.c_contiguous:
        state.update(rows.data)
    else:
        for row in rows:
            state.update(np.ascontiguousarray(row).data)
    return state.digest()


def names_of(packed: bytes) -> list[bytes]:
    """Return the names in a field of a message."""
    return [packed[start : start + NAME_BYTES] for start in range(0, len(packed), NAME_BYTES)]
