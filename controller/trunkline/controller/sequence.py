"""A sequence: tokens, limits, and what it owns of the tree and the pool.

Its context is `path` (whole chunks in the tree, shared with whoever has the same tokens) followed by
`private` blocks (chunks not yet full, or not yet known in full). Only `path[-1]` is held: the tree keeps
what is above a held node. Later issues give a request several sequences (samples, beams).
"""

from __future__ import annotations

from enum import Enum, auto

import numpy as np

from trunkline.controller.tree import Node
from trunkline.kvstore.layout import BlockId, Int32Array, blocks_for
from trunkline.worker.messages import Sampling


class Phase(Enum):
    """Where a sequence is in its life; preemption takes it from PREFILL or DECODE back to WAITING."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    ENDED = auto()


class TokenBuffer:
    """Append-only int32 tokens with amortised growth."""

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

    def view(self, start: int = 0, stop: int | None = None) -> Int32Array:
        return self._data[start : self.count if stop is None else stop]

    def to_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Little-endian int32 bytes: the form of chunk keys and of messages."""
        return self.view(start, stop).astype("<i4", copy=False).tobytes()


class Sequence:
    """One stream of tokens. State is changed by the scheduler and the engine only."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "computed",
        "limit",
        "path",
        "phase",
        "private",
        "prompt_len",
        "request",
        "resident",
        "root",
        "salt",
        "sampling",
        "slot",
        "started",
        "stay",
        "stop_ids",
        "tokens",
        "waits_on",
    )

    def __init__(
        self, request: int, arrival: int, tokens: Int32Array, prompt_len: int, limit: int, sampling: Sampling
    ) -> None:
        self.request = request
        self.arrival = arrival
        """Rank in the first-come-first-served order; kept through preemption."""
        self.tokens = TokenBuffer(tokens)
        self.prompt_len = prompt_len
        self.limit = limit
        """Total tokens at which the sequence ends."""
        self.sampling = sampling
        self.stop_ids: tuple[int, ...] = ()
        self.salt = b""
        self.root: Node
        """Set at admission."""
        self.waits_on: Node | None = None
        """The chunk somebody else is computing for us."""
        self.phase = Phase.WAITING
        self.stay = 0
        """Id under which the workers know it during this stay in the batch; 0 while it is not there."""
        self.slot = -1
        """Index in `DecodeRows` from its last prefill step on."""
        self.path: list[Node] = []
        self.private: list[BlockId] = []
        self.resident = 0
        """Tokens whose KV was found at admission."""
        self.computed = 0
        """Tokens whose KV exists or is planned, while in prefill."""
        self.cached_tokens = -1
        """Prompt tokens among `resident` at the first admission, as reported to the client; -1 before it."""
        self.started = False

    @property
    def anchor(self) -> Node:
        """The node this sequence holds while it runs."""
        return self.path[-1] if self.path else self.root

    def block_table(self) -> list[BlockId]:
        return [node.block for node in self.path] + self.private

    def blocks_needed(self, chunk_size: int) -> int:
        """Blocks for all tokens known now (what admission reserves)."""
        return blocks_for(self.tokens.count, chunk_size)
